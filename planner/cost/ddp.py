"""DistributedDataParallel: which plans it can run, their memory and their time.

It runs a plan that replicates every operator whole, in fp32 and on the device, if that fits the limit.  Why not in
bf16: `why_not_copies`.
Its stages are ordinary `StageCandidate`s, so that `planner.cost.peak_memory` and `planner.cost.step_time` do the sums.

Memory, with S, OPT and G (gradients of all parameters) as in `planner.cost.unit_memory`:

    gradients lie in buckets that live from step to step, so at every moment     S + OPT + B
    accumulating, those of micro-batches before are tensors of their own, which give way to the buckets
    as they are reduced, and come one by one in the first micro-batch, in others are there             `_held`
    forward of a call      activations saved before it + its forward peak         `Replica._highest`
    recomputation          output of the block + saved in it so far + forward peak
    backward of a call     activations saved before it + its backward peak (its gradients are in it:
                           they are tensors until they are copied) + gradients of tied parameters
                           that wait for another call
    optimizer              S + OPT + B + temporaries

B is G without rounding each tensor to 512 bytes, and with what never runs: that has a place in the buckets, and
neither gradients nor states of the optimizer.

Time: bucket k is all-reduced once per step, in the last micro-batch, when the backward that made its
last gradient is over and bucket k-1 is done, while the backward goes on.  With Q_c the seconds of
reduction that wait when the backward B_c of call c begins, and r_c those of buckets that it fills,

    Q_(c-1) = max(0, Q_c - B_c) + r_c            min(Q_c, B_c) is hidden under B_c      `reductions`

and what is left after the first call is exposed.  If the backend does not overlap, all is exposed.
Source: `torch/nn/parallel/distributed.py` and `reducer.cpp` of torch 2.13.0, as `runtime` does the same
(gradients are views of buckets, and set to None between steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from planner.collectives import collective_s
from planner.cost.stage_costs import StageCosts
from planner.cost.stage_memory import Moment
from planner.cost.stage_option import Run, Segment, StageCandidate
from planner.cost.unit_memory import UnitBytes, unit_bytes
from planner.cost.workload import Workload
from planner.model.stages import Stage, StagedModel, agreed
from planner.strategies.replicate import BUCKET_BYTES, COPY, FIRST_BUCKET_BYTES
from planner.strategies.spec import Strategy
from profiler.byte_sizes import allocated_bytes
from profiler.model_graph import ModelGraph, Parameter, Recompute


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
    groups, left_bytes = list[list[tuple[int, Parameter]]](), 0
    for index, parameter in reversed(pairs) if is_rebuilt else pairs:
        if left_bytes <= 0:
            left_bytes = BUCKET_BYTES if groups else FIRST_BUCKET_BYTES
            groups.append([])
        groups[-1].append((index, parameter))
        left_bytes -= parameter.element_bytes * parameter.numel
    found = []
    for members in groups if is_rebuilt else reversed(groups):
        names, operators = tuple(p.name for _, p in members), frozenset(index for index, _ in members)
        found.append(Bucket(names, operators, sum(p.element_bytes * p.numel for _, p in members)))
    return tuple(found)


def is_plain(strategies: Iterable[Strategy]) -> bool:
    """Return whether every operator of these strategies is copied to every device."""
    return all(strategy.spec.by_ddp and not strategy.offload for strategy in strategies)


def why_not_copies(graph: ModelGraph, precision: str) -> str:
    """Return why DistributedDataParallel cannot run a model that every device has a copy of; empty if it can.

    Parameters that were frozen when it began it would never reduce.  In bf16, but for autocast, which computes norms
    and losses in fp32, torch offers a private `_MixedPrecision`, which adds up the gradients of micro-batches in bf16:
    that is not what units of FSDP2, or one process under the same policy, give.
    """
    parameters = [parameter for operator in graph.operators for parameter in operator.parameters]
    if precision == "bf16":
        return (
            f"DistributedDataParallel has no mixed precision that computes in {precision} what units of FSDP2 compute"
        )
    if not all(parameter.trainable for parameter in parameters):
        return "DistributedDataParallel would never reduce parameters that are frozen now"
    if any(parameter.dtype != "float32" for parameter in parameters):
        return "DistributedDataParallel would reduce gradients in the parameters' dtype, not in fp32"
    return ""


def can_replicate(graph: ModelGraph, strategies: Iterable[Strategy], precision: str) -> bool:
    """Return whether DistributedDataParallel can run operators of these strategies, split ones left out."""
    return is_plain(strategies) and not why_not_copies(graph, precision)


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


@dataclass(frozen=True)
class Own:
    """The parameters of one stage: those that it is the first to call, and in the first stage those never called."""

    bytes: UnitBytes
    tensors: int
    """How many of them are trained."""


class ReplicatedParameters:
    """What a model under DistributedDataParallel holds and reduces at every micro-batch."""

    def __init__(self, model: StagedModel, load: Workload) -> None:
        graph = model.graph
        self.bytes = [unit_bytes(op.parameters, COPY, load.precision, load.optimizer) for op in graph.operators]
        for operator in model.idle:  # no gradient, and so no step, comes of it: it rests, and has a place in a bucket
            self.bytes[operator] = UnitBytes(parameters=self.bytes[operator].parameters)
        self.gradients = sum(unit.full_gradients for unit in self.bytes)
        """G: bytes of all gradients that there are."""
        self.rest = sum(unit.parameters + unit.optimizer for unit in self.bytes)
        """S + OPT."""
        in_order = buckets(graph)
        self.buckets = sum(allocated_bytes(bucket.size_bytes) for bucket in in_order)
        """B: bytes of the buckets that they lie in."""
        calls = [(index, call) for index, call in enumerate(graph.calls) if call.reads_parameters]
        self.first = {call.operator: index for index, call in reversed(calls)}
        self.waiting = [0] * len(graph.calls)
        """For every call, bytes of gradients of tied parameters that wait during its backward for another call."""
        for operator, last in {call.operator: index for index, call in calls}.items():
            for index in range(self.first[operator], last):
                self.waiting[index] += self.bytes[operator].full_gradients
        made = [0] * len(graph.calls)
        for operator, index in self.first.items():
            made[index] = self.bytes[operator].full_gradients
        self.done = [*accumulate(reversed(made), initial=0)][-2::-1]
        """For every call, bytes of gradients that calls after it have made in backward."""
        self.filled_s = [0.0] * len(graph.calls)
        """For every call, seconds of the all-reduces of buckets that its backward fills."""
        for bucket in in_order:
            # A bucket of operators that are never called is reduced with the rest when backward ends.
            index = min((self.first.get(operator, 0) for operator in bucket.operators), default=0)
            ranks = load.cluster.world_size
            self.filled_s[index] += collective_s("all_reduce", bucket.size_bytes, load.cluster, ranks)
        self.of_stage = [self._own(model, stage) for stage in model.stages]

    def _own(self, model: StagedModel, stage: Stage) -> Own:
        calls = range(stage.start, stage.start + len(stage.calls))
        owned = [*dict.fromkeys(call.operator for call in stage.calls if self.first[call.operator] in calls)]
        tensors = sum(p.trainable and p.used for o in owned for p in model.graph.operators[o].parameters)
        owned += model.idle if stage.start == 0 else ()
        return Own(sum((self.bytes[operator] for operator in owned), UnitBytes()), tensors)


class Replica:
    """A model under DistributedDataParallel at one workload."""

    def __init__(
        self, model: StagedModel, parameters: ReplicatedParameters, costs: Sequence[StageCosts], load: Workload
    ) -> None:
        """Take the costs of every stage, which for alike stages are those of one example."""
        self.load, self.model, self.stages, self.costs, self.parameters = load, model, model.stages, costs, parameters
        self.stage = cache(self._stage)
        self.segments = cache(_segments)
        self._options = cache(self._make_options)

    def computing_s(self, number: int, again: Recompute) -> float:
        """Return the seconds of a stage's forward and backward in one micro-batch, waiting for the host included, and
        for copies of what is offloaded.
        """
        found = self.segments(self.costs[number], again)
        return sum(s.forward_s + s.backward_s + s.forward_stall_s + s.backward_stall_s for s in found)

    def options(self, recompute: Sequence[Recompute]) -> tuple[StageCandidate, ...]:
        """Return the options, one per stage, given what of each is recomputed."""
        return self._options(agreed(self.stages, recompute))

    def _make_options(self, recompute: tuple[Recompute, ...]) -> tuple[StageCandidate, ...]:
        runs = (self.segments(costs, again) for costs, again in zip(self.costs, recompute, strict=True))
        reduce_s, interference_s = self._reductions([segment.backward_s for segments in runs for segment in segments])
        found = []
        for number, again in enumerate(recompute):
            option, start = self.stage(number, again), self.stages[number].start
            own = tuple(
                _reduced(one, reduce_s[call], interference_s[call]) for call, one in enumerate(option.segments, start)
            )
            found.append(option.with_fields(segments=own))
        return tuple(found)

    def _stage(self, number: int, again: Recompute) -> StageCandidate:
        """Return the option of a stage but for the reductions, which depend on the other stages."""
        stage, costs = self.stages[number], self.costs[number]
        calls = range(stage.start, stage.start + len(stage.calls))
        own, tensors = self.parameters.of_stage[number].bytes, self.parameters.of_stage[number].tensors
        return StageCandidate(
            strategies=(COPY,) * len(stage.operators),
            recompute=again,
            parameters=own.parameters,
            optimizer=own.optimizer,
            gradients=own.full_gradients,
            stepped=self.parameters.buckets if stage.start == 0 else 0,
            updates=own.updates,
            largest=own.largest,
            second=own.second,
            saved=costs.saved_bytes(again),
            held=costs.memory(again).held[-1],
            shared=costs.memory(again).shared,
            block=stage.block,
            takes=stage.takes if again else (),
            moments=tuple(self._highest(costs, again, calls)),
            segments=self.segments(costs, again),
            optimizer_s=self.load.optimizer_s(own.full_gradients, tensors=tensors),
            optimizer_wait_s=self.load.optimizer_wait_s(own.full_gradients, tensors),
        )

    @property
    def last_reduction_s(self) -> float:
        """Seconds of reduction that no backward hides, whatever is recomputed: of what the first call's fills."""
        return self._shares_s()[1][0]

    def _shares_s(self) -> tuple[float, list[float]]:
        """Return the slow-down of computation by a second of reductions, and what of them is not in that, by call."""
        cluster = self.load.cluster
        interference = cluster.measured.interference if cluster.measured and cluster.hides_buckets else 0.0
        return interference, [(1.0 - interference) * seconds for seconds in self.parameters.filled_s]

    def _reductions(self, backward_s: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return, for every call, the seconds of `reductions` and the slow-down of computation by them."""
        cluster, (interference, shares_s) = self.load.cluster, self._shares_s()
        found = reductions(backward_s, shares_s, cluster.hides_buckets)
        if cluster.hides_buckets and not cluster.overlaps:
            # Where units of FSDP2 hide nothing, the step is a sum: of the buckets it has what is left at the end.
            found = [found[0], *(0.0 for _ in found[1:])]
        return found, [interference * seconds for seconds in self.parameters.filled_s]

    def _highest(self, costs: StageCosts, recompute: Recompute, calls: range) -> Iterator[Moment]:
        """Yield the highest moment of a stage's forward, and of its backward.

        In backward the sums add the gradients of stages above as if each were reduced to a tensor of its own, and
        accumulating those of all: of what is held, the rest is put on the moment.
        """
        memory, accumulates = costs.memory(recompute), self.load.accumulation > 1
        added = self.parameters.gradients if accumulates else self.parameters.done[calls[-1]]
        held = [self._held(call) - added for call in calls]
        operators = [call.operator for call in costs.stage.calls]
        live, operator = _first_largest(memory.forward_peak, operators)
        yield Moment("forward", operator, 0, self.parameters.buckets, 0, live)
        # Of equal ones the first, and what runs again is before what runs back.
        backward = [gradients + live for gradients, live in zip(held, memory.backward_peak, strict=True)]
        total, place = _first_largest(backward, range(len(backward)))
        if memory.again_peak:
            live, operator = _first_largest(memory.again_peak, operators)
            if held[-1] + live >= total:
                yield Moment("recompute", operator, 0, held[-1], 0, live)
                return
        yield Moment("backward", operators[place], 0, held[place], 0, memory.backward_peak[place])

    def _held(self, call: int) -> int:
        """Return the bytes of buckets and gradients in the backward of a call, but for those that it makes."""
        done = self.parameters.done[call]
        # In the first micro-batch they come one by one, in the last they go; there are others from the third on.
        tensors = (0, 0, max(done, self.parameters.gradients - done), self.parameters.gradients)[
            min(self.load.accumulation, 3)
        ]
        return self.parameters.buckets + tensors + self.parameters.waiting[call]


def _reduced(segment: Segment, reduce_s: float, exposed_s: float) -> Segment:
    """Return the segment of a call with its reductions; `replace` takes several times as long, and there are many."""
    alone = segment.forward_s, segment.backward_s, segment.recompute_s, segment.launch_wait_s
    return Segment(
        *alone,
        forward_stall_s=segment.forward_stall_s,
        backward_stall_s=segment.backward_stall_s,
        step_reduce_s=reduce_s,
        step_exposed_s=exposed_s,
        launches=segment.launches,
    )


def _first_largest(numbers: Sequence[float], names: Sequence[int]) -> tuple[float, int]:
    """Return the largest number and its name, of equal ones the first."""
    place = max(range(len(numbers)), key=numbers.__getitem__)
    return numbers[place], names[place]


def _segments(costs: StageCosts, again: Recompute) -> tuple[Segment, ...]:
    """Return the segments of a stage, each of one call, but for the reductions."""
    *before, last = ((j,) for j in range(len(costs.stage.calls)))
    runs = [*(Run(calls, Recompute.NOTHING, True, ()) for calls in before), Run(last, again, True, ())]
    return tuple(run.at(costs) for run in runs)
