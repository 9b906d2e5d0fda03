"""What each rank does when in a step: it computes, communicates or waits for others.

A rank *calls* communication: a collective or a barrier, which needs all of its ranks, or a one-sided pull or
push.  It is *stalled* in a call on its step's own stream, and while that stream waits for another, where GPUs
communicate beside it (`osdp.uneven_lengths.step_clock`).  Moments are those of the device, by the clock of the
machine, the same for all of its processes.  With a_p the moment at which rank p begins the k-th call of a group,
rank r

    waits           where it is stalled from a_r to max over p of a_p, if the call is not over before
    communicates    in what remains of being stalled
    computes        where it is not stalled, the optimizer too
    waits           from the end of its step to that of the slowest rank's

and its *bubble* is all that it waits.  (gloo and NCCL wait inside their collectives, so their duration alone does not
show it.)

Seen are the collectives of `fully_shard` units, and the pulls, pushes and barriers of `odc`.  Others, an
all-reduce across groups or an owner's broadcasts, count as computing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from osdp.api import OSDP
from osdp.uneven_lengths.step_clock import StepClock, begin
from profiler.errors import OsdpError
from runtime.failures.liveness import Process
from runtime.failures.rank_agreement import Agreement
from runtime.odc.step_protocol import Exchange
from runtime.strategies.fully_sharded import FullyShardedUnit
from runtime.strategies.one_sided import WindowedUnit
from runtime.torch_compat import AllGather, ReduceScatter, communication_of

Activity = Literal["compute", "communication", "waiting"]


@dataclass(frozen=True)
class Call:
    """Communication that one rank called."""

    name: str
    """gather, reduce, pull, push or barrier."""
    start_s: float
    """By the machine's clock, as everywhere here."""
    end_s: float
    ranks: tuple[int, ...] = ()
    """The ranks that must all call it; empty if it is one-sided."""
    stalls: bool = True
    """Whether it ran on the step's own stream, where nothing runs beside it."""


@dataclass(frozen=True)
class Span:
    """A stretch of one rank's step."""

    activity: Activity
    start_s: float
    """Since the first rank's step began."""
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One rank's step, from its beginning to the end of the slowest rank's."""

    spans: tuple[Span, ...]
    """Without gaps, in order of time."""

    def total_s(self, activity: Activity) -> float:
        return sum(span.end_s - span.start_s for span in self.spans if span.activity == activity)

    @property
    def bubble_s(self) -> float:
        return self.total_s("waiting")


@dataclass
class CallTimeline:
    """One rank's step."""

    start_s: float = 0.0
    end_s: float = 0.0
    calls: list[Call] = field(default_factory=list)
    """In their order; none inside another."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When the step's own stream waited for others, in order."""


class _Marked(NamedTuple):
    """A call whose moments are not known yet."""

    name: str
    start: Any
    end: Any
    ranks: tuple[int, ...]
    stalls: bool

    def at(self, at_s: Callable[[Any], float]) -> Call:
        """Return the call with its moments."""
        return Call(self.name, at_s(self.start), at_s(self.end), self.ranks, self.stalls)


class Recorder:
    """Records one rank's step, with marks of its clock."""

    def __init__(self, clock: StepClock) -> None:
        self._clock, self._start = clock, clock.mark()
        self._calls: list[_Marked] = []
        self._waits: list[tuple[Any, Any]] = []

    def watched(self, name: str, ranks: Sequence[int], function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are recorded. Calls inside of it count by themselves."""

        def call(*args: Any, **kwargs: Any) -> Any:
            known, start, stalls = len(self._calls), self._clock.mark(), self._clock.is_own_stream()
            found = function(*args, **kwargs)
            inner = self._calls[known:]
            del self._calls[known:]
            for one in inner:
                self._calls += [_Marked(name, start, one.start, (), stalls), one]
                start = one.end
            self._calls.append(_Marked(name, start, self._clock.mark(), tuple(ranks), stalls))
            return found

        return call

    def noting_waits(self) -> AbstractContextManager[object]:
        """Note when the step's own stream waits for another."""
        return self._clock.noting_waits(lambda before, after: self._waits.append((before, after)))

    def end(self, timeline: CallTimeline) -> None:
        """End the step: fill in its moments, for which the device is waited for."""
        end, at_s = self._clock.mark(), self._clock.at_s
        timeline.start_s, timeline.end_s = at_s(self._start), at_s(end)
        timeline.calls += [one.at(at_s) for one in self._calls]
        timeline.waits += [(at_s(before), at_s(after)) for before, after in self._waits]


@contextmanager
def record_step(model: OSDP) -> Iterator[CallTimeline]:
    """Record what this rank does in the step that runs inside; what is yielded is filled in at its end."""
    timeline, recorder = CallTimeline(), Recorder(begin(model.sharded.device))
    with ExitStack() as stack:
        stack.enter_context(recorder.noting_waits())
        for unit in model.sharded.units:
            if isinstance(unit, FullyShardedUnit) and not isinstance(unit, WindowedUnit):
                stack.enter_context(_watched_unit(unit.module, recorder))
            for group in unit.groups if isinstance(unit, Exchange) else ():
                for name, ranks in (("pull", ()), ("push", ()), ("barrier", group.transport.ranks)):
                    call = recorder.watched(name, ranks, getattr(group.transport, name))
                    stack.enter_context(patch.object(group.transport, name, call))
        yield timeline
        recorder.end(timeline)


def gather_recordings(recording: CallTimeline) -> list[CallTimeline]:
    """Return the recordings of all ranks. A collective call; raises OsdpError if ranks have different clocks."""
    everyone = Agreement.all().gather("send its recording", lambda: (Process.own().machine, recording))
    machines = len({machine for machine, _ in everyone})
    if machines > 1:
        what = "a timeline cannot compare the clocks of several machines"
        raise OsdpError(what, got=f"{machines} machines", expected="all ranks on one")
    return [found for _, found in everyone]


def timelines(recordings: Sequence[CallTimeline]) -> tuple[Timeline, ...]:
    """Return what the ranks did, given a recording of each; raises OsdpError if they did not call the same."""
    arrivals: dict[tuple[tuple[int, ...], int], dict[int, float]] = {}
    for rank, recording in enumerate(recordings):
        for call, key in _numbered(recording):
            arrivals.setdefault(key, {})[rank] = call.start_s
    odd = next((key for key, found in arrivals.items() if set(found) != set(key[0])), None)
    if odd is not None:
        what = "the ranks did not synchronize equally often"
        got = f"call {odd[1] + 1} of ranks {odd[0]}"
        raise OsdpError(what, got=got, expected="a step of each rank, all the same one")
    latest = {key: max(found.values()) for key, found in arrivals.items()}
    start_s, end_s = min(one.start_s for one in recordings), max(one.end_s for one in recordings)
    return tuple(Timeline(tuple(_spans(recording, latest, start_s, end_s))) for recording in recordings)


def _numbered(recording: CallTimeline) -> Iterator[tuple[Call, tuple[tuple[int, ...], int]]]:
    """Yield the calls that need others, each with its group and its number in that."""
    seen: Counter[tuple[int, ...]] = Counter()
    for call in recording.calls:
        if call.ranks:
            yield call, (call.ranks, seen[call.ranks])
            seen[call.ranks] += 1


def _spans(
    recording: CallTimeline, latest: dict[tuple[tuple[int, ...], int], float], start_s: float, end_s: float
) -> Iterator[Span]:
    late = sorted((call.start_s, min(latest[key], call.end_s)) for call, key in _numbered(recording))
    """When it had come to a call and another rank had not."""
    stalls = sorted([(call.start_s, call.end_s) for call in recording.calls if call.stalls] + recording.waits)
    edges: list[tuple[Activity, float]] = []
    """Each activity with its end."""
    for stall_s, over_s in stalls:
        if stall_s == over_s:  # what was waited for was there
            continue
        edges.append(("compute", stall_s))
        for from_s, to_s in late:
            if from_s < over_s and to_s > stall_s:
                edges += [("communication", from_s), ("waiting", min(to_s, over_s))]
        edges.append(("communication", over_s))
    edges += [("compute", recording.end_s), ("waiting", end_s)]
    before_s = recording.start_s
    for activity, edge_s in edges:
        if edge_s > before_s:
            yield Span(activity, before_s - start_s, edge_s - start_s)
            before_s = edge_s


@contextmanager
def _watched_unit(module: FSDPModule, recorder: Recorder) -> Iterator[None]:
    own = communication_of(module)
    if own is None:
        yield
        return
    module.set_custom_all_gather(_Watched(own[0], "gather", recorder))
    module.set_custom_reduce_scatter(_Watched(own[1], "reduce", recorder))
    try:
        yield
    finally:
        module.set_custom_all_gather(own[0])
        module.set_custom_reduce_scatter(own[1])


class _Watched(AllGather, ReduceScatter):
    """Communication of `fully_shard` whose calls are recorded."""

    def __init__(self, own: AllGather | ReduceScatter, name: str, recorder: Recorder) -> None:
        self.own, self.name, self.recorder = own, name, recorder

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.own.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        call = self.recorder.watched(self.name, dist.get_process_group_ranks(group), self.own)
        return call(output_tensor, input_tensor, group, *args, **kwargs)
