"""Models with modules that lie outside of the blocks that run them, or are registered at several places."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from toys import Toy


class Sharing(nn.Module):
    """A block that runs a module of its own, or one that it is handed."""

    def __init__(self, width: int, shared: nn.Module | None, *, has_gain: bool = False) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width)) if has_gain else None
        self.shared = shared

    def forward(self, x: Tensor, handed: nn.Module | None = None) -> Tensor:
        """(batch, any, width) -> the same."""
        inner = self.shared if self.shared is not None else handed
        assert inner is not None
        y: Tensor = inner(self.norm(x if self.gain is None else x * self.gain))
        return x + self.last(torch.tanh(y))


class InAll(Toy):
    """A module of the model that is registered in every block too, as those of CoaT."""

    def __init__(self, width: int = 6, *, has_gain: bool = False) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(width, width))
        self.blocks = nn.ModuleList(Sharing(width, self.shared, has_gain=has_gain) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, any, width) -> a loss."""
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class InOne(InAll):
    """A module of the model that is registered in one block too; another block's, that is registered after it."""

    def __init__(self, width: int = 6, *, has_gain: bool = False) -> None:
        Toy.__init__(self)
        self.shared = nn.Linear(width, width)
        layers = self.shared, *(nn.Linear(width, width) for _ in range(2))
        self.blocks = nn.ModuleList(Sharing(width, layer, has_gain=has_gain) for layer in layers)
        self.late = layers[1]


class Handed(InAll):
    """A module of the model that is handed to one block, which does not hold it."""

    def __init__(self, width: int = 6) -> None:
        Toy.__init__(self)
        self.shared = nn.Linear(width, width)
        layers = None, *(nn.Linear(width, width) for _ in range(2))
        self.blocks = nn.ModuleList(Sharing(width, layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, any, width) -> a loss."""
        for block in self.blocks:
            x = block(x, self.shared)
        return x.pow(2).mean()


class TiedFirst(InAll):
    """A module of several blocks, whose weight a layer before them has too, as an embedding: it never runs again."""

    def __init__(self, width: int = 6) -> None:
        Toy.__init__(self)
        self.embed, shared = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.embed.weight = shared.weight
        layers = shared, nn.Linear(width, width), shared
        self.blocks = nn.ModuleList(Sharing(width, layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, any, width) -> a loss."""
        return super().forward(self.embed(x))
