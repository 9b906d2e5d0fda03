"""A lease on a folder: one process at a time may write there, and whoever comes next learns who it is.

A file in the folder names the holder, who keeps a lock on it for as long as it lives: the kernel gives that up when the
process ends, however it ends, also on network file systems that know locks.  Where locks do not reach from one machine
to another, the holder's pulse does: it writes the file anew every few seconds, so that a holder on another machine is
gone when the file has stayed the same for `SILENT_S`.  Clocks are not compared.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from profiler.errors import OsdpError

LEASE = ".osdp-lease"
PULSE_S = 5.0
"""How often a holder shows that it lives."""
SILENT_S = 30.0
"""How long the file of a holder on another machine has to stay the same."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease."""

    host: str
    process: int
    job: str
    """In words: what it does."""
    since: str
    """By the clock of its machine."""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} ({self.job}), since {self.since}"


_own: dict[Path, Holder] = {}
"""What this process holds."""


class LeaseHeldError(OsdpError):
    """Somebody else holds the lease of a folder."""


class Lease:
    """The lease of a folder, which this process holds until `release`. Threads may share it; forks must not use it."""

    def __init__(self, folder: Path, job: str, silent_s: float | None = SILENT_S) -> None:
        """Take the lease.

        Args:
            folder: that exists, and no other process may write to.
            job: what this process does, for the message that another process gets.
            silent_s: how long to watch the file of a holder on another machine; None: such a lease counts as held.

        Raises:
            LeaseHeldError: if another process holds it.
        """
        self.path = folder.resolve() / LEASE
        self._holder = Holder(socket.gethostname(), os.getpid(), job, time.strftime("%Y-%m-%d %H:%M:%S %z"))
        self._is_locked = False
        """Whether the file system knows locks."""
        if self.path in _own:  # Locks are of processes: a second one of the same process would be granted.
            raise _held(folder, _own[self.path])
        self._file = self._lock()
        try:
            self._check_gone(silent_s)
            self._beat(0)
        except BaseException:
            os.close(self._file)
            raise
        _own[self.path] = self._holder
        self._ended = threading.Event()
        self._pulse = threading.Thread(target=self._beat_on, name="lease", daemon=True)
        self._pulse.start()

    def _lock(self) -> int:
        """Return the file, locked, that is under the path: whoever releases a lease removes its file."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_locked = True
            except OSError as error:
                holder = _read(file)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    os.close(file)
                    raise _held(self.path.parent, holder) from None
                if error.errno not in NO_LOCKS:
                    os.close(file)
                    raise
            with suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == os.fstat(file).st_ino:
                    return file
            os.close(file)

    def _check_gone(self, silent_s: float | None) -> None:
        """Raise LeaseHeldError unless the one who is named in the file is gone."""
        found = os.pread(self._file, 4096, 0)
        holder = _parse(found)
        if holder is None:
            return
        if holder.host == self._holder.host:
            if not self._is_locked and holder.process != os.getpid() and Path(f"/proc/{holder.process}").exists():
                raise _held(self.path.parent, holder)
            return  # The kernel gave up its lock, or there is no such process any more.
        if silent_s is None:
            raise _held(self.path.parent, holder)
        end_s = time.monotonic() + silent_s
        while time.monotonic() < end_s:
            time.sleep(min(1.0, silent_s / 10))
            if os.pread(self._file, 4096, 0) != found:
                raise _held(self.path.parent, holder)

    def _beat(self, count: int) -> None:
        text = json.dumps({**asdict(self._holder), "pulse": count}).encode().ljust(512)
        os.pwrite(self._file, text, 0)

    def _beat_on(self) -> None:
        count = 0
        while not self._ended.wait(PULSE_S):
            count += 1
            with suppress(OSError):  # A full disk or a server that is away: the lock still holds.
                self._beat(count)

    def moved(self, folder: Path) -> None:
        """Take note that the folder has another name now."""
        holder = _own.pop(self.path)
        self.path = folder.resolve() / LEASE
        _own[self.path] = holder

    def release(self) -> None:
        """Give the lease up. May be called again."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._pulse.join()
        _own.pop(self.path, None)
        with suppress(OSError):
            self.path.unlink()
        os.close(self._file)


@contextmanager
def leased(folder: Path, job: str, silent_s: float | None = SILENT_S, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lease of a folder inside. Raises LeaseHeldError, after waiting `patience_s` for its holder to end."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            lease = Lease(folder, job, silent_s)
            break
        except LeaseHeldError:
            if time.monotonic() >= end_s:
                raise
            time.sleep(0.5)
    try:
        yield
    finally:
        lease.release()


def _read(file: int) -> Holder | None:
    return _parse(os.pread(file, 4096, 0))


def _parse(found: bytes) -> Holder | None:
    try:
        data = json.loads(found)
        return Holder(str(data["host"]), int(data["process"]), str(data["job"]), str(data["since"]))
    except (ValueError, KeyError, TypeError):
        return None


def _held(folder: Path, holder: Holder | None) -> LeaseHeldError:
    what = f"another process writes to {folder}"
    advice = "another folder; or end that process, if it is what is left of an earlier run"
    return LeaseHeldError(what, got=str(holder or "not known"), expected="one job for a folder", advice=advice)
