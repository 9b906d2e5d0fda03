"""Clocks for tests of what is timed, and one thread to compute on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Numbers:
    def seconds(self, start: float, end: float) -> float:
        return end - start


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


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
