"""Time of a step in closed form: computation and communication as two streams.

Segments i = 1..n in execution order; a gather runs ahead by one segment, as in FSDP2.  If the
backend overlaps, with C computation, A all-gather, B all-gather before backward and R reduction:

    forward    A_1 + sum_i max(C_i, A_(i+1))
    backward   B_n + sum_i max(C_i, R_(i+1) + B_(i-1)) + R_1

where A_(n+1) = B_0 = R_(n+1) = 0: under a segment's backward run the reduction of the segment
above and then the gather of the segment below (`fully_shard` waits for both before it goes on).
If the backend does not overlap (gloo), it is the sum of all.  In the last micro-batch of a step R
includes the once-per-step all-reduce.  Communication on the compute stream (`Segment.forward_stall_s`,
`backward_stall_s`) counts as C here, and as communication in the terms.  What computation loses to the
communication that runs with it (`Segment.apart`) is added to the sum, and is exposed communication.

    step = (M - 1) micro-batch + last micro-batch + waiting + optimizer

Waiting is what uneven micro-batches cost (`planner.cost.stragglers`), one charge for the plan as a whole: if
any of its units makes ranks wait for each other in every micro-batch, the slowest rank of each counts,
otherwise the slowest over the step; in both cases (factor - 1) times the seconds of computation.

`planner.cost.simulator` simulates the same plan event by event; the two agree (tested).

`OverlapTerms` are what a stage contributes.  Inside a stage the maxima are fixed; at its edges they depend on one
neighbour.  With a the stage above and b the one below, a stage adds

    inner                                                                  over the whole step
    forward    max(forward, first_gather(a))                               each micro-batch
    backward   max(top, reduce(a) + last_gather(b))                        one segment
               max(top, reduce(a) + top_gather)
               + max(bottom, bottom_reduce + last_gather(b))               more than one

The step grows with every one of these numbers, whatever the neighbours: that is what `planner.search.pareto` rests on.
Without overlap nothing depends on a neighbour, and all is in `inner`.  The first gather of the first stage, its
reduction, and the last gather of the last stage come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step by term; the terms sum to `total_s`."""

    compute_s: float
    """Forward and backward without recomputation."""
    recompute_s: float
    """Running recomputed forwards again."""
    exposed_communication_s: float
    """Communication that no computation hides."""
    waiting_s: float
    """Waiting for the rank whose micro-batches are the longest."""
    optimizer_s: float
    """Optimizer step."""
    hidden_communication_s: float
    """Communication overlapped with computation: not part of the total."""

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        terms = self.compute_s, self.recompute_s, self.exposed_communication_s, self.waiting_s, self.optimizer_s
        return sum(terms)


def forward_s(segments: Sequence[Segment], overlaps: bool) -> float:
    """Return the seconds of a forward."""
    if not overlaps:
        return sum(segment.forward_s + segment.forward_gather_s + segment.forward_stall_s for segment in segments)
    total = segments[0].forward_gather_s + segments[-1].forward_s + segments[-1].forward_stall_s
    return total + sum(
        max(this.forward_s + this.forward_stall_s, after.forward_gather_s) for this, after in pairwise(segments)
    )


def reduction_s(segment: Segment, last: bool) -> float:
    """Return R of a segment, with the all-reduce if it is the last micro-batch of a step."""
    return segment.reduce_s + (segment.step_reduce_s if last else 0.0)


def backward_s(segments: Sequence[Segment], overlaps: bool, last: bool) -> float:
    """Return the seconds of a backward."""
    if not overlaps:
        return sum(s.backward_s + s.backward_stall_s + s.backward_gather_s + reduction_s(s, last) for s in segments)
    total = segments[-1].backward_gather_s + reduction_s(segments[0], last)
    for index, segment in enumerate(segments):
        above = reduction_s(segments[index + 1], last) if index + 1 < len(segments) else 0.0
        below = segments[index - 1].backward_gather_s if index else 0.0
        total += max(segment.backward_s + segment.backward_stall_s, above + below)
    return total


def plan_syncs(options: Iterable[StageCandidate]) -> bool:
    """Return whether a plan makes ranks wait for each other in every micro-batch."""
    return any(option.syncs_each_microbatch for option in options)


def waiting_s(option: StageCandidate, load: Workload, syncs: bool) -> float:
    """Return a stage's share of the waiting in a step, given whether ranks wait for each other in every micro-batch."""
    computing_s = sum(segment.forward_s + segment.backward_s for segment in option.segments)
    return (load.waits.factor(syncs) - 1.0) * load.accumulation * computing_s


def step_time(options: Sequence[StageCandidate], load: Workload) -> StepTime:
    """Return the predicted time of a step, one option per stage in execution order."""
    segments = [segment for option in options for segment in option.segments]
    overlaps, repeats = load.cluster.overlaps, load.accumulation
    recompute = repeats * sum(segment.recompute_s for segment in segments)
    compute = repeats * sum(segment.forward_s + segment.backward_s for segment in segments) - recompute
    communication = sum(
        repeats * (s.forward_gather_s + s.backward_gather_s + s.reduce_s + s.forward_stall_s + s.backward_stall_s)
        + s.step_reduce_s
        for s in segments
    )
    interference = sum(repeats * s.interference_s + s.step_interference_s for s in segments)
    elapsed = interference + repeats * forward_s(segments, overlaps) + backward_s(segments, overlaps, last=True)
    if repeats > 1:
        elapsed += (repeats - 1) * backward_s(segments, overlaps, last=False)
    exposed, syncs = max(0.0, elapsed - compute - recompute), plan_syncs(options)
    return StepTime(
        compute_s=compute,
        recompute_s=recompute,
        exposed_communication_s=exposed,
        waiting_s=sum(waiting_s(option, load, syncs) for option in options),
        optimizer_s=sum(option.optimizer_s for option in options),
        hidden_communication_s=max(0.0, communication + interference - exposed),
    )


class OverlapTerms(NamedTuple):
    """A stage's contributions to the step time; all but `inner_s` are of one micro-batch."""

    inner_s: float
    """Seconds of a step that depend on no neighbour, the optimizer's and the waiting included."""
    first_gather_s: float
    """Gather before its forward, under the forward of the stage below."""
    reduce_s: float
    """Reduction under the backward of the stage below, in a micro-batch that is not the last of a step."""
    last_reduce_s: float
    """The same in the last micro-batch."""
    last_gather_s: float
    """Gather before its backward, under the backward of the stage above."""
    forward_s: float
    """Computation of its last segment's forward."""
    top_s: float
    """Computation of its last segment's backward."""
    top_gather_s: float
    """Gather of its last segment but one before backward; 0 if it is one segment."""
    bottom_s: float
    """Computation of its first segment's backward; 0 if it is one segment."""
    bottom_reduce_s: float
    """Reduction of its second segment; 0 if it is one segment."""
    last_bottom_reduce_s: float
    """The same in the last micro-batch."""
    single: bool
    """Whether it is one segment, whose top and bottom terms are one."""


def _inner_s(segments: Sequence[Segment], load: Workload) -> float:
    total = 0.0
    for this, after in pairwise(segments):
        total += load.accumulation * max(this.forward_s + this.forward_stall_s, after.forward_gather_s)
    for below, this, above in zip(segments, segments[1:], segments[2:], strict=False):
        for last, times in load.passes:
            around_s = reduction_s(above, last) + below.backward_gather_s
            total += times * max(this.backward_s + this.backward_stall_s, around_s)
    return total


def overlap_terms(option: StageCandidate, load: Workload, syncs: bool = True) -> OverlapTerms:
    """Return the numbers of a stage under one option; `syncs` selects the waiting that is charged."""
    waiting = waiting_s(option, load, syncs)
    if not load.cluster.overlaps:
        time = step_time([option], load)
        alone_s = time.total_s - time.waiting_s + waiting
        return OverlapTerms(alone_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, single=True)
    segments = option.segments
    lost_s = sum(load.accumulation * segment.interference_s + segment.step_interference_s for segment in segments)
    first, last, single = segments[0], segments[-1], len(segments) == 1
    second = None if single else segments[1]
    return OverlapTerms(
        inner_s=option.optimizer_s + waiting + lost_s + _inner_s(segments, load),
        first_gather_s=first.forward_gather_s,
        reduce_s=first.reduce_s,
        last_reduce_s=reduction_s(first, last=True),
        last_gather_s=last.backward_gather_s,
        forward_s=last.forward_s + last.forward_stall_s,
        top_s=last.backward_s + last.backward_stall_s,
        top_gather_s=0.0 if single else segments[-2].backward_gather_s,
        bottom_s=0.0 if single else first.backward_s + first.backward_stall_s,
        bottom_reduce_s=reduction_s(second, last=False) if second else 0.0,
        last_bottom_reduce_s=reduction_s(second, last=True) if second else 0.0,
        single=single,
    )
