"""Measurements of a cluster, in the form in which the planner uses them. Nothing here needs torch.

A collective's time is a piecewise linear function of the bytes S of its whole tensor,

    t(S) = latency_s + S / bytes_per_s        of the last segment with from_bytes <= S

fitted to medians (`profiler.cluster.piecewise_fit`).  A call's is measured at a few micro-batches b; in between, and
beyond, the ratio of measured to roofline (`planner.cost.workload`) is what is interpolated, so that a single
measurement already tells how a call grows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Annotated

from annotated_types import Ge, Le

from profiler.bounds import MOST_RANKS, MOST_REPETITIONS, Samples
from profiler.cluster.figure import Figure
from profiler.model_graph import Call, ModelGraph

NotNegative = Annotated[float, Ge(0)]
GroupSize = Annotated[int, Ge(2), Le(MOST_RANKS)]
Stride = Annotated[int, Ge(1), Le(MOST_RANKS)]


@dataclass(frozen=True, slots=True)
class FitSegment:
    """One line of a piecewise linear time."""

    from_bytes: float
    """Smallest size that it covers; the first segment starts at 0."""
    latency_s: float
    """The line's value at size 0."""
    s_per_byte: NotNegative
    """Slope."""


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """How long one collective takes in one group while all such groups of the cluster run it at once.

    The time includes the copies into and out of flat tensors that `fully_shard` makes around it.
    """

    operation: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `reduce`, `pull`, `push` or `publish`."""
    algorithm: str
    """`native` (the backend's) or `ring` (OSDP's)."""
    ranks: GroupSize
    """Ranks of the group."""
    stride: Stride
    """Distance of neighbours in the group, in ranks of the world."""
    pieces: tuple[FitSegment, ...]
    """The fit."""
    residual: float
    """Largest |fit - measured| / measured of the points."""
    points: tuple[tuple[float, float], ...]
    """(bytes of the whole tensor, median seconds), by size."""

    def time_s(self, size_bytes: float) -> float:
        """Return the fitted seconds at a size."""
        piece = self.pieces[max(0, bisect_right([one.from_bytes for one in self.pieces], size_bytes) - 1)]
        return piece.latency_s + size_bytes * piece.s_per_byte


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Seconds that one kind of call computes while all ranks compute."""

    key: str
    """`call_key` of the calls that it covers."""
    name: str
    """One of them: model and operator."""
    micro_batches: tuple[Samples, ...]
    """Sizes measured, ascending."""
    forward_s: tuple[NotNegative, ...]
    """Median seconds of forward at each."""
    backward_s: tuple[NotNegative, ...]
    """Median seconds of backward at each."""
    saved_bytes: tuple[NotNegative, ...]
    """Activations kept for backward at each, measured."""
    forward_launch_s: NotNegative = 0.0
    """Seconds that the host took to launch the forward, whatever the micro-batch; 0: not measured, as on a CPU."""
    backward_launch_s: NotNegative = 0.0
    """The same of the backward."""


@dataclass(frozen=True, slots=True)
class OptimizerTimes:
    """How long an optimizer step takes while all ranks take theirs."""

    name: str
    """`adam`, `adamw` or `sgd`, or one of these with `fused_` before."""
    s_per_tensor: Figure
    """Seconds for each tensor that is stepped, whatever its size."""
    s_per_byte: Figure
    """Seconds more per byte of trained fp32 parameters on a rank."""

    def step_s(self, tensors: int, size_bytes: float) -> float:
        """Return the seconds of a step."""
        return tensors * self.s_per_tensor.value + size_bytes * self.s_per_byte.value


@dataclass(frozen=True, slots=True)
class RingRule:
    """A group in which OSDP's ring reduce-scatter was measured to be faster than the backend's."""

    ranks: GroupSize
    stride: Stride
    from_bytes: NotNegative
    """Smallest tensor that is reduced by the ring."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one profile."""

    date: str
    """When, ISO 8601."""
    versions: str
    """Python, torch, backend."""
    repetitions: Annotated[int, Ge(0), Le(MOST_REPETITIONS)]
    """Timings of each point, interleaved; figures are medians."""
    collectives: tuple[CollectiveTimes, ...] = ()
    calls: tuple[CallTimes, ...] = ()
    optimizers: tuple[OptimizerTimes, ...] = ()
    overlapped_slowdown: Annotated[float, Ge(1)] = 1.0
    """Factor by which computation slows down while communication runs."""
    asynchronous: bool = False
    """Whether a collective that is waited for later (as DistributedDataParallel's are) runs under computation."""
    unit_overhead_s: NotNegative | None = 0.0
    """Time of each gather and each reduction of an FSDP2 unit beyond its collectives; None: not measured, and of its
    copies nothing is known."""
    one_sided_overhead_s: NotNegative | None = None
    """The same of each pull and each push of `odc`; None: not measured, `unit_overhead_s` is used."""
    notes: tuple[str, ...] = ()
    """Notes for the user: inconsistencies, and how they were resolved."""

    @property
    def interference(self) -> float:
        """Slow-down of computation by overlapped communication, per second of that communication."""
        return 1.0 - 1.0 / self.overlapped_slowdown

    @property
    def of_one_rank(self) -> Measured:
        """What is measured of a rank alone: its calls and its optimizer's steps, and nothing of communication."""
        of_device = self.calls, self.optimizers
        return Measured(self.date, self.versions, self.repetitions, (), *of_device, unit_overhead_s=None)

    def overhead_s(self, one_sided: bool) -> float:
        """Return the time of each gather and reduction of a unit beyond its communication."""
        if one_sided and self.one_sided_overhead_s is not None:
            return self.one_sided_overhead_s
        return self.unit_overhead_s or 0.0

    def times_of(self, operation: str, ranks: int, stride: int, algorithm: str) -> CollectiveTimes | None:
        """Return the times of a collective in a group, if they were measured."""
        wanted = operation, ranks, stride, algorithm
        found = (one for one in self.collectives if (one.operation, one.ranks, one.stride, one.algorithm) == wanted)
        return next(found, None)


def call_key(graph: ModelGraph, call: Call) -> str:
    """Return the key of calls that take equally long: class and shapes of the operator, and its work.

    The key does not depend on the model's name or on the number of its layers.
    """
    operator = graph.operators[call.operator]
    shapes = [parameter.shape for parameter in operator.parameters]
    text = repr((operator.kind, shapes, graph.precision, call.forward, call.backward))
    return sha256(text.encode()).hexdigest()[:16]


def pass_launch_s(graph: ModelGraph, times: Sequence[CallTimes]) -> float:
    """Return the seconds in which the host launches a pass of a model, given the times of all kinds of its calls."""
    by_key = {one.key: one for one in times}
    taken = [by_key[call_key(graph, call)] for call in graph.calls]
    return sum(one.forward_launch_s + one.backward_launch_s for one in taken)


def interpolated(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """Return the value at a size, linear between neighbours and constant outside."""
    if size <= sizes[0]:
        return values[0]
    for (below, low), (above, high) in pairwise(zip(sizes, values, strict=True)):
        if size <= above:
            return low + (high - low) * (size - below) / (above - below)
    return values[-1]
