"""What a stage adds to the step time, apart from who stands beside it: the numbers of its windows.

`planner.cost.step_time` sums windows max(computation, communication) over segments.  Within a stage they are
fixed; at its edges they see one neighbour.  With a the stage above and b the one below, a stage adds

    inner                                                                  over the whole step
    forward    max(forward, first_gather(a))                               each micro-batch
    backward   max(top, reduce(a) + last_gather(b))                        one segment
               max(top, reduce(a) + top_gather)
               + max(bottom, bottom_reduce + last_gather(b))               more than one

The step grows with every one of these numbers, whatever the neighbours: that is what
`planner.search.pareto` rests on.  Without overlap nothing depends on a neighbour, and all is in `inner`.
The first gather of the first stage, its reduction, and the last gather of the last stage come on top.
Stalls (`Segment.forward_stall_s`, `backward_stall_s`) count as computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.step_time import reduction_s, step_time, waiting_s
from planner.cost.workload import Workload


class OverlapTerms(NamedTuple):
    """The numbers of one stage; all but `inner_s` are those of one micro-batch."""

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
    """Whether it is one segment, whose top and bottom windows are one."""


def _inner_s(segments: Sequence[Segment], repeats: int) -> float:
    total = 0.0
    for this, after in pairwise(segments):
        total += repeats * max(this.forward_s + this.forward_stall_s, after.forward_gather_s)
    for below, this, above in zip(segments, segments[1:], segments[2:], strict=False):
        for last, times in ((False, repeats - 1), (True, 1)):
            around_s = reduction_s(above, last) + below.backward_gather_s
            total += times * max(this.backward_s + this.backward_stall_s, around_s)
    return total


def overlap_terms(option: StageCandidate, load: Workload, meets: bool = True) -> OverlapTerms:
    """Return the numbers of a stage under one option; `meets` says which waiting the plan is charged."""
    waiting = waiting_s(option, load, meets)
    if not load.cluster.overlaps:
        time = step_time([option], load)
        alone_s = time.total_s - time.waiting_s + waiting
        return OverlapTerms(alone_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, single=True)
    segments, repeats = option.segments, load.accumulation
    lost_s = sum(repeats * segment.interference_s + segment.step_interference_s for segment in segments)
    first, last, single = segments[0], segments[-1], len(segments) == 1
    second = None if single else segments[1]
    return OverlapTerms(
        inner_s=option.optimizer_s + waiting + lost_s + (0.0 if single else _inner_s(segments, repeats)),
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
