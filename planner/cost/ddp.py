"""DistributedDataParallel: which plans it can run, their memory and their time.

It runs a plan that replicates every operator whole, in fp32 and on the device, if that fits the limit.
Its stages are ordinary `StageCandidate`s, so that `planner.cost.peak_memory` and `planner.cost.step_time` do the sums.

Memory, with S, OPT and G (gradients of all parameters) as in `planner.cost.unit_memory`:

    gradients lie in buckets that live from step to step, so at every moment     S + OPT + G
    accumulating, those that are not reduced yet are tensors of their own          + G
    forward of a call      activations saved before it + its forward peak          `_Stage.moments`
    recomputation          output of the block + saved in it so far + forward peak
    backward of a call     activations saved before it + its backward peak (its gradients are in it:
                           they are tensors until they are copied) + gradients of tied parameters
                           that wait for another call
    optimizer              S + OPT + G + temporaries

Time: bucket k is all-reduced once per step, in the last micro-batch, when the backward that made its
last gradient is over and bucket k-1 is done, while the backward goes on.  With Q_c the seconds of
reduction that wait when the backward B_c of call c begins, and r_c those of buckets that it fills,

    Q_(c-1) = max(0, Q_c - B_c) + r_c            min(Q_c, B_c) is hidden under B_c      `reductions`

and what is left after the first call is exposed.  If the backend does not overlap, all is exposed.
Source: `torch/nn/parallel/distributed.py` and `reducer.cpp` of torch 2.13.0, as `runtime` uses them
(gradients are views of buckets, and set to None between steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.collectives import collective_s
from planner.cost.stage_costs import StageCosts
from planner.cost.stage_memory import Moment
from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.unit_memory import UnitBytes, unit_bytes
from planner.cost.workload import Workload
from planner.model.stages import StagedModel
from planner.strategies.replicate import COPY
from planner.strategies.spec import REDUCE_BYTES, Strategy
from profiler.model_graph import ModelGraph, Parameter

FIRST_BUCKET_BYTES = 1 << 20
"""A bucket is closed by the parameter that makes it this large (torch: `_DEFAULT_FIRST_BUCKET_BYTES`)."""
BUCKET_BYTES = 25 << 20
"""The same for all other buckets (torch: `bucket_cap_mb`)."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are all-reduced together."""

    parameters: tuple[str, ...]
    """Names of the parameters, in the order in which they were added."""
    operators: frozenset[int]
    """Indices of their operators."""
    size_bytes: int


def buckets(graph: ModelGraph) -> tuple[Bucket, ...]:
    """Return the buckets of a model in the order in which they are reduced, from the second step on.

    Parameters are taken as their gradients come; where some operators are never called, torch keeps
    its first assignment, by order of the parameters with the small bucket first, and turns it round.
    """
    called = {call.operator for call in graph.calls}
    is_rebuilt = called == set(range(len(graph.operators)))
    pairs = [(index, p) for index, op in enumerate(graph.operators) for p in op.parameters if p.trainable]
    found: list[Bucket] = []
    members, size_bytes = list[tuple[int, Parameter]](), 0

    def close() -> None:
        names = tuple(parameter.name for _, parameter in members)
        found.append(Bucket(names, frozenset(index for index, _ in members), size_bytes))

    for index, parameter in reversed(pairs) if is_rebuilt else pairs:
        members.append((index, parameter))
        size_bytes += REDUCE_BYTES * parameter.numel
        if size_bytes >= (BUCKET_BYTES if found else FIRST_BUCKET_BYTES):
            close()
            members, size_bytes = [], 0
    if members:
        close()
    return tuple(found) if is_rebuilt else tuple(reversed(found))


def can_replicate(graph: ModelGraph, strategies: Iterable[Strategy], precision: str) -> bool:
    """Return whether DistributedDataParallel can run operators of these strategies, split ones left out.

    Not if some parameter is frozen: DDP would never reduce the gradients of one that is unfrozen later.
    """
    trains = all(parameter.trainable for operator in graph.operators for parameter in operator.parameters)
    plain = all(strategy.spec.by_ddp and not strategy.offload for strategy in strategies)
    return trains and plain and precision == "fp32"


def reductions(backward_s: Sequence[float], filled_s: Sequence[float], overlaps: bool) -> list[float]:
    """Return, for every call, the seconds of reduction that overlap with the backward after its own.

    `filled_s` are those of the buckets that each call's backward fills.  All in order of execution; call 0 has what
    is exposed.
    """
    if not overlaps:
        return list(filled_s)
    found, waiting_s = [0.0] * len(backward_s), 0.0
    for index in reversed(range(len(backward_s))):
        if index + 1 < len(backward_s):
            found[index + 1] = min(waiting_s, backward_s[index])
            waiting_s -= found[index + 1]
        waiting_s += filled_s[index]
    found[0] = waiting_s
    return found


class Replica:
    """A model under DistributedDataParallel at one workload."""

    def __init__(self, model: StagedModel, costs: Sequence[StageCosts], load: Workload) -> None:
        """Take the costs of every stage, which for alike stages are those of one example."""
        self.load, self.graph, self.stages, self.idle = load, model.graph, model.stages, model.idle
        self.costs = costs
        self.bytes = [
            unit_bytes(operator.parameters, COPY, load.precision, load.optimizer) for operator in self.graph.operators
        ]
        calls = list(enumerate(self.graph.calls))
        self.first = {call.operator: index for index, call in reversed(calls)}
        self.last = {call.operator: index for index, call in calls}

    @cached_property
    def gradients(self) -> int:
        """G: bytes of all gradients."""
        return sum(unit.full_gradients for unit in self.bytes)

    @cached_property
    def waiting(self) -> list[int]:
        """For every call, bytes of gradients of tied parameters that wait during its backward for another call."""
        found = [0] * len(self.graph.calls)
        for operator, last in self.last.items():
            for call in range(self.first[operator], last):
                found[call] += self.bytes[operator].full_gradients
        return found

    @cached_property
    def filled_s(self) -> list[float]:
        """For every call, seconds of the all-reduces of buckets that its backward fills."""
        found, cluster = [0.0] * len(self.graph.calls), self.load.cluster
        for bucket in buckets(self.graph):
            # A bucket of operators that are never called is reduced with the rest when backward ends.
            call = min((self.first.get(operator, 0) for operator in bucket.operators), default=0)
            found[call] += collective_s("all_reduce", bucket.size_bytes, cluster, cluster.world_size)
        return found

    def options(self, recompute: Sequence[bool]) -> tuple[StageCandidate, ...]:
        """Return the options, one per stage, given which stages are recomputed."""
        stages = list(self._stages(recompute))
        backward_s = [seconds for stage in stages for seconds in stage.backward_s]
        reduce_s, interference_s = self._reductions(backward_s)
        below, found = 0, []
        for stage in stages:
            own = stage.own_bytes
            below += own.full_gradients
            # The sums add gradients as units are reduced; buckets exist from the start.
            accumulates = self.load.accumulation > 1
            unseen = (self.gradients, self.gradients) if accumulates else (self.gradients, below)
            calls = slice(stage.start, stage.start + len(stage.backward_s))
            found.append(stage.option(unseen, reduce_s[calls], interference_s[calls]))
        return tuple(found)

    def _reductions(self, backward_s: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return, for every call, the seconds of `reductions` and the slow-down of computation by them."""
        cluster = self.load.cluster
        interference = cluster.measured.interference if cluster.measured and cluster.hides_buckets else 0.0
        shares_s = [(1.0 - interference) * seconds for seconds in self.filled_s]
        found = reductions(backward_s, shares_s, cluster.hides_buckets)
        if cluster.hides_buckets and not cluster.overlaps:
            # Where units of FSDP2 hide nothing, the step is a sum: of the buckets it has what is left at the end.
            found = [found[0], *(0.0 for _ in found[1:])]
        return found, [interference * seconds for seconds in self.filled_s]

    def _stages(self, recompute: Sequence[bool]) -> Iterator[_Stage]:
        start, opened, idle = 0, set[int](), self.idle
        for costs, stage, again in zip(self.costs, self.stages, recompute, strict=True):
            calls = range(start, start + len(stage.calls))
            owned = dict.fromkeys(call.operator for call in stage.calls if call.operator not in opened)
            opened |= owned.keys()
            own = sum((self.bytes[o] for o in [*owned, *idle]), UnitBytes())
            tensors = sum(p.trainable for o in [*owned, *idle] for p in self.graph.operators[o].parameters)
            waiting = [self.waiting[call] for call in calls]
            yield _Stage(costs, stage.operators, again, own, tensors, start, waiting)
            start, idle = calls.stop, ()


@dataclass(frozen=True)
class _Stage:
    """One stage of a replica."""

    costs: StageCosts
    """Of its calls, which for alike stages are those of one example."""
    operators: tuple[int, ...]
    recompute: bool
    own_bytes: UnitBytes
    """Of the operators that are first called here."""
    tensors: int
    """Trained ones of those."""
    start: int
    """Index of its first call."""
    waiting: list[int]
    """For each call, gradients of tied parameters that wait for another call."""

    @cached_property
    def backward_s(self) -> list[float]:
        """Seconds of every call's backward; the last one's has the recomputation."""
        *before, last = self.costs.backward_s
        return [*before, last + (sum(self.costs.forward_s) if self.recompute else 0.0)]

    def option(
        self, unseen: tuple[int, int], reduce_s: Sequence[float], interference_s: Sequence[float]
    ) -> StageCandidate:
        """Return the stage as the sums take it; `unseen` are gradients to be added in forward and in backward."""
        costs, own = self.costs, self.own_bytes
        again_s = sum(costs.forward_s) if self.recompute else 0.0
        top, moments = len(self.backward_s) - 1, list(self._moments(*unseen))
        forward = [moment for moment in moments if moment.phase == "forward"]
        backward = [moment for moment in moments if moment.phase != "forward"]
        segments = [
            Segment(forward_s, self.backward_s[j], again_s if j == top else 0.0, step_reduce_s=reduce_s[j])
            for j, forward_s in enumerate(costs.forward_s)
        ]
        lost_s = zip(segments, interference_s, strict=True)
        return StageCandidate(
            strategies=(COPY,) * len(self.operators),
            recompute=self.recompute,
            parameters=own.parameters,
            optimizer=own.optimizer,
            gradients=own.full_gradients,
            saved=costs.block_saved if self.recompute else costs.saved[-1],
            moments=tuple(max(seen, key=lambda moment: moment.total_bytes) for seen in (forward, backward)),
            segments=tuple(replace(segment, step_interference_s=seconds) for segment, seconds in lost_s),
            optimizer_s=costs.load.optimizer_s(own.full_gradients, tensors=self.tensors),
        )

    def _moments(self, forward: int, backward: int) -> Iterator[Moment]:
        """Yield what is held at every call, the gradients as given."""
        costs, extra = self.costs, 0.0
        for j, call in enumerate(costs.stage.calls):
            yield Moment("forward", call.operator, 0, forward, 0, costs.saved[j] + costs.forward_peak[j])
        if self.recompute:
            extra = costs.block_extra
            around = extra + costs.output[-1]
            for j, call in enumerate(costs.stage.calls):
                live = around + costs.saved[j] + costs.forward_peak[j]
                yield Moment("recompute", call.operator, 0, backward + self.waiting[-1], 0, live)
        for j, call in enumerate(costs.stage.calls):
            live = extra + costs.saved[j] + costs.backward_peak[j]
            yield Moment("backward", call.operator, 0, backward + self.waiting[j], 0, live)
