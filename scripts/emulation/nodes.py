"""A process inside a node: tool -> gate -> init -> command.

The gate is the tool's child; it enters the node and waits.  The init is the first process of a PID namespace
of its own, below the cluster's, and the command's parent: when the command ends it ends too, and the kernel
kills whatever the command left running, in other sessions and groups too.  Each dies with its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType

from . import linux
from .cluster import NODE_NAMESPACES, Cluster
from .network import address

RENDEZVOUS_PORT, MASTER_PORT = 29400, 29500
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def environment(cluster: Cluster, node: int, run: str) -> dict[str, str]:
    """Return the environment of a command on a node.

    torchrun takes its options' defaults from PET_*.  `run` is the name of the rendezvous, the same on all nodes.
    """
    words = {
        "NODE_RANK": str(node),
        "NNODES": str(cluster.links.nodes),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "PET_NNODES": str(cluster.links.nodes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{address(0)}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": run,
        "PET_RDZV_CONF": f"is_host={int(node == 0)}",  # or torchrun guesses it from host names
        "PET_LOCAL_ADDR": address(node),
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }
    ours = {"OMP_NUM_THREADS": "1", **os.environ, **words}
    return {key: value for key, value in ours.items() if key not in PROXIES}  # a node reaches nodes and nothing else


def program(command: list[str], variables: Mapping[str, str]) -> Callable[[], int]:
    """Return a body for `start` that becomes a program, in a session of its own."""

    def become() -> int:
        os.setsid()
        linux.handle_stopping(dict.fromkeys((*linux.STOPPING, signal.SIGPIPE), signal.SIG_DFL))
        try:
            os.execvpe(command[0], command, variables)
        except OSError as error:
            print(f"cannot run '{command[0]}': {error.strerror}", file=sys.stderr, flush=True)
            return 127 if isinstance(error, FileNotFoundError) else 126

    return become


def start(
    cluster: Cluster,
    node: int,
    body: Callable[[], int],
    cores: Iterable[int] | None = None,
    streams: tuple[int, int, int] | None = None,
) -> int:
    """Run `body` in a node and return the PID of its gate, which exits as `body` does and hands SIGTERM on.

    `cores` are those that it may use, `streams` its standard input, output and error.
    """
    namespaces = [os.open(cluster.path(node, kind), os.O_RDONLY) for kind in NODE_NAMESPACES]
    pids = os.open(f"/proc/{cluster.keeper}/ns/pid", os.O_RDONLY)

    def gate() -> int:
        for number, stream in enumerate(streams or ()):
            os.dup2(stream, number)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        folder = os.getcwd()
        for namespace in namespaces:
            linux.enter(namespace)
        os.chdir(folder)  # entering a mount namespace led to its root
        init = linux.fork_elsewhere(lambda: _init(body))
        _on_terminate(init)
        return linux.exit_status(os.waitpid(init, 0)[1])

    try:
        return linux.fork_elsewhere(gate, pids)
    finally:
        for file in (*namespaces, pids):
            os.close(file)


def _init(body: Callable[[], int]) -> int:
    """Be the first process of a PID namespace: run the command, reap orphans, and end with the command."""
    linux.unshare(linux.NEW_MOUNTS)
    linux.mount("proc", "/proc", "proc")
    command = linux.fork(body)
    _on_terminate(-1)  # all processes of this namespace except its first
    while True:
        pid, status = os.wait()
        if pid == command:
            return linux.exit_status(status)


def _on_terminate(target: int) -> None:
    """Hand SIGTERM on to a process, or with -1 to all that can be signalled; ignore a terminal's signals."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)

    ignored = dict.fromkeys((signal.SIGINT, signal.SIGHUP), signal.SIG_IGN)
    linux.handle_stopping({**ignored, signal.SIGTERM: hand_on})
