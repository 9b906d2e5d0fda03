"""Blocks that remember: recomputation updates their buffers once, and what cannot run again as it did is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn
from toys import Toy, plan_of, refusal, seeded


@torch.jit.script
def squashed(x: Tensor) -> Tensor:
    return x + torch.tanh(x) * torch.sigmoid(x)


class Normed(nn.Module):
    """A block with statistics, a power iteration, a running mean that is assigned anew, and one changed in eval too.

    Others are written as they were: one in place, one assigned anew, and a third in the first forward only.  Two more
    are caches, which a number and a name beside them say are filled.  It ends in TorchScript, where a forward that runs
    again ends early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.down = nn.Linear(8, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.ones(6))
        self.register_buffer("rows", torch.arange(6.0))
        self.register_buffer("ones", torch.ones(6))
        self.register_buffer("later", torch.zeros(6))
        self.register_buffer("angles", torch.zeros(9))
        self.register_buffer("shifts", torch.zeros(6))
        self.forwards, self.filled = 0, 0
        self.of: tuple[int, ...] = (0,)

    def turned(self, x: Tensor) -> Tensor:
        """Compute with what is in caches, and fill them first if they are not."""
        self.forwards += 1
        if self.filled < x.shape[1]:
            self.angles[: x.shape[1]], self.filled = torch.arange(1.0, 1 + x.shape[1]).cos(), x.shape[1]
        if self.of != x.shape[1:]:
            self.shifts, self.of = torch.linspace(0, 1, 6), x.shape[1:]
        return x * self.angles[: self.filled] + self.shifts

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> the same."""
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.rows.copy_(torch.arange(6.0))
        self.ones = torch.ones(6)
        self.later.add_(self.calls - 1)
        y: Tensor = squashed(x + self.down(torch.relu(self.up(self.turned(self.norm(x - self.mean)) * self.constant))))
        return y


class Statistics(Toy):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Normed(), Normed()])

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.randn(batch, 6),), {}

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> a loss."""
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def batch(step: int) -> Tensor:
    """Return the batch of a step, the same on every rank, so that statistics are those of one process."""
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(step))


def train_with_statistics(rank: int, wanted: dict[str, Tensor]) -> None:
    """Two forwards a step, then in eval mode with gradients, with and without recomputation, as one process does."""
    from osdp import OSDP

    blocks = "blocks.0", "blocks.1"
    kinds = ({}, {"recomputed": blocks}, {"selective": blocks}, {"offloaded": blocks[1:], "recomputed": blocks[:1]})
    sample, combinations = Statistics(), list(product(("replicate", "shard", "shard_grad", "owner"), kinds))
    for strategy, again in some(combinations, 2):  # every strategy, and every kind under several
        model = OSDP(seeded(Statistics), plan_of(sample, strategy, **again, ranks=(1, 2)))
        train(model, model.sync)
        got = model.full_state_dict(rank0_only=False)
        assert got["blocks.1.calls"] == model.module.blocks[1].forwards == 6
        assert got["blocks.0.norm.num_batches_tracked"] == 4
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def train(model: nn.Module, after_backward: Callable[[], None]) -> None:
    """Train a step in train mode, one in eval mode and another in train mode, of two forwards each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.train(step != 1)
        for micro_batch in range(2):
            (model(batch(10 * step + micro_batch)) / 2).backward()
            after_backward()
        optimizer.step()
        optimizer.zero_grad()


def test_buffers_are_updated_once() -> None:
    alone = seeded(Statistics)
    train(alone, lambda: None)
    run_ranks(train_with_statistics, 2, dict(alone.state_dict()))


def differ(rank: int) -> tuple[Tensor, Tensor]:
    """Train on other batches on every rank; return a statistic of this rank, and as the state dict has it."""
    from osdp import OSDP

    model = OSDP(seeded(Statistics), plan_of(Statistics(), "shard", ranks=(1, 2)))
    model(batch(rank)).backward()
    own = model.module.blocks[0].norm.running_mean.clone()
    return own, model.full_state_dict(rank0_only=False)["blocks.0.norm.running_mean"]


def test_whole_state_dicts_have_the_buffers_of_rank_0() -> None:
    (first, in_first), (second, in_second) = run_ranks(differ, 2)
    assert not torch.equal(first, second)
    assert torch.equal(in_first, first)
    assert torch.equal(in_second, first)


class Remembering(nn.Module):
    """A block that keeps what it computed in the first of its calls since the last reset, as a key-value cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> the same."""
        if not self.cache:
            self.cache.append(self.first(x).detach())
        return x + self.second(self.cache[0])


class Cached(Statistics):
    """Two blocks that remember, forgotten when a forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Remembering(), Remembering()])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> a loss."""
        for block in self.blocks:
            block.cache.clear()
        return super().forward(x)


class Spiking(Remembering):
    """A block that remembers in an attribute, as spiking neurons do: of it nothing has another shape the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.potential: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> the same."""
        self.potential = 0.5 * self.potential + torch.tanh(self.first(x))
        return x + self.second(self.potential)


class Spikes(Statistics):
    """Two such blocks, each run twice, reset when a forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Spiking(), Spiking()])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> a loss."""
        for block in self.blocks:
            block.potential = 0.0
        return super().forward(x) + super().forward(2 * x)


def recompute_what_remembers(rank: int, strategy: str, kinds: tuple[type[Statistics], ...]) -> list[str]:
    """Return what is said in the first backward."""
    from osdp import OSDP

    said = []
    for kind in kinds:
        model = OSDP(seeded(kind), plan_of(kind(), strategy, recomputed=("blocks.1",), ranks=(1, 2)))
        said.append(refusal(lambda: model(batch(0)).backward()))  # noqa: B023
    return said


@pytest.mark.parametrize("strategy", ["replicate", "shard", "owner"])
def test_what_cannot_run_again_is_named(strategy: str) -> None:
    by_rank = run_ranks(recompute_what_remembers, 2, strategy, (Cached, Spikes))
    assert by_rank[0] == by_rank[1]
    for said in by_rank[0]:
        assert "block blocks.1 cannot be recomputed" in said
        assert "blocks.1=keep" in said


class Sometimes(nn.Module):
    """A block that changes its buffer in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> the same."""
        self.calls += 1
        if self.calls % 2 == 0:
            self.seen += x.detach().mean(0)
        return x + self.other(torch.relu(self.layer(x)))


class Late(Statistics):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Sometimes(), Sometimes()])


def change_late(rank: int) -> str:
    """Return what is said in the forward in which a buffer changes that the first left as it was."""
    from osdp import OSDP

    model = OSDP(seeded(Late), plan_of(Late(), "shard", recomputed=("blocks.1",), ranks=(1, 2)))
    model(batch(0)).backward()
    return refusal(lambda: model(batch(1)))


def test_buffers_that_change_later_are_named() -> None:
    said = run_ranks(change_late, 2)
    assert said[0] == said[1]
    assert "block blocks.1 cannot be recomputed" in said[0]
    assert "seen" in said[0]
