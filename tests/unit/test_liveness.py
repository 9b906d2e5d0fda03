"""Who is told to be gone, with processes that live, die and linger, and a store in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import astuple, replace

import pytest
import torch.distributed as dist

from runtime.failures import liveness
from runtime.failures.liveness import Lost, Process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def _status(pid: int) -> str:
    return liveness._status_and_start(pid)[0]


def _process_of(child: subprocess.Popen[bytes]) -> Process:
    own = Process.own()
    return Process(own.machine, child.pid, liveness._status_and_start(child.pid)[1])


def _announce(store: dist.Store, rank: int, process: Process) -> None:
    store.set(f"{liveness.PREFIX}/process/{rank}", json.dumps([*astuple(process), "step 3"]))


def test_a_process_is_dead_once_it_ended_even_if_nobody_reaped_it() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = _process_of(child)
    assert not process.is_dead(Process.own())
    child.kill()
    end_s = time.monotonic() + 10
    while _status(child.pid) != "Z" and time.monotonic() < end_s:
        time.sleep(0.01)
    assert process.is_dead(Process.own()), "a zombie"
    child.wait()
    assert process.is_dead(Process.own()), "no such process"


def test_a_number_may_be_anothers_and_other_machines_are_out_of_sight() -> None:
    own = Process.own()
    assert not own.is_dead(own)
    assert replace(own, start="1").is_dead(own), "the same number, started at another time"
    assert not replace(own, start="1", machine="elsewhere").is_dead(own)
    assert not Process("", 0, "").is_dead(Process("", 0, "")), "no /proc, no verdict"


def test_a_death_is_told_to_ranks_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 are on one machine, rank 1 is on another; rank 2 died, rank 3 still waits somewhere."""
    store, own = dist.HashStore(), Process.own()
    for rank, process in enumerate((own, replace(own, machine="elsewhere"), replace(own, start="1"), own)):
        _announce(store, rank, process)
    assert liveness._ask(store, 0, 4, 5.0) == (Lost(2, "died", "step 3"),)
    monkeypatch.setattr(Process, "own", staticmethod(lambda: replace(own, machine="elsewhere")))
    assert liveness._ask(store, 1, 4, 5.0) == (Lost(2, "died", "step 3"),)


def test_silent_ranks_are_blamed_after_the_wait_only() -> None:
    store = dist.HashStore()
    start_s = time.monotonic()
    assert liveness._ask(store, 1, 3, 0.3) == tuple(
        Lost(rank, "did not answer: it hangs or cannot be reached", "") for rank in (0, 2)
    )
    assert 0.3 <= time.monotonic() - start_s < 3
    store.set(f"{liveness.PREFIX}/answered/0", "1")
    store.set(f"{liveness.PREFIX}/raised/2", "ValueError: no")
    assert liveness._ask(store, 1, 3, 5.0) == (Lost(2, "raised ValueError: no", ""),)


def test_a_store_that_does_not_answer_is_given_up() -> None:
    start_s = time.monotonic()
    assert liveness._bounded(lambda: time.sleep(30), 0.2) is None
    assert time.monotonic() - start_s < 5
