"""A layer that some steps leave out is wrapped apart from those around it, which are wrapped together, and trains."""

from __future__ import annotations

import torch
from shared_modules import InAll
from torch import Tensor, nn
from toys import EVERY_RANK, Toy, graph_of, plan_of, run_everywhere, seeded, train_on


class Occasional(Toy):
    """Runs one of the layers before its blocks in every second step."""

    def __init__(self, width: int = 6, replicas: int = 1) -> None:
        super().__init__()
        self.forwards, self.replicas = 0, replicas
        self.first, self.extra, self.second = (nn.Linear(width, width) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, any, width) -> a loss; `replicas` forwards are a step."""
        step, self.forwards = self.forwards // self.replicas, self.forwards + 1
        x = self.first(x)
        x = x + self.extra(x) if step % 2 else x
        x = torch.tanh(self.second(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss: Tensor = self.head(x).pow(2).mean()
        return loss


def train_occasional(rank: int) -> list[str]:
    """Train under several strategies; return the modules of the first unit of the first."""
    from osdp import OSDP

    reference = seeded(lambda: Occasional(replicas=len(EVERY_RANK)))
    train_on(EVERY_RANK, reference, InAll())
    graph, found = graph_of(Occasional()), list[str]()
    for strategy in ("shard", "shard_grad", "owner"):
        model = OSDP(seeded(Occasional), plan_of(Occasional(), strategy, recomputed=("blocks.0",), graph=graph))
        train_on((rank,), model, InAll())
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)
        found = found or [*model.schedule.units[0].modules]
    return found


def test_they_train_as_in_one_process() -> None:
    assert run_everywhere(train_occasional) == [["first", "second"]] * len(EVERY_RANK)
