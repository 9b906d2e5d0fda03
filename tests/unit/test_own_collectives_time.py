"""Time of the collectives that a model runs itself: which they are, and what a plan's step takes longer for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_models import EXCHANGES, FEATURES, WIDTH, Attention, Compared
from rehearsals import plan_of
from synthetic import cluster
from torch import Tensor, nn

from planner.analysis.explain import open_plan
from planner.collectives import collective_s
from profiler.model_graph import ModelGraph, Work
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

RANKS, MICRO_BATCH = 4, 16
ROWS = 4 * MICRO_BATCH * FEATURES
"""Bytes of a rank's features."""
ALL_ROWS = RANKS * ROWS
Sent = Counter[tuple[str, int]]
EXPECTED: dict[str, tuple[Sent, Sent]] = {
    "gather_with_gradient": (Sent([("all_gather", ALL_ROWS)]), Sent([("all_reduce", ALL_ROWS)])),
    # Backward: what PyTorch does with any backend but NCCL.
    "gather_differentiably": (Sent([("all_gather", ALL_ROWS)]), Sent([("all_to_all", ALL_ROWS)])),
    "gather_detached": (Sent([("all_gather", ALL_ROWS)]), Sent()),
    "gather_into_tensor": (Sent([("all_gather", ALL_ROWS)]), Sent()),
    "gather_functionally": (Sent([("all_gather", ALL_ROWS)]), Sent([("reduce_scatter", ALL_ROWS)])),
    "gather_lengths": (
        Sent([("all_gather", RANKS * 8 + ALL_ROWS)]),  # a length of eight bytes each, and rows
        Sent([("all_reduce", ALL_ROWS)]),
    ),
    "summed": (Sent([("all_reduce", 4 * FEATURES)]), Sent()),
    "broadcast": (Sent([("broadcast", 4 * FEATURES)]), Sent()),
    "sent_to_experts": (Sent([("all_to_all", RANKS * 8 + ROWS)]), Sent()),
}
"""By exchange: operations of the forward and the backward, and bytes of each kind together, worked out by hand."""


def source_of(build: Any) -> ModelSource:
    return ModelSource("collective", build, lambda module, batch: (module.example_inputs(batch), {}), 1)


def traced(build: Any, ranks: int = RANKS) -> ModelGraph:
    return trace_model(source_of(build), "fp32", "cuda", MICRO_BATCH, world_size=ranks)


def sent(works: list[Work]) -> Sent:
    return Sent((one.operation, round(one.size_bytes(MICRO_BATCH))) for work in works for one in work.collectives)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_is_sent_is_known(exchange: str) -> None:
    graph = traced(lambda: Compared(exchange))
    forward, backward = ([getattr(call, which) for call in graph.calls] for which in ("forward", "backward"))
    assert (sent(forward), sent(backward)) == EXPECTED[exchange]
    kinds = [one for work in forward + backward for one in work.collectives]
    assert {one.group for one in kinds} == {(RANKS, 1)}
    assert sum(one.count for one in kinds) == sum(map(len, EXPECTED[exchange])) + (exchange in WITH_LENGTHS)


WITH_LENGTHS = ("gather_lengths", "sent_to_experts")
"""Which tell ranks how many rows there will be by a collective of the same kind."""


class Attending(nn.Module):
    """Blocks that attend to the rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention("gather_with_gradient")) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> the same."""
        for block in self.blocks:
            x = block(x)
        return x

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, WIDTH),)


def silent(work: Work) -> Work:
    """Return work without its collectives, and their launches."""
    return replace(work, collectives=(), launches=0)


def with_and_without() -> tuple[ModelGraph, ModelGraph]:
    """Return the graph of that, and the same without its collectives."""
    graph = traced(Attending)

    reruns = ("rerun", "selective_rerun", "apart_rerun", "apart_selective_rerun")
    blocks = []
    for block in graph.blocks:
        ran = {name: one for name in reruns if (one := getattr(block, name)) is not None}
        blocks.append(replace(block, **{name: replace(one, work=silent(one.work)) for name, one in ran.items()}))
    calls = [replace(call, forward=silent(call.forward), backward=silent(call.backward)) for call in graph.calls]
    return graph, replace(graph, calls=tuple(calls), blocks=tuple(blocks))


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_takes_longer_for_them(strategy: str, recompute: bool) -> None:
    """Three blocks gather all rows forward, again where they are recomputed, and reduce the gradients of all."""
    machine = cluster(2, 2, overlaps=False)
    wide = 4 * MICRO_BATCH * WIDTH * RANKS  # of a block's rows
    times = []
    for graph in with_and_without():
        again = [block.name for block in graph.blocks] if recompute else []
        plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, again, micro_batch=MICRO_BATCH)
        times.append(open_plan(plan, graph, machine).prediction.step_time_s)
    gathers = 3 * (2 if recompute else 1)
    expected = gathers * collective_s("all_gather", wide, machine, RANKS)
    expected += 3 * collective_s("all_reduce", wide, machine, RANKS)
    assert times[0] - times[1] == pytest.approx(expected, rel=1e-6)


def test_an_all_to_all_sends_over_both_links_at_once() -> None:
    """1 MB on each of 2 x 2 ranks: half of it leaves the node at 1 GB/s, a quarter goes to the neighbour at 10 GB/s."""
    assert collective_s("all_to_all", 1e6, cluster(2, 2), 4) == pytest.approx(3 * 20e-6 + 0.5e6 / 1e9)
    assert collective_s("all_to_all", 1e6, cluster(1, 4), 4) == pytest.approx(3 * 20e-6 + 0.75e6 / 10e9)
    assert collective_s("all_to_all", 1e6, cluster(2, 2, inter=100e9), 4) == pytest.approx(3 * 20e-6 + 0.25e6 / 10e9)


class Exchanging(nn.Module):
    """Runs a collective of PyTorch's on a tensor that `send` gets, and trains a layer."""

    def __init__(self, send: Any) -> None:
        super().__init__()
        self.send, self.layer = send, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) -> the same."""
        self.send(x.detach().new_ones(RANKS, 64))
        y: Tensor = self.layer(x)
        return y

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, 8),)


def in_pairs(x: Tensor) -> None:
    """In a group of ranks 0 and 2 of four."""
    dist.all_reduce(x, group=dist.new_group([0, 2]))


def parts(x: Tensor) -> list[Tensor]:
    return [*x.clone()]


def of_the_first(x: Tensor) -> list[Tensor] | None:
    """Return what only the rank gives that all others send to, or get from."""
    return parts(x) if dist.get_rank() == 0 else None


SENT = {
    "all_reduce": (dist.all_reduce, ("all_reduce", RANKS, 1, 1024)),
    "reduce": (lambda x: dist.reduce(x, 0), ("reduce", RANKS, 1, 1024)),
    "gather": (lambda x: dist.gather(x[0], of_the_first(x)), ("all_gather", RANKS, 1, 1024)),
    "scatter": (lambda x: dist.scatter(torch.empty_like(x[0]), of_the_first(x)), ("reduce_scatter", RANKS, 1, 1024)),
    "reduce_scatter": (
        lambda x: dist.reduce_scatter(torch.empty_like(x[0]), parts(x)),
        ("reduce_scatter", RANKS, 1, 1024),
    ),
    "reduce_scatter_tensor": (
        lambda x: dist.reduce_scatter_tensor(torch.empty_like(x[0]), x),
        ("reduce_scatter", RANKS, 1, 1024),
    ),
    "all_to_all": (lambda x: dist.all_to_all(parts(x), parts(x)), ("all_to_all", RANKS, 1, 1024)),
    "recv": (lambda x: dist.recv(x, 1), ("broadcast", 2, 1, 1024)),
    "send": (lambda x: dist.send(x, 1), None),
    "barrier": (lambda x: dist.barrier(), ("barrier", RANKS, 1, 0)),
    "in_pairs": (in_pairs, ("all_reduce", 2, 2, 1024)),
}
"""By collective: what runs it on 1,024 bytes in four rows, and its operation, group and bytes."""


@pytest.mark.parametrize("name", SENT)
def test_each_collective_of_pytorch_is_known(name: str) -> None:
    send, expected = SENT[name]
    works = [call.forward for call in traced(lambda: Exchanging(send)).calls]
    found = [(one.operation, *one.group, one.size_bytes(MICRO_BATCH)) for work in works for one in work.collectives]
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_over_ranks_are_exchanged(dtype: torch.dtype) -> None:
    """SyncBatchNorm gathers mean, deviation and count of each rank, and reduces two sums per channel, all in fp32."""
    build = lambda: nn.Sequential(nn.Linear(8, 6), nn.SyncBatchNorm(6)).to(dtype)  # noqa: E731
    source = ModelSource("synchronized", build, lambda module, batch: ((torch.randn(batch, 8, dtype=dtype),), {}), 1)
    for ranks, size in ((RANKS, (2 * 6 + 1) * 4), (1, 0)):
        calls = trace_model(source, "fp32", "cuda", MICRO_BATCH, world_size=ranks).calls
        assert sent([call.forward for call in calls]) == (Sent([("all_gather", size * ranks)]) if size else Sent())
        assert sent([call.backward for call in calls]) == (Sent([("all_reduce", 2 * 6 * 4)]) if size else Sent())


def test_work_is_the_same_on_any_number_of_ranks() -> None:
    """The layer before it lost its backward to it, which began in an autograd function."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.SyncBatchNorm(64), nn.Linear(64, 8))

    source = ModelSource("synchronized", build, lambda module, batch: ((torch.randn(batch, 8),), {}), 1)
    alone, together = (trace_model(source, "fp32", "cuda", MICRO_BATCH, world_size=ranks) for ranks in (1, RANKS))
    assert [(one.forward, one.backward) for one in alone.calls] != [
        (one.forward, one.backward) for one in together.calls
    ]
    silenced = [(silent(call.forward), silent(call.backward)) for call in together.calls]
    assert [(silent(call.forward), silent(call.backward)) for call in alone.calls] == silenced
    products = [call.backward.matmul_flops(MICRO_BATCH) for call in together.calls]
    assert products == [2 * MICRO_BATCH * 8 * 64, 0, 2 * 2 * MICRO_BATCH * 64 * 8], "weights, and what goes on back"


class Allocating(torch.autograd.Function):
    """The identity, which allocates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1


class Starts(nn.Linear):
    """A layer that begins with an autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(Allocating.apply(x))  # type: ignore[no-untyped-call]
        return y


def test_a_layer_that_begins_in_an_autograd_function_has_its_own_backward() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), Starts(64, 16), nn.Linear(16, 4))

    source = ModelSource("begins", build, lambda module, batch: ((torch.randn(batch, 8),), {}), 1)
    calls = trace_model(source, "fp32", "cuda", MICRO_BATCH).calls
    expected = [2 * MICRO_BATCH * 8 * 64, 4 * MICRO_BATCH * 64 * 16, 4 * MICRO_BATCH * 16 * 4]
    assert [call.backward.matmul_flops(MICRO_BATCH) for call in calls] == expected
