"""Models of which a block runs several layers at once, by vmap, and others that have the same layers around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stacks import BlocksBetweenLayers
from torch import Tensor, nn
from torch.func import functional_call

WIDTH, LENGTH = 32, 64


class Ensemble(nn.Module):
    """The mean of three layers, run as if each were a fourth, and that: (batch, LENGTH, WIDTH) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        names = ("weight", "bias")
        parameters = {name: torch.stack([one.get_parameter(name) for one in self.layers]) for name in names}
        y: Tensor = torch.vmap(lambda one: functional_call(self.base, one, (x,)))(parameters).mean(0)
        return self.base(x) + y


class Between(BlocksBetweenLayers):
    """Two blocks between linear layers; returns a loss."""

    def __init__(self, block: Callable[[], nn.Module] = Ensemble) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, LENGTH, WIDTH),), {}
