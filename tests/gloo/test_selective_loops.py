"""Two backwards through one forward, dropout, changes in place: with every kind of recomputation as in one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from ranks import run_ranks
from thoroughness import STEPS, some
from torch import Tensor, nn
from toys import Toy, plan_of, seeded


class InPlace(nn.Module):
    """A block that changes what products returned, draws random numbers and has scores of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.relu, self.recurrent = nn.ReLU(inplace=True), nn.GRU(6, 6, batch_first=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> the same."""
        x = x + self.recurrent(x)[0]
        scores = torch.softmax(x @ x.transpose(1, 2), -1)
        hidden = self.dropout(self.relu(self.up(scores @ x)))
        out = self.down(hidden)
        out += x
        return self.dropout(out)


class TwoHeads(Toy):
    """Two such blocks and two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InPlace(), InPlace()])
        self.heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.randn(batch, 5, 6),), {}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 5, 6) -> two losses."""
        for block in self.blocks:
            x = block(x)
        first, second = (head(x) for head in self.heads)
        return first.pow(2).mean(), second.sin().mean()


def losses(model: Any, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return both losses of a batch that each rank has another of, with the same dropout everywhere."""
    x = torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    torch.manual_seed(step)
    found: tuple[Tensor, Tensor] = model(x)
    return found


def train(rank: int, wanted: dict[str, Tensor]) -> None:
    """Two backwards through one graph, then one, with dropout of the same seeds as in one process.

    By default every plan, and every kind of recomputation under two of them; all combinations with --thorough.
    """
    from osdp import OSDP

    strategies = {"blocks.0.up": "owner", "blocks.0.down": "replicate", "blocks.1.up": "replicate"}
    plans = ("replicate", {}), ("shard", {}), ("shard_grad", strategies), ("odc:2", {})
    blocks = "blocks.0", "blocks.1"
    kinds = {}, {"recomputed": blocks}, {"selective": blocks}, {"offloaded": blocks[1:], "recomputed": blocks[:1]}
    sample = TwoHeads()
    for (default, choices), again in some(list(product(plans, kinds)), 2, 1):
        model = OSDP(seeded(TwoHeads), plan_of(sample, default, choices, **again, ranks=(1, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            first, second = losses(model, step, rank)
            if step == 0:
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward()
            optimizer.step()
            optimizer.zero_grad()
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_two_backwards_dropout_and_changes_in_place() -> None:
    alone = seeded(TwoHeads)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(2):  # one process has the batches of both ranks, and the mean of their gradients
            (sum(losses(alone, step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    run_ranks(train, 2, dict(alone.state_dict()))
