"""Clocks for tests of what is timed, and one thread to compute on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Numbers:
    is_behind_host = False

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def hold(self, what: object = None) -> None:
        """Nothing runs behind the host."""

    def held(self, start: float) -> bool:
        return True


class ThreadClock(_Numbers):
    """This thread's time on the processor: other programs do not count."""

    def mark(self) -> float:
        return time.thread_time()


class CountingClock(_Numbers):
    """Every look at it is a second after the last."""

    def __init__(self) -> None:
        self.looks = 0

    def mark(self) -> float:
        self.looks += 1
        return float(self.looks)


class ManualClock(_Numbers):
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now


class LaggingDevice:
    """A simulated GPU: it runs what is enqueued in turn, and behind the host, whose every call takes a while."""

    def __init__(self, host_call_s: float) -> None:
        self.host_call_s = host_call_s
        self.now_s = self.free_s = 0.0
        """The host's clock, and when the device will have done all that is enqueued."""
        self.holds: list[float] = []

    def enqueue(self, seconds: float) -> None:
        """Call a kernel that takes so long."""
        self.now_s += self.host_call_s
        self.free_s = max(self.free_s, self.now_s) + seconds

    def wait(self) -> None:
        """Let the host wait for the device."""
        self.now_s = max(self.now_s, self.free_s)

    def hold(self, seconds: float) -> None:
        self.holds.append(seconds)
        self.enqueue(seconds)

    def mark(self) -> float:
        """Return when the device comes to an event that is enqueued now, which costs the host nothing."""
        return max(self.free_s, self.now_s)

    def is_reached(self, mark: float) -> bool:
        return mark <= self.now_s

    def seconds(self, start: float, end: float) -> float:
        self.now_s = max(self.now_s, end)
        return end - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
