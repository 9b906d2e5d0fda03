"""Times consecutive intervals, by the host's clock or by CUDA events."""

import time
from collections import defaultdict
from collections.abc import Hashable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks instants, and returns the time between two of them."""

    def mark(self) -> Any:
        """Return the present instant."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two instants; may wait for the device."""


class HostClock:
    """For synchronous devices: the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Events in the device's current stream: the work runs on while the host goes ahead."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class Stopwatch:
    """Adds up the time of labelled intervals."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.running: Hashable = None
        """The label of the running interval."""
        self._since: Any = None
        self._laps: list[tuple[Hashable, Any, Any]] = []

    def switch(self, label: Hashable) -> None:
        """End the running interval and begin one labelled `label`; None: not timed."""
        now = self._clock.mark()
        if self.running is not None:
            self._laps.append((self.running, self._since, now))
        self.running, self._since = label, now

    def totals(self) -> dict[Hashable, float]:
        """Return the seconds of each label so far."""
        totals: dict[Hashable, float] = defaultdict(float)
        for label, start, end in self._laps:
            totals[label] += self._clock.seconds(start, end)
        return dict(totals)
