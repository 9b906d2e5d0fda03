"""Time of a step in closed form: computation and communication as streams.

Segments i = 1..n in execution order.  If the backend overlaps, with C computation, A all-gather before
forward, B all-gather before backward, K copy into the reduce-scatter (part of C), R reduce-scatter and X
once-per-step all-reduce:

    forward    A_1 + sum_i max(C_i, A_(i+1))
    backward   sum_i max(C_i, R_(i+1) + max(B_(i-1), K_i), X_(i+1)) + R_1 + X_1

where A_(n+1) = B_n, as nothing makes the first gather of the backward wait for the forward, B_0 = R_(n+1) = X_(n+1) =
0, and X counts in the last micro-batch of a step.  Under a segment's backward run the reduce-scatter of the segment
above and then the gather of the segment below, on one communicator (`fully_shard` waits for both before it goes on),
and on a stream of its own the all-reduce above.  If the backend does not overlap (gloo), it is the sum of all.  What is
on the compute stream (`Segment.forward_stall_s`, `backward_stall_s`), FSDP2's copies among it, counts as C here, and as
communication in the terms.  What nothing hides is added to the sum, and is exposed communication.

On the presets that is 0.2 % from a replay of FSDP2's streams in the mean, and -0.8 to +2.5 % at the worst
(`tests/unit/test_fsdp2_streams.py`).  Two of its freedoms are left out, so that a step stays a sum over neighbours: it
gathers up to two segments ahead in forward, and all-reduces that a window does not hide go on under the windows below
instead of lengthening their own.

    step = (M - 1) micro-batch + last micro-batch + waiting + optimizer

Waiting is what uneven micro-batches cost (`planner.cost.stragglers`), one charge for the plan as a whole: if
any of its units makes ranks wait for each other in every micro-batch, the slowest rank of each counts,
otherwise the slowest over the step; in both cases (factor - 1) times the seconds of computation.

C is as long as the host launches the segment where that takes longer than the device computes it (`launch_wait_s` is
the difference).

What units send together once per step (`planner.cost.shared_collectives`) is in their segments by shares, and what
those leave of its latencies is a charge of the plan too.

`planner.cost.simulator` simulates the same plan event by event; the two agree (tested).

`planner.options.overlap_terms` says what of that a stage contributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.cost.option_runs import counted
from planner.cost.shared_collectives import rest_s
from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.workload import Workload

Segments = Sequence[tuple[Segment, int]]
"""Segments in execution order, with how many each stands for: inside a run of one option those of several stages."""


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step by term; the terms sum to `total_s`."""

    compute_s: float
    """Forward and backward without recomputation."""
    recompute_s: float
    """Running recomputed forwards again."""
    launch_wait_s: float
    """Waiting for the host, which launches what the device runs."""
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
        computing_s = self.compute_s + self.recompute_s + self.launch_wait_s
        return computing_s + self.exposed_communication_s + self.waiting_s + self.optimizer_s


def forward_s(segments: Segments, overlaps: bool) -> float:
    """Return the seconds of a forward."""
    if not overlaps:
        return sum(times * (s.forward_s + s.forward_gather_s + s.forward_stall_s) for s, times in segments)
    gathers_s = [segment.forward_gather_s for segment, _ in segments] + [segments[-1][0].backward_gather_s]
    windows = zip(segments, gathers_s[1:], strict=True)
    inside_s = (times * max(this.forward_s + this.forward_stall_s, after_s) for (this, times), after_s in windows)
    return gathers_s[0] + sum(inside_s)


def backward_s(segments: Segments, overlaps: bool, last: bool) -> float:
    """Return the seconds of a backward."""
    if not overlaps:
        seconds = (n * (s.backward_s + s.backward_stall_s + s.backward_gather_s + s.reduce_s) for s, n in segments)
        return sum(seconds) + (sum(n * s.step_reduce_s for s, n in segments) if last else 0.0)
    alone = [segment for segment, _ in segments]
    total = alone[0].reduce_s + (alone[0].step_reduce_s if last else 0.0)
    for below, (this, times), above in zip([None, *alone], segments, [*alone[1:], None], strict=False):
        total += times * window_s(this, below.backward_gather_s if below else 0.0, above, last)
    return total


def window_s(
    segment: Segment, gather_s: float, above: Segment | None, last: bool, highest: Callable[..., Any] = max
) -> float:
    """Return the seconds of a segment's backward with what runs under it: the gather below, reductions above.

    The segments may hold arrays of numbers, if `highest` is their elementwise maximum.
    """
    computing_s = segment.backward_s + segment.backward_stall_s
    reduce_s, all_reduce_s = (above.reduce_s, above.step_reduce_s if last else 0.0) if above else (0.0, 0.0)
    found: float = highest(computing_s, reduce_s + highest(gather_s, segment.copy_in_s), all_reduce_s)
    return found


def plan_syncs(options: Iterable[StageCandidate]) -> bool:
    """Return whether a plan makes ranks wait for each other in every micro-batch."""
    return any(option.syncs_each_microbatch for option in options)


def waiting_s(option: StageCandidate, load: Workload, syncs: bool) -> float:
    """Return a stage's share of the waiting in a step, given whether ranks wait for each other in every micro-batch."""
    share = load.waits.factor(syncs) - 1.0
    if not share:
        return 0.0
    computing_s = sum(one.forward_s + one.backward_s - one.launch_wait_s for one in option.segments)
    return share * load.accumulation * computing_s


def step_time(options: Sequence[StageCandidate], load: Workload) -> StepTime:
    """Return the predicted time of a step, one option per stage in execution order."""
    runs = counted(options)
    segments = [(segment, times) for option, times in runs for segment in option.segments]
    overlaps, repeats = load.cluster.overlaps, load.accumulation
    again = waits = computing = communication = apart = 0.0
    for s, times in segments:
        again += times * s.recompute_s
        waits += times * s.launch_wait_s
        computing += times * (s.forward_s + s.backward_s)
        gathers_s = s.forward_gather_s + s.backward_gather_s
        alone_s = gathers_s + s.reduce_s + s.forward_stall_s + s.backward_stall_s
        communication += times * (repeats * alone_s + s.step_reduce_s)
        apart += times * (repeats * s.interference_s + s.step_exposed_s)
    recompute, launching = repeats * again, repeats * waits
    compute = repeats * computing - recompute - launching
    apart += rest_s((option.parts, times) for option, times in runs)
    elapsed = apart + repeats * forward_s(segments, overlaps) + backward_s(segments, overlaps, last=True)
    if repeats > 1:
        elapsed += (repeats - 1) * backward_s(segments, overlaps, last=False)
    exposed, syncs = max(0.0, elapsed - compute - recompute - launching), plan_syncs(option for option, _ in runs)
    return StepTime(
        compute_s=compute,
        recompute_s=recompute,
        launch_wait_s=launching,
        exposed_communication_s=exposed,
        waiting_s=sum(times * waiting_s(option, load, syncs) for option, times in runs),
        optimizer_s=sum(times * option.optimizer_s for option, times in runs),
        hidden_communication_s=max(0.0, communication + apart - exposed),
    )
