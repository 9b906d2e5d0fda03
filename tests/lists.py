"""Models whose blocks are handed lists and dicts that change later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from toys import Toy


class Mixing(nn.Module):
    """A block that takes the mean of what came before, of which it may take out, and to which it may add."""

    def __init__(self, width: int, kind: str = "") -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(width, width), nn.Linear(width, width), kind

    def forward(self, x: Tensor, seen: dict[str, list[Tensor]] | list[Tensor]) -> Tensor:
        """(batch, any, width) -> the same."""
        items = seen["all"] if isinstance(seen, dict) else seen
        y = torch.tanh(self.first(x + torch.stack(items).mean(0)))
        if self.kind == "adds":
            items.append(y)
        elif self.kind == "takes":
            y = y + items.pop()
        return x + self.last(y)


class Lists(Toy):
    """Adds what its blocks return to a list that it hands to them, as it is or in a dict."""

    def __init__(self, width: int = 6, *, in_dict: bool = False, kind: str = "") -> None:
        super().__init__()
        self.in_dict = in_dict
        self.blocks = nn.ModuleList(Mixing(width, kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, any, width) -> a loss."""
        seen = [x, 2 * x, 3 * x, 4 * x]
        for block in self.blocks:
            x = block(x, {"all": seen} if self.in_dict else seen)
            if block.kind == "":
                seen.append(x)
        return x.pow(2).mean() + sum(one.pow(3).mean() for one in seen)


@dataclass
class Kept:
    """What is handed from block to block, in a class."""

    items: list[Tensor]
    extra: dict[str, Any]


class Changing(nn.Module):
    """A block that changes what it is handed in one of the ways that there are."""

    WAYS = ("add", "add input", "add view", "add nested", "take", "replace", "reverse", "drop all", "key", "read")

    def __init__(self, way: str, width: int) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(width, width), nn.Linear(width, width), way

    def forward(self, x: Tensor, *given: Any, kept: Any = None) -> Tensor:
        """(batch, any, width) -> the same."""
        items, extra = parts(given[0] if given else kept)
        y = torch.tanh(self.first(x + sum(0.1 * one for one in tree_leaves([*items]))))
        match self.way:
            case "add":
                items.append(y)
            case "add input":
                items.append(x)
            case "add view":
                items.append((2 * y).transpose(0, 1).transpose(0, 1))
            case "add nested":
                items.append([y, {"x": x, "twice": 2 * y}])
            case "take":
                y = y + sum(tree_leaves(items.pop()))
            case "replace":
                items[0] = y
            case "reverse":
                items.reverse()
                y = y + 0.3 * sum(tree_leaves(items[0]))
            case "drop all":
                items.clear()
                items.extend([y, 2 * y])
            case "key":
                extra["last"], extra["times"] = y, extra["times"] + 1
        return x + self.last(y)


def parts(kept: Any) -> tuple[Any, dict[str, Any]]:
    """Return the items and the dict in one of the forms that blocks are handed."""
    match kept:
        case Kept():
            return kept.items, kept.extra
        case dict():
            return kept["items"], kept
        case _:
            return kept


class Changes(Toy):
    """Hands its blocks lists and dicts that they change, in a form and by ways that a number draws."""

    FORMS = ("tuple", "dict", "dataclass", "deque")

    def __init__(self, draw: int, width: int = 6) -> None:
        super().__init__()
        drawn = Random(draw)
        self.form, self.by_name = self.FORMS[draw % len(self.FORMS)], drawn.random() < 0.5
        self.returns_last = drawn.random() < 0.5
        self.blocks = nn.ModuleList(Changing(way, width) for way in drawn.sample(Changing.WAYS, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, any, width) -> a loss."""
        items: Any = [x, x / 2, x.sin()]
        extra: dict[str, Any] = {"last": x, "times": 1}
        if self.form == "deque":
            items = deque(items)
        kept = {"dict": extra, "dataclass": Kept(items, extra)}.get(self.form, (items, extra))
        extra |= {"items": items} if self.form == "dict" else {}
        for block in self.blocks:
            x = block(x, kept=kept) if self.by_name else block(x, kept)
            if block.way == "add view":
                items[-1].mul_(0.5)
            items[0] = [0.5 * one for one in tree_leaves([items[0]])]
        found = [*tree_leaves([*items]), extra["last"] * extra["times"]]
        loss: Tensor = sum((one.sin().mean() for one in found), torch.zeros(()))
        return loss + x.cos().mean() if self.returns_last else loss


Build = Callable[[], nn.Module]
