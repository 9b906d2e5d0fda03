"""Models whose blocks are handed lists and dicts that change later."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
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


Build = Callable[[], nn.Module]
