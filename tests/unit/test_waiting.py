"""How long ranks wait: the arithmetic, and what is printed and kept of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from osdp.cli.reports.train import waits_line
from osdp.training import waiting
from osdp.training.reporters import Step
from osdp.training.trackers import scalars
from osdp.training.waiting import Stalls, waits
from runtime.odc.step_protocol import Exchange


class Clock:
    """Marks are the moments themselves, which the test sets."""

    now_s = 0.0
    own_stream = True

    def mark(self) -> float:
        return self.now_s

    def at_s(self, mark: float) -> float:
        return mark

    def is_own_stream(self) -> bool:
        return self.own_stream

    @contextmanager
    def noting_waits(self, note: Any) -> Iterator[None]:
        self.note = note
        yield


def test_waits_are_what_a_rank_computes_less_than_the_slowest() -> None:
    assert waits([0.25, 1.0, 0.75]) == (0.75, 0.0, 0.25)
    assert waits([1.0]) == ()


def test_stalls_inside_stalls_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(waiting, "begin", lambda device: clock)

    def take_two_seconds(work: Any) -> str:
        clock.now_s += 2.0
        return "waited"

    monkeypatch.setattr(dist.Work, "wait", take_two_seconds)
    exchange = Exchange.__new__(Exchange)
    transport = SimpleNamespace(barrier=lambda: take_two_seconds(None))
    exchange.groups = (SimpleNamespace(transport=transport),)  # type: ignore[assignment]
    stalls = Stalls(torch.device("cpu"), SimpleNamespace(units=[exchange]))  # type: ignore[arg-type]
    with stalls.step():
        clock.now_s = 1.0
        assert dist.Work.wait(None) == "waited"  # type: ignore[arg-type]
        clock.note(1.5, 3.5)  # half a second more than that
        clock.own_stream = False
        dist.Work.wait(None)  # type: ignore[arg-type]
        clock.note(7.0, 7.25)
    assert stalls.seconds() == 2.5 + 0.25
    with stalls.step():
        clock.own_stream = True
        transport.barrier()
    assert stalls.seconds() == 2
    with stalls.step():
        pass
    transport.barrier()  # noted no more
    assert stalls.seconds() == 0


def test_those_that_wait_longest_are_named() -> None:
    assert waits_line((0.0, 0.05), 0.2) == "waiting for the slowest, rank 0, in a step: rank 1 50.0 ms (25.0%)"
    said = waits_line((0.01, 0.04, 0.0, 0.02, 0.03, 0.05), 0.1)
    assert said == (
        "waiting for the slowest, rank 2, in a step: rank 5 50.0 ms (50.0%), rank 1 40.0 ms (40.0%), "
        "rank 4 30.0 ms (30.0%), rank 3 20.0 ms (20.0%), all ranks in the mean 25.0 ms (25.0%)"
    )


def test_trackers_keep_each_rank_or_the_longest() -> None:
    def kept(*waits_s: float) -> dict[str, float]:
        found = scalars(Step(1, 5.0, None, 0.1, 8, 56, 0.5, waits_s=waits_s), None)  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if name.startswith("waiting")}

    assert kept() == {}
    each = {"waiting_s/rank_0": 0.0, "waiting_s/rank_1": 0.5}
    assert kept(0.0, 0.5) == {"waiting_s/mean": 0.25, "waiting_s/longest": 0.5, **each}
    assert kept(*[0.0] * 99, 1.0) == {"waiting_s/mean": 0.01, "waiting_s/longest": 1.0}
