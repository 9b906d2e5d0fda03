"""Leases on folders: one writer at a time, and a writer that is gone holds none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import OsdpError
from runtime.state import folder_lease
from runtime.state.folder_lease import LEASE, Lease, LeaseHeldError, leased

HOLDS = """
import sys, time
from pathlib import Path
from runtime.state.folder_lease import Lease
lease = Lease(Path(sys.argv[1]), "holds it for a test")
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Have another process hold the lease."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_holder_is_named_and_its_death_frees_the_folder(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as process:
        with pytest.raises(LeaseHeldError) as caught:
            Lease(tmp_path, "comes second")
        assert f"another process writes to {tmp_path}" in str(caught.value)
        assert "holds it for a test" in caught.value.got
        process.send_signal(signal.SIGSTOP)  # a process that is stopped lives
        with pytest.raises(LeaseHeldError):
            Lease(tmp_path, "comes second")
        process.kill()
        process.wait()
        Lease(tmp_path, "comes third").release()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_ends_with_its_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), leased(tmp_path, "fails"):
        _ = 1 / (json.loads((tmp_path / LEASE).read_text())["process"] - os.getpid())
    assert list(tmp_path.iterdir()) == []


def written_by_another_machine(folder: Path, pulse: int) -> None:
    holder = {"host": "elsewhere", "process": 7, "job": "trains", "since": "today", "pulse": pulse}
    (folder / LEASE).write_text(json.dumps(holder))


def test_a_holder_on_another_machine_is_gone_when_it_is_silent(tmp_path: Path) -> None:
    """Where locks do not reach that far."""
    written_by_another_machine(tmp_path, 1)
    with pytest.raises(LeaseHeldError, match="process 7 on elsewhere"):
        Lease(tmp_path, "does not watch", silent_s=None)
    started = time.monotonic()
    lease = Lease(tmp_path, "watches", silent_s=0.5)
    assert time.monotonic() - started >= 0.5
    lease.release()


def test_a_pulse_from_another_machine_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_by_another_machine(tmp_path, 1)
    sleep, slept = time.sleep, []

    def sleep_and_beat(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            written_by_another_machine(tmp_path, 2)
        sleep(0.01)

    monkeypatch.setattr(folder_lease.time, "sleep", sleep_and_beat)
    with pytest.raises(LeaseHeldError, match="elsewhere"):
        Lease(tmp_path, "watches", silent_s=5.0)
    assert len(slept) == 2


def test_a_holder_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lease, "PULSE_S", 0.02)
    with leased(tmp_path, "lives"):
        first: Any = json.loads((tmp_path / LEASE).read_text())["pulse"]
        end_s = time.monotonic() + 10.0
        while json.loads((tmp_path / LEASE).read_text())["pulse"] == first:
            assert time.monotonic() < end_s
            time.sleep(0.01)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / LEASE).symlink_to(target)
    with pytest.raises((OSError, OsdpError)):
        Lease(folder, "is led astray")
    assert target.read_text() == "mine"
