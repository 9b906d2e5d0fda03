"""The time that a device takes for work, apart from the time that the host takes to enqueue it.

A GPU runs behind the host.  Where its kernels are short, the time between two events is the host's: the GPU waits for
the next call from Python.  So the GPU is *held*: before the first event it gets a kernel that only lets time pass,
for as long as the host needs to enqueue all that is timed.

    enqueued       hold | begin | work .. | end
    it held        if the GPU has not reached `begin` when all is enqueued     (`QueueClock.held`)

A hold is twice as long as the longest that the host took of late for the same work, and than one that was too short.
Work for which it never holds is *host-bound*: it waits for the device itself, or is more than the thousand launches or
so that CUDA enqueues before it lets the host wait.  Its time is the host's, and other work is not held longer for it.

A hold also overwrites a buffer larger than the device's last cache, so that what is timed finds its inputs in memory.
(No CUDA graph is needed for any of this; collectives and kernels launched by CuPy need not be captured.)

The CPU is timed by the host's clock, and not held.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from profiler.timing.stopwatch import Clock, HostClock

FIRST_HOLD_S = 1e-3
LONGEST_HOLD_S = 0.1
"""In which the host enqueues more than CUDA takes."""
GROWTH = 2.0
"""Of a hold that was too short, and over what the host took."""
RECENT = 8
"""Times of the same work that say how long the host takes: one in which it was put aside is forgotten."""
TRIES = 6
"""Of one timing; from the first hold they reach a length of 32 times as much."""
CYCLES_PER_S = 2e9
"""About the clock of a GPU, by which it counts the time that it lets pass: what counts is whether it held."""


class Queue(Protocol):
    """Where work for a device is enqueued."""

    def hold(self, seconds: float) -> None:
        """Enqueue the passing of about so much time, and what makes caches cold."""

    def mark(self) -> Any:
        """Enqueue an event."""

    def is_reached(self, mark: Any) -> bool:
        """Whether the device has come to an event."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the device's seconds between two events, for which it waits."""


class CudaQueue:
    """The current streams of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._evicting: Tensor | None = None

    def hold(self, seconds: float) -> None:
        if self._evicting is None:
            self._evicting = torch.empty(2 * cache_bytes(self._device), dtype=torch.uint8, device=self._device)
        with torch.cuda.device(self._device):
            self._evicting.zero_()
            torch.cuda._sleep(round(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class QueueClock:
    """Times what is enqueued, and learns for how long the device must be held."""

    is_behind_host = True

    def __init__(self, queue: Queue, host_s: Callable[[], float] = time.perf_counter) -> None:
        self._queue, self._host_s, self._since_s = queue, host_s, 0.0
        self._hold_s, self._what = FIRST_HOLD_S, None  # type: tuple[float, Hashable]
        self._needed_s = defaultdict[Hashable, deque[float]](lambda: deque(maxlen=RECENT))
        """What the host took for each work, or more than the last hold where that was too short."""

    def hold(self, what: Hashable = None) -> None:
        self._what = what
        longest_s = max(self._needed_s[what], default=0.0)
        self._hold_s = min(LONGEST_HOLD_S, max(FIRST_HOLD_S, GROWTH * longest_s))
        self._queue.hold(self._hold_s)
        self._since_s = self._host_s()

    def held(self, start: Any) -> bool:
        took_s, is_reached = self._host_s() - self._since_s, self._queue.is_reached(start)
        self._needed_s[self._what].append(max(took_s, self._hold_s) if is_reached else took_s)
        return not is_reached

    def mark(self) -> Any:
        return self._queue.mark()

    def seconds(self, start: Any, end: Any) -> float:
        return self._queue.seconds(start, end)


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return QueueClock(CudaQueue(device)) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Taken:
    """What some work took."""

    seconds: float
    is_host_bound: bool = False
    """Whether the device may have waited for the host."""


def time_work(
    work: Callable[[], object],
    clock: Clock,
    meet: Callable[[], object] = lambda: None,
    agree: Callable[[bool], bool] = bool,
) -> Taken:
    """Return the time of some work; on a device it is repeated, with longer holds, until it is not the host's.

    `meet` lets the devices of all ranks begin together, and is not timed.  `agree` says whether what is so here is so
    on all ranks, which must time collectives equally often.
    """
    for _ in range(TRIES):
        clock.hold()
        meet()
        begin = clock.mark()
        work()
        held = clock.held(begin)
        seconds = clock.seconds(begin, clock.mark())
        if agree(held):
            return Taken(seconds)
    return Taken(seconds, is_host_bound=True)


def cache_bytes(device: torch.device) -> int:
    """Return the size of a device's last cache, as far as timings must keep inputs out of it; 0 on CPUs."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def cold_sets(size_bytes: int, calls: int, device: torch.device) -> int:
    """Return how many sets of buffers so many calls in a row take in turn to find none of theirs in the cache.

    With as many sets as calls the hold before them is what makes the cache cold.
    """
    return max(1, min(calls, -(-2 * cache_bytes(device) // max(1, size_bytes))))
