"""Simulates one step of a plan event by event on two streams: the reference for predicted time.

Both streams run their tasks in the order in which FSDP2 issues them; a task starts when its
stream is free and everything that it waits for has ended:

    forward     gather i+1 is issued when the forward of i starts; the forward of i waits for gather i
    backward    when the backward of i starts, gather i-1 is issued; when it ends, reduction i is;
                the backward of i-1 waits for gather i-1 and, because FSDP2 reuses the reduction's
                input buffer, the end of the backward of i waits for reduction i+1
    interference  slow-down of computation by concurrent communication, as a sum at the end of a micro-batch
    waiting     where ranks wait for each other in every micro-batch, at its end for the slowest rank; otherwise once,
                before the optimizer
    optimizer   waits for everything

A segment's stalls are communication on the compute stream, part of its forward and its backward.
On a backend that does not overlap, the two streams are one.  `planner.cost.step_time` has the closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.step_time import plan_syncs, reduction_s, waiting_s
from planner.cost.workload import Workload


@dataclass(frozen=True, slots=True)
class Event:
    """One task on one stream."""

    stream: str
    """`compute` or `communication`."""
    label: str
    """What it is, e.g. `forward` or `all-gather`."""
    segment: int
    """Index of the segment in execution order."""
    start_s: float
    end_s: float


class _Streams:
    """Two streams that run tasks in the order of issue."""

    def __init__(self, overlaps: bool) -> None:
        self.free_s = {"compute": 0.0, "communication": 0.0}
        self.overlaps = overlaps
        self.events: list[Event] = []

    def run(self, stream: str, label: str, segment: int, duration_s: float, after_s: float = 0.0) -> Event:
        """Run a task not before `after_s` and return its event."""
        start = max(self.free_s[stream], after_s)
        if not self.overlaps:
            start = max(start, *self.free_s.values())
        event = Event(stream, label, segment, start, start + duration_s)
        self.free_s[stream] = event.end_s
        self.events.append(event)
        return event

    @property
    def now_s(self) -> float:
        """When everything that was issued has ended."""
        return max(self.free_s.values())

    def join(self) -> None:
        """Let both streams wait for each other."""
        self.free_s = dict.fromkeys(self.free_s, self.now_s)


def _forward(streams: _Streams, segments: Sequence[Segment]) -> None:
    gather = streams.run("communication", "all-gather", 0, segments[0].forward_gather_s)
    for index, segment in enumerate(segments):
        ready = gather.end_s
        start = max(ready, streams.free_s["compute"])
        if index + 1 < len(segments) and streams.overlaps:
            gather = streams.run("communication", "all-gather", index + 1, segments[index + 1].forward_gather_s, start)
        streams.run("compute", "forward", index, segment.forward_s + segment.forward_stall_s, ready)
        if index + 1 < len(segments) and not streams.overlaps:
            gather = streams.run("communication", "all-gather", index + 1, segments[index + 1].forward_gather_s)


def _backward(streams: _Streams, segments: Sequence[Segment], last: bool) -> None:
    top = len(segments) - 1
    gather = streams.run("communication", "all-gather", top, segments[top].backward_gather_s, streams.now_s)
    reduced_s = 0.0
    for index in range(top, -1, -1):
        segment = segments[index]
        start = max(gather.end_s, streams.free_s["compute"])
        if index and streams.overlaps:
            duration = segments[index - 1].backward_gather_s
            gather = streams.run("communication", "all-gather", index - 1, duration, start)
        done = streams.run("compute", "backward", index, segment.backward_s + segment.backward_stall_s, start)
        streams.free_s["compute"] = max(done.end_s, reduced_s)
        label = "reduce-scatter + all-reduce" if last and segment.step_reduce_s else "reduce-scatter"
        after_s = streams.free_s["compute"]
        reduced_s = streams.run("communication", label, index, reduction_s(segment, last), after_s).end_s
        if index and not streams.overlaps:
            gather = streams.run("communication", "all-gather", index - 1, segments[index - 1].backward_gather_s)


def _micro_batch(streams: _Streams, segments: Sequence[Segment], last: bool, wait_s: float) -> None:
    """Simulate one micro-batch and the wait at its end."""
    _forward(streams, segments)
    streams.join()
    _backward(streams, segments, last)
    streams.join()
    lost_s = sum(s.interference_s + (s.step_interference_s if last else 0.0) for s in segments)
    for label, seconds in (("interference", lost_s), ("waiting", wait_s)):
        if seconds:
            streams.run("compute", label, -1, seconds)
            streams.join()


def _waits(options: Sequence[StageCandidate], load: Workload) -> tuple[float, float]:
    """Return the seconds of waiting at the end of every micro-batch and before the optimizer."""
    syncs = plan_syncs(options)
    waiting = sum(waiting_s(option, load, syncs) for option in options)
    return (waiting / load.accumulation, 0.0) if syncs else (0.0, waiting)


def simulate(options: Sequence[StageCandidate], load: Workload) -> tuple[Event, ...]:
    """Return every event of one step, which ends at the last one's `end_s`."""
    segments = [segment for option in options for segment in option.segments]
    streams, (each_s, once_s) = _Streams(load.cluster.overlaps), _waits(options, load)
    for micro_batch in range(load.accumulation):
        _micro_batch(streams, segments, micro_batch == load.accumulation - 1, each_s)
    if once_s:
        streams.run("compute", "waiting", -1, once_s)
    streams.run("compute", "optimizer", -1, sum(option.optimizer_s for option in options))
    return tuple(streams.events)


def simulated_s(options: Sequence[StageCandidate], load: Workload) -> float:
    """Return the simulated seconds of one step: as `simulate`, but equal micro-batches are simulated once."""
    segments = [segment for option in options for segment in option.segments]
    each_s, once_s = _waits(options, load)
    total_s = once_s + sum(option.optimizer_s for option in options)
    for last, times in load.passes:
        streams = _Streams(load.cluster.overlaps)
        _micro_batch(streams, segments, last, each_s)
        total_s += times * streams.now_s
    return total_s
