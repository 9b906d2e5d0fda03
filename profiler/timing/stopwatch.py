"""Times consecutive intervals, by the host's clock or another (`profiler.timing.device_queue`)."""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Protocol


class Clock(Protocol):
    """Marks instants, and returns the time between two of them."""

    is_behind_host: bool
    """Whether the host launches work that runs later."""

    def mark(self) -> Any:
        """Return the present instant."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two instants; may wait for the device."""

    def hold(self, what: Hashable = None) -> None:
        """Keep the device back from the work that is enqueued next, `what`, until about all of it is."""

    def held(self, start: Any) -> bool:
        """Whether all of it was enqueued before the device came to `start`, so that it waits for no host."""


class HostClock:
    """For synchronous devices: the CPU."""

    is_behind_host = False

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def hold(self, what: Hashable = None) -> None:
        """Nothing is enqueued: calls run at once."""

    def held(self, start: float) -> bool:
        return True


class Stopwatch:
    """Adds up the time of labelled intervals; the device is held before the first of consecutive ones."""

    def __init__(self, clock: Clock, host_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._host_s = clock, host_s
        self.running: Hashable = None
        """The label of the running interval."""
        self.is_host_bound = False
        """Whether the device may have waited for the host in one of the intervals."""
        self._since: Any = None
        self._first: Any = None
        """When the first of the consecutive intervals began."""
        self._laps: list[tuple[Hashable, Any, Any]] = []
        self._launched_since_s = 0.0
        self._launches_s: dict[Hashable, float] = defaultdict(float)

    def switch(self, label: Hashable) -> None:
        """End the running interval and begin one labelled `label`; None: not timed."""
        if self.running is not None and self._clock.is_behind_host:
            self._launches_s[self.running] += self._host_s() - self._launched_since_s
        if self.running is None and label is not None:
            self._clock.hold(label)
        now = self._clock.mark()
        if self.running is None:
            self._first = now
        else:
            self._laps.append((self.running, self._since, now))
            if label is None and not self._clock.held(self._first):
                self.is_host_bound = True
        self.running, self._since, self._launched_since_s = label, now, self._host_s()

    def launches(self) -> dict[Hashable, float]:
        """Return the seconds in which the host launched the work of each label so far; none where it computes it."""
        return dict(self._launches_s)

    def totals(self) -> dict[Hashable, float]:
        """Return the seconds of each label so far."""
        totals: dict[Hashable, float] = defaultdict(float)
        for label, start, end in self._laps:
            totals[label] += self._clock.seconds(start, end)
        return dict(totals)
