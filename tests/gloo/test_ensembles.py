"""Layers that run at once by vmap: inside of blocks that are sharded whole they train as in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from toys import EVERY_RANK, graph_of, plan_of, refusal, run_everywhere, seeded, train_on

WIDTH, LENGTH = 8, 4


class Ensemble(nn.Module):
    """The mean of three layers, run as if each were a fourth, and that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        names = ("weight", "bias")
        parameters = {name: torch.stack([one.get_parameter(name) for one in self.layers]) for name in names}
        y: Tensor = torch.vmap(lambda one: functional_call(self.base, one, (x,)))(parameters).mean(0)
        return self.base(x) + y


class Ensembles(nn.Module):
    """Two of them between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Ensemble() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).pow(2).mean()
        return loss

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, LENGTH, WIDTH),), {}


def train_ensembles(rank: int) -> str:
    """Train under strategies for all; return how a layer that is sharded by itself is refused."""
    from osdp import OSDP

    like, reference = Ensembles(), seeded(Ensembles)
    graph = graph_of(like)
    train_on(EVERY_RANK, reference, like)
    for strategy in ("shard", "replicate"):
        model = OSDP(seeded(Ensembles), plan_of(like, strategy, graph=graph))
        train_on((rank,), model, like)
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)
    apart = {one.name: "replicate" for one in graph.operators if "base" not in one.name}
    model = OSDP(seeded(Ensembles), plan_of(like, "shard", apart, graph=graph))
    return refusal(lambda: train_on((rank,), model, like))


def test_ensembles_train_as_in_one_process() -> None:
    for told in run_everywhere(train_ensembles):
        assert "under vmap" in told
        assert "blocks.*=shard" in told
