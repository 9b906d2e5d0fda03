"""Timing what a device does behind a slow host, on a simulated device."""

from __future__ import annotations

import pytest
import torch
from clocks import LaggingDevice

from profiler.timing import device_queue
from profiler.timing.device_queue import (
    FIRST_HOLD_S,
    GROWTH,
    LONGEST_HOLD_S,
    RECENT,
    TRIES,
    QueueClock,
    Taken,
    cold_sets,
    time_work,
)
from profiler.timing.stopwatch import HostClock, Stopwatch

KERNEL_S, KERNELS = 1e-5, 100


def clock_of(device: LaggingDevice) -> QueueClock:
    return QueueClock(device, lambda: device.now_s)


def kernels(device: LaggingDevice) -> None:
    for _ in range(KERNELS):
        device.enqueue(KERNEL_S)


@pytest.mark.parametrize("host_call_s", [1e-6, 5e-5, 4e-4])
def test_a_slow_host_does_not_count(host_call_s: float) -> None:
    old = LaggingDevice(host_call_s)
    begin = old.mark()
    kernels(old)
    from_event_to_event_s = old.seconds(begin, old.mark())
    assert from_event_to_event_s == pytest.approx(KERNELS * max(KERNEL_S, host_call_s), rel=0.1)
    device = LaggingDevice(host_call_s)
    clock = clock_of(device)
    taken = time_work(lambda: kernels(device), clock)
    assert taken == Taken(pytest.approx(KERNELS * KERNEL_S))
    assert device.holds[0] == FIRST_HOLD_S
    assert device.holds[-1] > (KERNELS - 1) * host_call_s
    # What was learned holds the next work at once.
    tries = len(device.holds)
    assert time_work(lambda: kernels(device), clock) == Taken(pytest.approx(taken.seconds))
    assert len(device.holds) == tries + 1


def test_work_that_waits_for_the_device_is_host_bound() -> None:
    device = LaggingDevice(5e-5)

    def work() -> None:
        device.enqueue(KERNEL_S)
        device.wait()
        device.enqueue(KERNEL_S)

    taken = time_work(work, clock_of(device))
    assert taken == Taken(pytest.approx(5e-5 + 2 * KERNEL_S), is_host_bound=True)
    assert len(device.holds) == TRIES
    assert all(
        later >= min(LONGEST_HOLD_S, GROWTH * one) for one, later in zip(device.holds, device.holds[1:], strict=False)
    )


def test_ranks_repeat_together() -> None:
    """A fast rank repeats as long as another's host was too slow; nobody times their meeting."""
    device, answers = LaggingDevice(1e-6), iter([False, False, True])
    said: list[bool] = []

    def agree(held: bool) -> bool:
        said.append(held)
        return next(answers)

    taken = time_work(lambda: kernels(device), clock_of(device), lambda: device.enqueue(0.5), agree)
    assert taken == Taken(pytest.approx(KERNELS * KERNEL_S))
    assert said == [True] * 3
    assert len(device.holds) == 3


def test_the_host_is_timed_once_by_its_own_clock() -> None:
    called: list[str] = []
    taken = time_work(lambda: called.append("work"), HostClock(), lambda: called.append("meet"))
    assert called == ["meet", "work"]
    assert 0.0 <= taken.seconds < 1.0
    assert not taken.is_host_bound


def test_a_host_that_was_put_aside_once_is_forgotten() -> None:
    device = LaggingDevice(1e-6)
    clock = clock_of(device)

    def put_aside() -> None:
        device.now_s += 1.0
        kernels(device)

    assert time_work(put_aside, clock).is_host_bound
    for _ in range(RECENT):
        assert not time_work(lambda: kernels(device), clock).is_host_bound
    assert device.holds[TRIES] == LONGEST_HOLD_S
    time_work(lambda: kernels(device), clock)
    assert device.holds[-1] == FIRST_HOLD_S


def test_a_stopwatch_holds_the_device_before_each_stretch() -> None:
    device = LaggingDevice(5e-5)
    clock = clock_of(device)

    def run() -> Stopwatch:
        watch = Stopwatch(clock)
        for _ in range(3):
            watch.switch("a")
            kernels(device)
            watch.switch("b")
            device.enqueue(KERNEL_S)
            watch.switch(None)
        return watch

    first, second = run(), run()
    assert first.is_host_bound
    assert not second.is_host_bound
    assert second.totals() == {"a": pytest.approx(3 * KERNELS * KERNEL_S), "b": pytest.approx(3 * KERNEL_S)}


def test_work_that_waits_for_the_device_does_not_lengthen_other_holds() -> None:
    """As one block of a model may, in every pass: on a GPU all others were held for as long."""
    device = LaggingDevice(5e-5)
    clock = clock_of(device)
    for _ in range(TRIES + RECENT):
        watch = Stopwatch(clock)
        watch.switch("waits")
        device.enqueue(KERNEL_S)
        device.wait()
        watch.switch(None)
        watch.switch("runs")
        kernels(device)
        watch.switch(None)
    waits_s, runs_s = device.holds[-2:]
    assert waits_s == LONGEST_HOLD_S
    assert KERNELS * 5e-5 < runs_s < 4 * KERNELS * 5e-5


def test_buffers_take_turns_until_they_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_queue, "cache_bytes", lambda device: 50 if device.type == "cuda" else 0)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [cold_sets(size, 16, cuda) for size in (1, 10, 40, 99, 100, 1000)] == [16, 10, 3, 2, 1, 1]
    assert cold_sets(10, 16, cpu) == 1
