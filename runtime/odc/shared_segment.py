"""One rank's part of the shared memory: a file in /dev/shm that its peers map, and locks on its bytes.

Nothing outlives a crash.  The file loses its name as soon as all peers have mapped it, and the kernel
frees the memory with the last of them; what a rank leaves that dies before that, the next one that
starts removes.

Locks are POSIX record locks (fcntl(2), F_SETLK) on the very bytes that they guard.  The kernel drops them when
their holder dies, however it dies, so none is ever stuck; and a rank that keeps the first byte of its
own file locked for as long as it lives is dead when that lock is free, which needs no process
numbers.  Taking and dropping one costs two system calls, 3 microseconds together, against 0.5 for a
robust mutex of the C library, whose layout Python does not know; both are small beside a chunk.  Two traps:
a process loses its locks on a file when it closes *any* descriptor of it, so each file is opened once;
and a process does not exclude itself, so one thread at a time uses a segment.  A forked child holds none.

Memory order.  Python has no atomic operations, so nothing relies on how plain loads and stores are
ordered.  What one rank wrote before it dropped a lock is seen by a rank that takes the same lock later:
the kernel guards a file's locks by a spin lock, whose release and acquire order the accesses before
and after it on every processor, x86 as well as ARM, and moving a thread to another core is a full
barrier.  A flag read without its lock is only a hint, confirmed under the lock.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from profiler.byte_sizes import format_bytes
from profiler.errors import FaultError, OsdpError

FOLDER = Path("/dev/shm")
PREFIX = "osdp-odc-"
FLAGS_OF_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
"""Everybody may make names there: a symbolic link under one of ours leads to a file of somebody else's choice."""
HEADER_BYTES = mmap.PAGESIZE
"""In front of the windows."""
LIFE = (0, 1)
"""Range that the owner keeps locked while it lives: offset and length."""
FLAGS = (64, 24)
"""Range of the barriers' flags."""
BARRIERS, STATE, LEFT = 64 // 8, 128 // 8, 136 // 8
"""Indices of 8-byte integers: barriers that the owner reached; its state; whether it uses nothing of its peers."""
NOTES = 72 // 8
"""Index of two doubles, the owner's notes at the last even and the last odd barrier."""
OPEN, CLOSED = 0, -1
"""States; another is the number of the barrier that the owner gave up."""
RECORD = "hhqqi0q"
"""C's `struct flock` on 64-bit Linux: type, whence, start, length, pid."""


class Patience:
    """Sleeps longer and longer, 20 microseconds to 1 ms, up to a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self.end_s, self.pause_s = time.monotonic() + timeout_s, 2e-5

    def sleep(self) -> bool:
        """Sleep; return False if the time is over."""
        time.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, 1e-3)
        return time.monotonic() < self.end_s


class Segment:
    """A file that is mapped: its own by the rank that made it, or a peer's."""

    def __init__(self, path: Path, size_bytes: int, descriptor: int | None = None) -> None:
        self.path = path
        self._descriptor = os.open(path, FLAGS_OF_OPEN) if descriptor is None else descriptor
        self._map = mmap.mmap(self._descriptor, size_bytes)
        view = memoryview(self._map)[:HEADER_BYTES]
        self._integers, self._doubles = view.cast("q"), view.cast("d")

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Make a file of zeros that belongs to this process. Raises OsdpError if there is no room for it."""
        remove_leftovers()
        while True:
            path = FOLDER / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            descriptor = os.open(path, FLAGS_OF_OPEN | os.O_CREAT | os.O_EXCL, 0o600)
            # A rank that starts now may have taken the file for a leftover before it was locked.
            if try_lock(descriptor, fcntl.LOCK_EX, *LIFE) and os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)
        try:
            # Without this, a full /dev/shm would kill the process at the first access to a page.
            os.posix_fallocate(descriptor, 0, size_bytes)
            return cls(path, size_bytes, descriptor)
        except OSError as error:
            path.unlink()
            os.close(descriptor)
            raise _no_room(size_bytes, error) from error

    def close(self) -> None:
        """Release the memory and all locks; tensors in it must not be used any more."""
        self._integers.release()
        self._doubles.release()
        with suppress(BufferError):  # a tensor that is still alive keeps it mapped
            self._map.close()
        os.close(self._descriptor)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor (numel,) that lies at `offset` bytes."""
        if not numel:  # which `frombuffer` refuses
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    # --- locks

    def try_lock(self, start: int, length: int) -> bool:
        """Lock a range of bytes against other processes, unless one has it."""
        return try_lock(self._descriptor, fcntl.LOCK_EX, start, length)

    def unlock(self, start: int, length: int) -> None:
        """Drop a lock."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, length, start)

    def holder(self, start: int, length: int) -> int | None:
        """Return the process that holds a lock in a range; None if another one could take it."""
        asked = struct.pack(RECORD, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind, *_, pid = struct.unpack(RECORD, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid

    def is_alive(self) -> bool:
        """Whether a peer that owns this segment lives and has not closed it."""
        return self.holder(*LIFE) is not None

    # --- flags

    @property
    def state(self) -> int:
        """OPEN, CLOSED, or the barrier that the owner gave up."""
        return self._integers[STATE]

    @state.setter
    def state(self, state: int) -> None:
        self._integers[STATE] = state

    @property
    def has_left(self) -> bool:
        """Whether the owner uses nothing of its peers any more."""
        return bool(self._integers[LEFT])

    @has_left.setter
    def has_left(self, has_left: bool) -> None:
        self._integers[LEFT] = has_left

    def reach(self, barrier: int, note: float, patience: Patience) -> bool:
        """Note that the owner has reached a barrier; False if a peer has the flags locked for too long."""
        while not self.try_lock(*FLAGS):
            if not patience.sleep():
                return False
        # Of two notes, as a slow peer may still read the one of the barrier before.
        self._doubles[NOTES + barrier % 2] = note
        self._integers[BARRIERS] = barrier
        self.unlock(*FLAGS)
        return True

    def has_reached(self, barrier: int) -> bool:
        """Whether the owner has reached a barrier; if so, all that it wrote before is visible from now on."""
        # A shared lock, so that peers that read at the same moment do not exclude each other.
        if self._integers[BARRIERS] < barrier or not try_lock(self._descriptor, fcntl.LOCK_SH, *FLAGS):
            return False
        try:
            return self._integers[BARRIERS] >= barrier
        finally:
            self.unlock(*FLAGS)

    def note(self, barrier: int) -> float:
        """Return the owner's note at the last barrier."""
        return self._doubles[NOTES + barrier % 2]


def try_lock(descriptor: int, kind: int, start: int, length: int) -> bool:
    """Lock a range of a file's bytes, alone (LOCK_EX) or with other readers (LOCK_SH); False if that cannot be now."""
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):  # POSIX allows for either
        return False
    return True


def remove_leftovers() -> None:
    """Remove files of this user's ranks that died while they started."""
    own = f"{PREFIX}{os.getpid()}-"
    for path in FOLDER.glob(f"{PREFIX}*"):
        if path.name.startswith(own):  # closing another descriptor of it would drop its locks
            continue
        with suppress(OSError):  # another user's, or gone
            descriptor = os.open(path, FLAGS_OF_OPEN)
            try:
                if try_lock(descriptor, fcntl.LOCK_EX, *LIFE):
                    path.unlink()
            finally:
                os.close(descriptor)


def _no_room(size_bytes: int, error: OSError) -> OsdpError:
    if error.errno != errno.ENOSPC:
        return FaultError("no shared memory can be made", got=str(error))
    space = os.statvfs(FOLDER)
    what, got = f"{FOLDER} is too small for the windows", f"{format_bytes(space.f_bavail * space.f_frsize)} free"
    advice = "a larger one (docker run --shm-size=..., mount -o remount,size=... /dev/shm), or another strategy"
    # Where it would go in if nothing else were there, it may another time.
    kind = FaultError if size_bytes <= space.f_blocks * space.f_frsize else OsdpError
    return kind(what, got=got, expected=f"{format_bytes(size_bytes)} for each rank", advice=advice)
