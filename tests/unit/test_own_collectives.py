"""Models that run collectives themselves: planned and run dry as on the ranks of the plan, without a process group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collective_models import EXCHANGES, FEATURES, WIDTH, Compared, ExpertsOnRanks
from command_line import Cli
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import THOROUGH
from torch import Tensor, nn

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

RANKS, MICRO_BATCH = 4, 256
STRATEGIES = ["shard", "owner", "hierarchical", "shard_grad", "odc:2", "replicate", "group_shard:2"]
DRAWN = [(exchange, place) for exchange in EXCHANGES for place in ("loss", "block")]
TAKEN = DRAWN if THOROUGH else [pair for number, pair in enumerate(DRAWN) if number % 4 in (0, 3)]


def source_of(build: Callable[..., nn.Module], *given: Any) -> ModelSource:
    def made() -> nn.Module:
        return build(*given)

    return ModelSource("collective", made, lambda module, batch: (module.example_inputs(batch), {}), 1)  # type: ignore[operator]


def traced(source: ModelSource, device_type: str = "cpu", world_size: int | None = RANKS) -> ModelGraph:
    return trace_model(source, "fp32", device_type, MICRO_BATCH, world_size=world_size)


@pytest.mark.parametrize(("exchange", "place"), TAKEN)
def test_memory_is_that_of_the_ranks(exchange: str, place: str) -> None:
    """Each rank has the features of four; of one rank's it would hold about a third."""
    number = DRAWN.index((exchange, place)) // 2
    source, machine = source_of(Compared, exchange, place, 2), cluster(2, 2)
    device_type = ("cpu", "cuda")[number % 2]
    graph = traced(source, device_type)
    assert graph.world_size == RANKS
    for place_of, strategy in enumerate(STRATEGIES[number % 4 :: 4]):
        again = [block.name for block in graph.blocks][::2] if place_of % 2 else []
        plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, again, micro_batch=MICRO_BATCH)
        found = compare(plan, source, graph, machine, device_type=device_type, with_data=number % 4 > 0)
        assert -0.01 < found.error < 0.06, (strategy, again, found)


def test_one_process_is_left_as_it_was() -> None:
    assert not dist.is_initialized()
    hook = sys.excepthook
    assert traced(source_of(Compared, "gather_lengths")).world_size == RANKS
    assert not dist.is_initialized()
    assert sys.excepthook is hook, "what ranks print begins with their rank"
    assert traced(source_of(Compared, "gather_differentiably"), world_size=None).world_size == 0, "it ran alone"


def test_the_debug_level_of_the_user_does_not_matter() -> None:
    """PyTorch would make a gloo group that waits for the ranks."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        assert traced(source_of(Compared, "summed")).world_size == RANKS
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        dist.set_debug_level(level)


class Gathers(nn.Module):
    """Gathers features of which no gradient is wanted, and then forgets them."""

    def __init__(self, into_list: bool) -> None:
        super().__init__()
        self.head, self.into_list = nn.Linear(WIDTH, FEATURES), into_list

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        features: Tensor = self.head(x)
        every = features.new_empty(dist.get_world_size() * len(x), FEATURES)
        if self.into_list:
            dist.all_gather(list(every.chunk(dist.get_world_size())), features.detach())
        else:
            dist.all_gather_into_tensor(every, features.detach())
        del every
        return features.sum()

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, WIDTH),)


@pytest.mark.parametrize(("into_list", "copies"), [(False, 1), (True, 2)])
def test_a_list_is_gathered_in_one_piece_beside_it(into_list: bool, copies: int) -> None:
    """Of four ranks' features, rounding to 512 bytes aside: beside the rank's input and its own."""
    graph = traced(source_of(Gathers, into_list))
    own, features = 4 * WIDTH * MICRO_BATCH, 4 * FEATURES * MICRO_BATCH
    (call,) = graph.calls
    found = call.forward_peak_bytes(MICRO_BATCH)
    assert found == pytest.approx(own + features + copies * RANKS * features, abs=2048)


def told_by_a_sum(rows: Tensor) -> Tensor:
    dist.all_reduce(rows)
    return rows


def told_by_the_largest(rows: Tensor) -> Tensor:
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return rows


def told_by_scattered_sums(rows: Tensor) -> Tensor:
    own = torch.zeros_like(rows)
    dist.reduce_scatter_tensor(own, rows.repeat(dist.get_world_size()))
    return own


def told_to_all(rows: Tensor) -> Tensor:
    every = rows.repeat(dist.get_world_size()) * 0
    dist.all_gather_into_tensor(every, rows)
    return every.sum()


def told_by_a_function(rows: Tensor) -> Tensor:
    return functional.all_reduce(rows, "sum", dist.group.WORLD)


def told_to_each(rows: Tensor) -> Tensor:
    """Rank 0 is told the first number, others larger ones."""
    told = rows * torch.arange(1, dist.get_world_size() + 1)
    theirs = torch.zeros_like(told)
    dist.all_to_all_single(theirs, told)
    return theirs.sum()


def told_by_the_first(rows: Tensor) -> Tensor:
    dist.broadcast(rows, 0)
    return rows


TOLD = {
    told_by_a_sum: RANKS,
    told_by_the_largest: 1,
    told_by_scattered_sums: RANKS,
    told_to_all: RANKS,
    told_by_a_function: RANKS,
    told_to_each: RANKS,
    told_by_the_first: 1,
}


class Told(nn.Module):
    """Makes as many rows as ranks tell it, each of which has its micro-batch."""

    def __init__(self, tell: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.tell = nn.Linear(WIDTH, WIDTH), tell

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        rows, y = int(self.tell(torch.tensor([len(x)]))), self.head(x)
        more = x.new_ones(rows, WIDTH)
        return y.sum() + (more * y.mean()).sum()

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, WIDTH),)


@pytest.mark.parametrize(("tell", "times"), TOLD.items())
def test_what_ranks_tell_each_other_is_known(tell: Callable[[Tensor], Tensor], times: int) -> None:
    """At most there are the rank's input, its output, the rows and their products; then a dry run has as much."""
    source, machine = source_of(Told, tell), cluster(2, 2)
    graph = traced(source)
    (call,) = graph.calls
    assert call.forward_peak_bytes(MICRO_BATCH) == pytest.approx((2 + 2 * times) * 4 * WIDTH * MICRO_BATCH, rel=0.03)
    plan = plan_of(graph, machine, {"head": "shard"}, micro_batch=MICRO_BATCH)
    for with_data in (True, False):
        assert -0.01 < compare(plan, source, graph, machine, with_data=with_data).error < 0.05


class Objects(nn.Module):
    """Tells other ranks what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        lengths: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(object_list=lengths, obj=len(x))
        dist.broadcast_object_list(lengths)
        dist.barrier()
        scale: Tensor = self.head(x).sum() / sum(length or 0 for length in lengths)
        return scale

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, WIDTH),)


def test_objects_are_those_of_this_rank() -> None:
    source, machine = source_of(Objects), cluster(2, 2)
    graph = traced(source)
    plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, micro_batch=MICRO_BATCH)
    for with_data in (True, False):
        assert abs(compare(plan, source, graph, machine, with_data=with_data).error) < 0.03


def test_layers_that_run_on_some_ranks_only_are_told() -> None:
    graph = traced(source_of(ExpertsOnRanks))
    assert set(graph.left_out) == {"experts.0", "experts.3"}
    assert any("run on some ranks only" in note and "experts.*" in note for note in graph.notes)


def test_a_plan_of_the_command_line_holds(cli: Cli, tmp_path: Path) -> None:
    """It refused a model that needs a process group, and predicted 77 % too little for one that can do without."""
    model = ("--model", "collective_models:contrastive", "--cluster", "h100-8", "--mem", "8GB", "--batch", "512")
    told = cli.done("plan", *model, "--precision", "fp32", "-o", str(tmp_path / "plan.yaml"))
    assert "the model runs collectives itself: memory is as on 8 ranks" in " ".join(told.split())
    verified = cli.json("verify", str(tmp_path / "plan.yaml"), "--device", "fake")
    assert -0.01 < verified["error"] < 0.03
