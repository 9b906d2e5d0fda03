"""Models of a few small blocks, which differ in something (`UNLIKE`) or in nothing that matters (`ALIKE`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trace_models import LanguageModel, source

from profiler.model_source import ModelSource

WIDTH, BLOCKS, FEW = 8, 8, 6
"""Blocks where some differ, and fewer where all are alike, of which half are replayed."""


class Block(nn.Module):
    """A residual piece."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, block: Callable[[int], nn.Module] = Block, count: int = BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(block, range(count)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def model_of(build: Callable[[], nn.Module]) -> ModelSource:
    return source(build, (4, WIDTH))


# --- blocks that are no more alike than they look ---------------------------------------------------


def build_with(change: Callable[[Model], Any], count: int = BLOCKS) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Model(Block, count)
        change(model)
        return model

    return build


class DropPath(Block):
    """Leaves out samples, more the deeper it is; the first block none."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rate = 0.1 * index / BLOCKS

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.rate:
            return y
        return x + (y - x) * (torch.rand(x.shape[0], 1, 1) >= self.rate) / (1 - self.rate)


class Alternating(Block):
    """Every second one looks at neighbours only, by a mask of its own."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2)
        if self.index % 2:
            scores = scores + torch.full(scores.shape, -1e4).triu(2)
        return super().forward(scores.softmax(-1) @ x)


class Biased(Block):
    """One has no bias."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.up = nn.Linear(WIDTH, 16, bias=index != 4)


class LargeBatch(Block):
    """One does more from a micro-batch on that the first pass has not."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.does_more = index == 4

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.gelu(y) if self.does_more and len(x) > 2 else y


class LaterLargeBatch(Block):
    """The last three do, and it is seen on nothing but their indices."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.gelu(y) if self.index >= BLOCKS - 3 and len(x) > 2 else y


class Rows(Block):
    """Looks at so many samples, which are all of the first pass's."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rows = 3 if index == 4 else 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[: self.rows].tanh().mean(0)


class CountedInClass(Block):
    """Which one does more is counted over all calls of all blocks, and never reset."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        CountedInClass.calls += 1
        return y + 1 if CountedInClass.calls % BLOCKS == 5 else y


COUNT = itertools.count()


class CountedInFile(Block):
    """The same, by a counter of the file."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 1 if next(COUNT) % BLOCKS == 5 else y


def counted_around() -> nn.Module:
    """The same, by a counter that forward closes over."""
    calls = [0]

    class CountedAround(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            calls[0] += 1
            return y + 1 if calls[0] % BLOCKS == 5 else y

    return Model(CountedAround)


class CountsSelf(Block):
    """Warms up: does more in its first calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 20 else super().forward(x).relu()


class Reset(Model):
    """A counter that the model sets back, so that it always tells the same."""

    def forward(self, x: Tensor) -> Tensor:
        ResetBlock.calls = 0
        return super().forward(x)


class ResetBlock(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        ResetBlock.calls += 1
        return y + 1 if ResetBlock.calls == 5 else y


def hidden_counter() -> nn.Module:
    """The same, in an object that nobody looks into."""
    counter = SimpleNamespace(calls=0)

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            counter.calls += 1
            return y + 1 if counter.calls == 5 else y

    class Resetting(Model):
        def forward(self, x: Tensor) -> Tensor:
            counter.calls = 0
            return super().forward(x)

    return Resetting(Counting)


class Limited(Block):
    """Looks at so many samples as it is told."""

    def forward(self, x: Tensor, limit: SimpleNamespace | int) -> Tensor:
        rows = limit if isinstance(limit, int) else limit.rows
        return super().forward(x) + x[:rows].tanh().mean(0)


class Limiting(Model):
    """Tells one to look at more, which the first pass has not."""

    told: Callable[[int], Any] = staticmethod(lambda rows: rows)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x, self.told(3 if index == 4 else 2))
        return self.head(x).square().mean()


class LimitingByObject(Limiting):
    """The same in an object, of which the next may lie at the same address."""

    told = staticmethod(lambda rows: SimpleNamespace(rows=rows))


class Auxiliary(Block):
    """Leaves a loss behind that the model adds."""

    loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.square().mean()
        return y


class Collecting(Model):
    """Adds what blocks leave behind, and drops it."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        for block in self.blocks:
            loss, block.loss = loss + block.loss, None
        return loss


class Skipping(Model):
    """Keeps what comes into the first half for the second."""

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.embed(x), []
        for block in self.blocks[: BLOCKS // 2]:
            kept.append(x)
            x = block(x)
        for block in self.blocks[BLOCKS // 2 :]:
            x = block(x + kept.pop())
        return self.head(x).square().mean()


class Cached(Block):
    """Appends to a list that is handed from block to block."""

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        y = super().forward(x)
        cache.append(self.up(y))
        return y


class Caching(Model):
    """Uses what its blocks appended."""

    def forward(self, x: Tensor) -> Tensor:
        x, cache = self.embed(x), list[Tensor]()
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x).square().mean() + sum(one.mean() for one in cache)


class Changing(Block):
    """Changes its argument, and a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().mean((0, 1)))
        y = super().forward(x * 2)
        return y.mul_(self.seen)


class Handing(Block):
    """Hands on a table that the first computes, and a mask of known values."""

    def forward(self, x: Tensor, table: Tensor | None = None, mask: Tensor | None = None) -> Any:
        if table is None:
            table = self.up.weight.sum() * torch.ones(4, WIDTH)
        mask = torch.arange(4) < 4  # were it not known, something would have to be assumed of it
        return super().forward(x) * table, table, mask


class Handed(Model):
    """Gives a block what the one before returned."""

    def forward(self, x: Tensor) -> Tensor:
        x, table, mask = self.embed(x), None, None
        for block in self.blocks:
            x, table, mask = block(x, table, mask)
            x = x[:, mask]
        return self.head(x).square().mean()


def tie(model: Model) -> None:
    model.blocks[5].up.weight = model.blocks[2].up.weight


def hook(model: Model) -> None:
    model.blocks[4].register_forward_hook(lambda module, args, out: out.tanh())


def hook_inside(model: Model) -> None:
    model.blocks[4].up.register_forward_hook(lambda module, args, out: out.tanh())


def take_features(model: Model) -> None:
    kept = list[Tensor]()
    model.blocks[4].up.register_forward_hook(lambda module, args, out: kept.append(out))
    model.head.register_forward_hook(lambda module, args, out: out + kept.pop().mean())


UNLIKE: dict[str, Callable[[], nn.Module]] = {
    "rates": lambda: Model(DropPath),
    "alternating": lambda: Model(Alternating),
    "bias": lambda: Model(Biased),
    "large batch": lambda: Model(LargeBatch),
    "later, large batch": lambda: Model(LaterLargeBatch),
    "rows": lambda: Model(Rows),
    "class counter": lambda: Model(CountedInClass),
    "file counter": lambda: Model(CountedInFile),
    "closed over": counted_around,
    "counts itself": lambda: Model(CountsSelf),
    "reset counter": lambda: Reset(ResetBlock),
    "hidden counter": hidden_counter,
    "argument": lambda: Limiting(Limited),
    "object": lambda: LimitingByObject(Limited),
    "auxiliary loss": lambda: Collecting(Auxiliary),
    "skips": Skipping,
    "cache": lambda: Caching(Cached),
    "changing": lambda: Model(Changing),
    "handed on": lambda: Handed(Handing),
    "frozen": build_with(lambda model: model.blocks[4].requires_grad_(False)),
    "frozen bias": build_with(lambda model: model.blocks[4].up.bias.requires_grad_(False)),
    "tied": build_with(tie),
    "hook": build_with(hook),
    "hook inside": build_with(hook_inside),
    "features": build_with(take_features),
    "dtype": build_with(lambda model: model.blocks[4].norm.double()),
}


REFUSED = {"large batch", "later, large batch", "rows", "argument", "object"}
"""Whose costs grow in steps."""


# --- blocks that are alike ------------------------------------------------------------------------


class Relu(Block):
    """Keeps what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Pair(Block):
    """Returns more than one tensor, one of them its argument, and something else."""

    def forward(self, x: Tensor, *, pair: tuple[Tensor, Tensor], unused: Tensor) -> Any:
        return {"x": super().forward(x) * pair[1], "pair": pair, "none": None, "scores": x.detach().mean(-1)}


class Paired(Model):
    """Hands the same tensors to all blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        pair, unused = (torch.ones(4, WIDTH), self.head.bias.sum() * torch.ones(WIDTH)), x.detach() * 2
        for block in self.blocks:
            out = block(x, pair=pair, unused=unused)
            x, pair = out["x"] + x.tanh(), out["pair"]
        return self.head(x).square().mean()


class OnDevice(Block):
    """Wants to see a real device, so that it is traced on fake tensors."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


class Halved(nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.first, self.second = Block(index), Block(index)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def sequential(index: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


ALIKE: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Model(Block, FEW),
    "relu": lambda: Model(Relu, FEW),
    "pairs": lambda: Paired(Pair),
    "fake tensors": lambda: Model(OnDevice, FEW),
    "own checkpoints": lambda: Model(Halved, FEW),
    "frozen embedding": build_with(lambda model: model.embed.requires_grad_(False), FEW),
    "frozen blocks": build_with(lambda model: model.blocks.requires_grad_(False), FEW),
    "sequential": lambda: Model(sequential, FEW),
    "dropout": lambda: LanguageModel(layers=FEW, dropout=0.1),
}
