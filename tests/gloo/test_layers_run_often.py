"""Layers that run more often than those they are wrapped with train as in one process, step by step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from toys import EVERY_RANK, graph_of, plan_of, run_everywhere, seeded, train_on

WIDTH, LENGTH = 16, 4
ORDERS = ((0, 1, 0, 2), (2, 0, 1, 1))


class Repeats(nn.Module):
    """Runs three layers in some order."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), order

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same."""
        for layer in self.order:
            x = x + self.layers[layer](x).tanh()
        return x


class Often(nn.Module):
    """Blocks of them between small layers, the last of which runs twice at the end."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Repeats(order) for _ in range(2))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.first(x)
        loss: Tensor = (self.second(x).tanh() * self.second(-x).tanh()).mean()
        return loss

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, LENGTH, WIDTH),), {}


def train_often(rank: int) -> None:
    """Train with gradients that are reduced in each micro-batch, or once per step."""
    from osdp import OSDP

    for order in ORDERS:
        build, like = partial(Often, order), Often(order)
        reference, graph = seeded(build), graph_of(like)
        train_on(EVERY_RANK, reference, like)
        choices = {one.name: "owner" for one in graph.operators if "layers.2" in one.name}
        for default, others, again in (
            ("shard", choices, ()),
            ("replicate", choices, ("blocks.0",)),
            ("shard_grad", {}, ("blocks.0",)),
        ):
            model = OSDP(seeded(build), plan_of(like, default, others, recomputed=again, graph=graph))
            train_on((rank,), model, like)
            got = model.full_state_dict(rank0_only=False)
            torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


def test_layers_that_run_often_train_as_in_one_process() -> None:
    run_everywhere(train_often)
