"""What each option of a stage contributes to the step time (`planner.cost.step_time`), as arrays over options.

Inside a stage the maxima are fixed; at its edges they depend on one neighbour.  With a the stage above and b the one
below, a stage adds

    inner                                                                  over the whole step
    forward    max(forward, first_gather(a))                                       each micro-batch
    backward   max(top, reduce(a) + max(last_gather(b), top_copy), all_reduce(a))  one segment
               max(top, reduce(a) + max(top_gather, top_copy), all_reduce(a))
               + max(bottom, bottom_reduce + max(last_gather(b), bottom_copy), bottom_all_reduce)    more than one

The step grows with every one of these numbers, whatever the neighbours: that is what `planner.options.pareto` rests on.
Without overlap nothing depends on a neighbour, and all is in `inner`.  The first gather of the first stage and its
reductions come on top, and above the last stage its own last gather is in place of first_gather(a).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import reduce
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.step_time import window_s
from planner.cost.workload import Workload

Array = NDArray[np.float64]

Numbers = Array | float

_SEGMENT = attrgetter(*(field.name for field in fields(Segment) if field.name != "launches"))


class OverlapTerms(NamedTuple):
    """Contributions to the step time, of each option; all but `inner_s` are of one micro-batch."""

    inner_s: Numbers
    """Seconds of a step that depend on no neighbour, the optimizer's and the waiting included."""
    first_gather_s: Numbers
    """Gather before its forward, under the forward of the stage below."""
    reduce_s: Numbers
    """Reduce-scatter under the backward of the stage below."""
    all_reduce_s: Numbers
    """All-reduce under that, in the last micro-batch of a step."""
    last_gather_s: Numbers
    """Gather before its backward, under the backward of the stage above."""
    forward_s: Numbers
    """Computation of its last segment's forward."""
    top_s: Numbers
    """Computation of its last segment's backward."""
    top_gather_s: Numbers
    """Gather of its last segment but one before backward; 0 if it is one segment."""
    top_copy_s: Numbers
    """Copy into the reduce-scatter of its last segment."""
    bottom_s: Numbers
    """Computation of its first segment's backward; 0 if it is one segment."""
    bottom_reduce_s: Numbers
    """Reduce-scatter of its second segment; 0 if it is one segment."""
    bottom_all_reduce_s: Numbers
    """All-reduce of that, in the last micro-batch of a step."""
    bottom_copy_s: Numbers
    """Copy into the reduce-scatter of its first segment; 0 if it is one segment."""
    single: Numbers
    """Whether it is one segment, whose top and bottom terms are one."""


def overlap_terms(options: Sequence[StageCandidate], load: Workload, syncs: bool = True) -> Array:
    """Return the terms of the options of one stage, shape (options, terms).

    `syncs` is whether waiting in every micro-batch is charged, or once per step.
    """
    found = np.empty((len(options), len(OverlapTerms._fields)))
    for count, members in by_count(len(option.segments) for option in options):
        rows = [[_SEGMENT(segment) for segment in options[k].segments] for k in members]
        segments = np.array(rows, dtype=np.float64).transpose(1, 2, 0)
        optimizer_s = np.array([options[k].optimizer_s for k in members])
        found[members] = terms_of([Segment(*segments[i]) for i in range(count)], optimizer_s, load, syncs)
    return found


def by_count(counts: Iterable[int]) -> list[tuple[int, list[int]]]:
    """Return for each count where it is."""
    found = dict[int, list[int]]()
    for place, count in enumerate(counts):
        found.setdefault(count, []).append(place)
    return [*found.items()]


def terms_of(segments: Sequence[Segment], optimizer_s: Array, load: Workload, syncs: bool) -> Array:
    """Return the terms of options of so many segments, each of which holds one number for each option, shape (options,
    terms)."""
    repeats, zero = load.accumulation, np.zeros(len(optimizer_s))
    computing_s = repeats * sum(s.forward_s + s.backward_s for s in segments)
    waiting_s = (load.waits.factor(syncs) - 1.0) * (computing_s - repeats * sum(s.launch_wait_s for s in segments))
    apart_s = sum(repeats * s.interference_s + s.step_exposed_s for s in segments)
    if not load.cluster.overlaps:
        communication_s = sum(
            repeats * (s.forward_gather_s + s.forward_stall_s + s.backward_stall_s + s.backward_gather_s + s.reduce_s)
            + s.step_reduce_s
            for s in segments
        )
        alone_s = optimizer_s + waiting_s + apart_s + computing_s + communication_s
        return np.column_stack([alone_s, *[zero] * 12, zero + 1.0])
    first, last, single = segments[0], segments[-1], len(segments) == 1
    terms = OverlapTerms(
        inner_s=optimizer_s + waiting_s + apart_s + _between_s(segments, load),
        first_gather_s=first.forward_gather_s,
        reduce_s=first.reduce_s,
        all_reduce_s=first.step_reduce_s,
        last_gather_s=last.backward_gather_s,
        forward_s=last.forward_s + last.forward_stall_s,
        top_s=last.backward_s + last.backward_stall_s,
        top_gather_s=zero if single else segments[-2].backward_gather_s,
        top_copy_s=last.copy_in_s,
        bottom_s=zero if single else first.backward_s + first.backward_stall_s,
        bottom_reduce_s=zero if single else segments[1].reduce_s,
        bottom_all_reduce_s=zero if single else segments[1].step_reduce_s,
        bottom_copy_s=zero if single else first.copy_in_s,
        single=zero + single,
    )
    return np.column_stack(terms)


def _between_s(segments: Sequence[Segment], load: Workload) -> Any:
    """Return the seconds of the windows that no other stage takes part in."""
    total: Any = 0.0
    for this, after in pairwise(segments):
        total = total + load.accumulation * np.maximum(this.forward_s + this.forward_stall_s, after.forward_gather_s)
    for below, this, above in zip(segments, segments[1:], segments[2:], strict=False):
        for last, times in load.passes:
            total = total + times * window_s(this, below.backward_gather_s, above, last, _highest)
    return total


def _highest(*numbers: Any) -> Any:
    return reduce(np.maximum, numbers)
