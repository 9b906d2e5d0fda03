"""Modules that are registered at several places, or lie outside of blocks that run them, train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from exported import parallelize_of, source_of
from parity import cluster_of
from ranks import run_ranks
from shared_modules import Handed, InAll, InOne, TiedFirst
from thoroughness import some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toys import EVERY_RANK, RANKS, STRATEGIES, graph_of, plan_of, run_everywhere, seeded, train_on

from runtime.observe.collective_log import record_collectives

MODELS = [InAll, partial(InAll, has_gain=True), InOne, partial(InOne, has_gain=True), Handed, TiedFirst]


def train_shared(rank: int, build: Callable[[], nn.Module]) -> None:
    """Train under one strategy and under several, with blocks that run again."""
    from osdp import OSDP

    reference = seeded(build)
    train_on(EVERY_RANK, reference, InAll())
    graph = graph_of(build())
    names, blocks = [operator.name for operator in graph.operators], tuple(block.name for block in graph.blocks)
    mixed = {name: ("shard", "owner", "replicate")[index % 3] for index, name in enumerate(names)}
    for name, choices in (*((one, {}) for one in some(["shard", *STRATEGIES], 2)), ("shard", mixed)):
        again = {"recomputed": blocks[::2], "selective": blocks[1:2]}
        plan = plan_of(build(), name, choices, **again, graph=graph)
        model = OSDP(seeded(build), plan)
        train_on((rank,), model, InAll())
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", MODELS)
def test_shared_modules_train_as_in_one_process(build: Callable[[], nn.Module]) -> None:
    run_everywhere(train_shared, build)


def train_exported(rank: int, build: Callable[[], nn.Module], source: str) -> None:
    """Train an exported module."""
    reference = seeded(build)
    train_on(EVERY_RANK, reference, InAll())
    model = parallelize_of(source)(seeded(build), init_device_mesh("cpu", (len(EVERY_RANK),)))
    train_on((rank,), model, InAll())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name).data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [InAll, Handed])
def test_exported_modules_wrap_shared_ones_first(build: Callable[[], nn.Module]) -> None:
    source = source_of(plan_of(build(), "shard"), graph_of(build()), cluster_of(*RANKS))
    run_everywhere(train_exported, build, source)


class TwoHeads(nn.Module):
    """Two layers, and two heads with one weight, which are a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head, self.other = nn.Linear(8, 4), nn.Linear(8, 4)
        self.other.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) -> a loss."""
        x = self.second(self.first(x).relu()).relu()
        loss: Tensor = self.head(x).square().mean() + self.other(-x).square().mean()
        return loss

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, 8),)


def count_gathers(rank: int) -> list[int]:
    """Return how many all-gathers there are in steps, the third of which follows an evaluation."""
    from osdp import OSDP

    model, counts = OSDP(TwoHeads(), {"micro_batch": 2, "pins": ["*=shard"]}), []
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                model(torch.randn(2, 8))
        with record_collectives() as record:
            model(torch.randn(2, 8)).backward()
        counts.append(sum(one.operation == "all_gather" for one in record))
    return counts


def test_an_evaluation_changes_no_prefetch_of_the_next_step() -> None:
    """Heads that share a weight were gathered once more, as a forward without a backward counted as one with it."""
    for counts in run_ranks(count_gathers, 2):
        assert len(set(counts)) == 1
