"""Simulates one step of a plan event by event on three streams: the reference for predicted time.

Streams run their tasks in the order in which FSDP2 issues them; a task starts when its
stream is free and everything that it waits for has ended:

    forward     gather i+1 is issued when the forward of i starts; the forward of i waits for gather i
    turn        the first gather of the backward is issued when the last forward starts
    backward    when the backward of i starts, gather i-1 is issued; when it ends, reduction i is, and on a stream
                of its own all-reduce i; the backward of i-1 waits for gather i-1 and, because FSDP2 reuses the
                reduction's input buffer, copy-in i, the end of the backward of i, waits for reduction i+1.  That
                reduction i waits for all-reduce i+1, too, is a simplification (`planner.cost.step_time`)
    exposed     slow-down of computation by concurrent communication, and what is sent between backward and optimizer,
                as a sum at the end of a micro-batch
    waiting     where ranks wait for each other in every micro-batch, at its end for the slowest rank; otherwise once,
                before the optimizer
    optimizer   waits for everything

A segment's stalls are communication on the compute stream, part of its forward and its backward.
On a backend that does not overlap, the streams are one.  `planner.cost.step_time` has the closed form.

In both the host, which launches what the device computes, is never ahead when a segment begins.  With `host_gets_ahead`
it launches on from the start of each micro-batch, and with D_i what the device computes in a task and L_i what the host
launches of it (`Launches`),

    end_i = max(end_(i-1) + D_i, L_1 + .. + L_i)

and so does the optimizer at the end.
A step is shorter so by what the host gains while the device is busy, with an output layer for instance.  As that
depends on all that was before, it is no sum over neighbours, and no search is made with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cost.shared_collectives import rest_s
from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.step_time import plan_syncs, waiting_s
from planner.cost.workload import Workload


@dataclass(frozen=True, slots=True)
class Event:
    """One task on one stream."""

    stream: str
    """`compute`, `communication` or `all-reduce`."""
    label: str
    """What it is, e.g. `forward` or `all-gather`."""
    segment: int
    """Index of the segment in execution order."""
    start_s: float
    end_s: float


class _Streams:
    """Streams that run tasks in the order of issue."""

    def __init__(self, overlaps: bool) -> None:
        self.free_s = {"compute": 0.0, "communication": 0.0, "all-reduce": 0.0}
        self.launched_s = 0.0
        self.overlaps = overlaps
        self.events: list[Event] = []

    def launch(self, seconds: float) -> None:
        """Have the host launch for so long, right after what it launched before."""
        self.launched_s += seconds

    def run(
        self, stream: str, label: str, segment: int, duration_s: float, after_s: float = 0.0, not_before_s: float = 0.0
    ) -> Event:
        """Run a task from `after_s` at the soonest, to `not_before_s` at the soonest, and return its event."""
        start = max(self.free_s[stream], after_s)
        if not self.overlaps:
            start = max(start, *self.free_s.values())
        event = Event(stream, label, segment, start, max(start + duration_s, not_before_s))
        self.free_s[stream] = event.end_s
        self.events.append(event)
        return event

    @property
    def now_s(self) -> float:
        """When everything that was issued has ended."""
        return max(self.free_s.values())

    def join(self) -> None:
        """Let all streams wait for each other."""
        self.free_s = dict.fromkeys(self.free_s, self.now_s)


def _forward(streams: _Streams, segments: Sequence[Segment]) -> Event:
    """Simulate a forward; return the first gather of the backward."""
    gathers_s = [segment.forward_gather_s for segment in segments] + [segments[-1].backward_gather_s]
    after = [*range(1, len(segments)), len(segments) - 1]
    gather = streams.run("communication", "all-gather", 0, gathers_s[0])
    for index, segment in enumerate(segments):
        ready = gather.end_s
        start = max(ready, streams.free_s["compute"])
        if streams.overlaps:
            gather = streams.run("communication", "all-gather", after[index], gathers_s[index + 1], start)
        streams.launch(segment.launches.forward_launch_s if segment.launches else 0.0)
        duration = segment.forward_computing_s + segment.forward_stall_s
        streams.run("compute", "forward", index, duration, ready, streams.launched_s)
        if not streams.overlaps:
            gather = streams.run("communication", "all-gather", after[index], gathers_s[index + 1])
    return gather


def _backward(streams: _Streams, segments: Sequence[Segment], last: bool, gather: Event) -> None:
    reduced_s = 0.0

    def all_reduce(index: int, after_s: float) -> float:
        seconds = segments[index].step_reduce_s if last and index < len(segments) else 0.0
        return streams.run("all-reduce", "all-reduce", index, seconds, after_s).end_s if seconds else 0.0

    for index in range(len(segments) - 1, -1, -1):
        segment = segments[index]
        start = max(gather.end_s, streams.free_s["compute"])
        above_s = all_reduce(index + 1, start)
        if index and streams.overlaps:
            duration = segments[index - 1].backward_gather_s
            gather = streams.run("communication", "all-gather", index - 1, duration, start)
        streams.launch(segment.launches.backward_launch_s if segment.launches else 0.0)
        before_s = segment.backward_computing_s + segment.backward_stall_s - segment.copy_in_s
        streams.run("compute", "backward", index, before_s, start, streams.launched_s - segment.copy_in_s)
        copied_s = streams.run("compute", "copy-in", index, segment.copy_in_s, reduced_s).end_s
        after_s = streams.free_s["compute"] = max(copied_s, above_s)
        reduced_s = streams.run("communication", "reduce-scatter", index, segment.reduce_s, after_s).end_s
        if index and not streams.overlaps:
            gather = streams.run("communication", "all-gather", index - 1, segments[index - 1].backward_gather_s)
    all_reduce(0, reduced_s)


def _micro_batch(streams: _Streams, segments: Sequence[Segment], last: bool, wait_s: float, shared_s: float) -> None:
    """Simulate one micro-batch and the wait at its end; `shared_s` is what units share (`rest_s`) in the last."""
    gather = _forward(streams, segments)
    _backward(streams, segments, last, gather)
    streams.join()
    lost_s = sum(s.interference_s + (s.step_exposed_s if last else 0.0) for s in segments)
    lost_s += shared_s if last else 0.0
    for label, seconds in (("exposed", lost_s), ("waiting", wait_s)):
        if seconds:
            streams.run("compute", label, -1, seconds)
            streams.join()


def _waits(options: Sequence[StageCandidate], load: Workload) -> tuple[float, float]:
    """Return the seconds of waiting at the end of every micro-batch and before the optimizer."""
    syncs = plan_syncs(options)
    waiting = sum(waiting_s(option, load, syncs) for option in options)
    return (waiting / load.accumulation, 0.0) if syncs else (0.0, waiting)


def _segments(options: Sequence[StageCandidate], host_gets_ahead: bool) -> list[Segment]:
    """Return what is computed; each as long as the host launches it, where that is longer, if it does not get ahead."""
    segments = [segment for option in options for segment in option.segments]
    return segments if host_gets_ahead else [replace(one, launches=None) for one in segments]


def simulate(options: Sequence[StageCandidate], load: Workload) -> tuple[Event, ...]:
    """Return every event of one step, which ends at the last one's `end_s`."""
    segments = _segments(options, host_gets_ahead=False)
    streams, (each_s, once_s) = _Streams(load.cluster.overlaps), _waits(options, load)
    shared_s = rest_s((option.parts, 1) for option in options)
    for micro_batch in range(load.accumulation):
        _micro_batch(streams, segments, micro_batch == load.accumulation - 1, each_s, shared_s)
    if once_s:
        streams.run("compute", "waiting", -1, once_s)
    streams.run("compute", "optimizer", -1, sum(option.optimizer_s for option in options))
    return tuple(streams.events)


def simulated_s(options: Sequence[StageCandidate], load: Workload, *, host_gets_ahead: bool = False) -> float:
    """Return the simulated seconds of one step: as `simulate`, but equal micro-batches are simulated once."""
    segments = _segments(options, host_gets_ahead)
    each_s, once_s = _waits(options, load)
    total_s, shared_s = once_s + sum(option.optimizer_s for option in options), rest_s((o.parts, 1) for o in options)
    lead_s = 0.0
    for last, times in load.passes:
        streams = _Streams(load.cluster.overlaps)
        _micro_batch(streams, segments, last, each_s, shared_s)
        total_s += times * streams.now_s
        lead_s = streams.now_s - streams.launched_s
    waits_s = sum(option.optimizer_wait_s for option in options) if host_gets_ahead else 0.0
    return total_s - min(waits_s, lead_s)
