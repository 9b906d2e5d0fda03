"""Calls of Linux that Python 3.11's standard library lacks: namespaces, mounts, and a child that dies with us."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

# <linux/sched.h>
NEW_MOUNTS = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

# <linux/mount.h>
NOSUID, NODEV, BIND, RECURSIVE, SLAVE = 2, 4, 4096, 16384, 1 << 19

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which someone asks a program to end."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> None:
    """Call a function of the C library that returns -1 for an error.  Raises OSError."""
    if getattr(_libc, name)(*args) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones; with `NEW_PIDS` only children will be in the new one."""
    _call("unshare", flags)


def enter(namespace: int) -> None:
    """Enter the namespace of an open file; of PIDs, only children will be in it."""
    _call("setns", namespace, 0)


def open_namespace(kind: str) -> int:
    """Return an open file on our namespace of a kind: net, mnt, uts, ipc or pid.  While open, it keeps it alive."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """As mount(2) does."""
    text = [word.encode() or None for word in (source, target, kind, options)]
    _call("mount", text[0], text[1], text[2], ctypes.c_ulong(flags), text[3])


@contextlib.contextmanager
def inside(namespace: int, kind: str) -> Iterator[None]:
    """Be in a namespace, and afterwards back in the present one."""
    home = open_namespace(kind)
    try:
        enter(namespace)
        yield
    finally:
        enter(home)
        os.close(home)


def fork_namespace(body: Callable[[], int]) -> int:
    """Fork the first process of a new PID namespace; return its PID as we see it.

    It runs `body`, exits with what that returns, leaves the STOPPING signals blocked, and is killed when this process
    ends.  When it ends, the kernel kills all other processes of the namespace.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent, home = os.pidfd_open(os.getpid()), open_namespace("pid")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        unshare(NEW_PIDS)
        pid = os.fork()
        if pid == 0:
            _be_child(body, parent)
        return pid
    finally:
        enter(home)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(home)
        os.close(parent)


def _be_child(body: Callable[[], int], parent: int) -> None:
    """Run `body` in a child and exit."""
    status = 1
    try:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        if not select.select([parent], [], [], 0)[0]:  # else the parent ended before the line above
            status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
