"""Finds out which ranks are gone after a collective failed: through the store, never through collectives.

Before anything fails, every rank writes its process to the store (`announce`).  A rank with an error of its own
writes that (`report_failure`).  A rank on which a collective fails notes it there and looks for the others
(`find_lost`):

    answered    a collective has failed there too, so the rank is fine
    raised      it has reported a failure of its own
    died        its process is gone; found by a rank on the same machine, which writes it to the store
    silent      none of these: it hangs, or runs on a machine that cannot be reached

Errors and deaths are found at once, and ranks that still wait in the collective then are not blamed.
Under torchrun the store lives in torchrun's own process and outlives every rank.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from profiler.errors import first_line

PREFIX = "osdp/liveness"
POLL_S = 0.05
STORE_S = 2.0
"""How long we wait for the store itself."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Lost:
    """A rank that made a collective fail."""

    rank: int
    how: str
    """What became of it, to follow its name: "died"."""
    last_seen: str
    """What it was about to do when it last announced itself; empty if it never did."""


@dataclass(frozen=True)
class Process:
    """A process, so that it is not mistaken for a later one with the same number."""

    machine: str
    """Boot of the machine and namespace of process numbers."""
    pid: int
    start: str
    """Start time, in the kernel's ticks since boot; empty where there is no /proc."""

    @staticmethod
    def own() -> Process:
        """Return the process that this is."""
        try:
            machine = boot_id() + os.readlink("/proc/self/ns/pid")
        except OSError:
            return Process("", os.getpid(), "")
        return Process(machine, os.getpid(), _status_and_start(os.getpid())[1])

    def is_dead(self, observer: Process) -> bool:
        """Whether it is known to be gone; False if `observer` cannot see processes of its machine."""
        if not self.machine or self.machine != observer.machine:
            return False
        status, start = _status_and_start(self.pid)
        return status in ("", "Z", "X") or start != self.start

    def is_stopped(self, observer: Process) -> bool:
        """Whether it is known to be stopped by a signal; False if `observer` cannot see processes of its machine."""
        same = bool(self.machine) and self.machine == observer.machine
        return same and _status_and_start(self.pid) in {(status, self.start) for status in "Tt"}


def boot_id() -> str:
    """Return what identifies this boot of this machine. Raises OSError where there is no /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def announce(what: str) -> None:
    """Leave in the store which process this rank is and what it is about to do."""
    own = Process.own()
    _store().set(f"{PREFIX}/process/{dist.get_rank()}", json.dumps([own.machine, own.pid, own.start, what]))


def report_failure(error: BaseException) -> None:
    """Tell the others that this rank leaves because of an error of its own."""
    store, rank = _store(), dist.get_rank()
    message = f"{type(error).__name__}: {first_line(error)}"
    _bounded(lambda: store.set(f"{PREFIX}/raised/{rank}", message), STORE_S)


def answer() -> None:
    """Tell the others that this rank is fine, and stops because it has lost another."""
    store, rank = _store(), dist.get_rank()
    _bounded(lambda: store.set(f"{PREFIX}/answered/{rank}", "1"), STORE_S)


def find_lost(answer_s: float) -> tuple[Lost, ...] | None:
    """Say that a collective failed on this rank, and find the ranks that are to blame.

    It takes at most `answer_s` and `STORE_S`. Empty if every rank is fine; None if the store is gone.
    """
    store, rank, world_size = _store(), dist.get_rank(), dist.get_world_size()
    return _bounded(lambda: _ask(store, rank, world_size, answer_s), answer_s + STORE_S)


def _bounded(ask: Callable[[], Result], limit_s: float) -> Result | None:
    """Ask the store in a thread, which is abandoned after the limit; None then, or if the store is gone.

    A store on a machine that hangs may never answer.
    """
    found: list[Result] = []

    def target() -> None:
        with suppress(RuntimeError, OSError):  # the store's own errors
            found.append(ask())

    thread = threading.Thread(target=target, name="liveness", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None


def _ask(store: c10d.Store, rank: int, world_size: int, answer_s: float) -> tuple[Lost, ...]:
    """Do what `find_lost` says."""
    store.set(f"{PREFIX}/answered/{rank}", "1")
    own, end_s = Process.own(), time.monotonic() + answer_s
    others = [other for other in range(world_size) if other != rank]
    known = {other: _announced(store, other) for other in others}
    while True:
        silent = [other for other in others if not store.check([f"{PREFIX}/answered/{other}"])]
        fates = {other: fate for other in silent if (fate := _fate(store, other, known[other], own))}
        if not fates and time.monotonic() > end_s:
            fates = {other: _silence(known[other], own) for other in silent}
        if fates or not silent:
            return tuple(Lost(other, how, seen[1] if (seen := known[other]) else "") for other, how in fates.items())
        time.sleep(POLL_S)


def _fate(store: c10d.Store, rank: int, announced: tuple[Process, str] | None, observer: Process) -> str:
    """Return what became of a rank that did not answer; empty if that is not known yet."""
    raised, dead = f"{PREFIX}/raised/{rank}", f"{PREFIX}/dead/{rank}"
    if store.check([raised]):
        return f"raised {store.get(raised).decode()}"
    if not store.check([dead]):
        if announced is None or not announced[0].is_dead(observer):
            return ""
        store.set(dead, "1")  # for ranks on other machines
    return "died"


def _silence(announced: tuple[Process, str] | None, observer: Process) -> str:
    """Return what is to be said of a rank that has not answered in time."""
    if announced is not None and announced[0].is_stopped(observer):
        return "is stopped (by SIGSTOP, a debugger or a job scheduler)"
    return "did not answer: it hangs or cannot be reached"


def _announced(store: c10d.Store, rank: int) -> tuple[Process, str] | None:
    """Return a rank's process and what it was about to do; None if it never announced itself."""
    key = f"{PREFIX}/process/{rank}"
    if not store.check([key]):
        return None
    machine, pid, start, what = json.loads(store.get(key))
    return Process(machine, pid, start), what


def _status_and_start(pid: int) -> tuple[str, str]:
    """Return a process' state letter and start time, both empty if there is none (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _store() -> c10d.Store:
    """Return the store of the default process group.

    Private, as torch has no public way to it; the same in torch 2.11 (read) and 2.13 (run).
    """
    store: c10d.Store = c10d._get_default_store()
    return store
