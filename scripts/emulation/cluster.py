"""The keeper: one process that is the cluster.

It is the first process of a PID namespace, holds every node's namespaces open, and then sleeps.  All that
runs in the nodes runs in its PID namespace or below.  So when it ends, for whatever reason, the kernel kills
all of it, and with the last process and open file the namespaces and their links are gone: there is nothing
to undo step by step, and nothing to be left half undone.  The keeper itself is killed by the kernel when the
tool ends, by `kill -9` too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import linux
from .errors import RefusalError
from .network import Links, connect, find, hosts_file, make_switch

NODE_NAMESPACES = ("net", "uts", "ipc", "mnt")
"""What a node has for itself, in the order to enter them."""


@dataclass(frozen=True)
class Cluster:
    """A cluster that is there."""

    links: Links
    """Its network."""
    keeper: int
    """PID of the process that is the cluster."""
    files: tuple[tuple[int, ...], ...]
    """For each node the keeper's open files, one for each of NODE_NAMESPACES."""

    def path(self, node: int, kind: str) -> str:
        """Return the path by which a node's namespace can be opened."""
        return f"/proc/{self.keeper}/fd/{self.files[node][NODE_NAMESPACES.index(kind)]}"


def require_machine() -> None:
    """Refuse a machine on which no cluster can be made."""
    if os.geteuid() != 0:
        raise RefusalError(
            "a cluster can only be made by root",
            got=f"user id {os.geteuid()}",
            expected="user id 0, for network namespaces and traffic control",
            advice="run it as root, or in a container of your own: docker run --privileged",
        )
    find("ip")
    find("tc")


@contextlib.contextmanager
def temporary(links: Links) -> Iterator[Cluster]:
    """Make a cluster for the time of a `with`; it ends with this process, however that ends."""
    require_machine()
    answer, question = os.pipe()
    try:
        keeper = linux.fork_elsewhere(lambda: _keep(links, question))
    except OSError as error:
        raise _not_allowed(error) from None
    finally:
        os.close(question)
    try:
        with os.fdopen(answer) as pipe:
            told = json.loads(pipe.read() or '{"refusal": ["the keeper of the cluster died", "", "", ""]}')
        if "refusal" in told:
            what, got, expected, advice = told["refusal"]
            raise RefusalError(what, got=got, expected=expected, advice=advice)
        yield Cluster(links, keeper, tuple(tuple(files) for files in told["files"]))
    finally:
        _end(keeper)


def _end(keeper: int) -> None:
    """End a cluster that this process made, and all children: its end waits for those in it to be reaped."""
    os.kill(keeper, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _not_allowed(error: OSError) -> RefusalError:
    return RefusalError(
        "this machine does not let us make a cluster",
        got=str(error),
        expected="the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN, and a kernel with namespaces",
        advice="run it on the machine itself, or in a container: docker run --privileged",
    )


def _keep(links: Links, question: int) -> int:
    """Be the keeper: make the nodes, answer with their files or a refusal, and sleep until killed."""
    os.setsid()
    os.chdir("/")
    told: dict[str, object]
    try:
        told = {"files": _make_nodes(links)}
    except RefusalError as error:
        told = {"refusal": error.parts}
    except OSError as error:
        told = {"refusal": _not_allowed(error).parts}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that become ours leave no zombies
    os.write(question, json.dumps(told).encode())
    os.close(question)
    while "files" in told:
        signal.pause()
    return 0


def _make_nodes(links: Links) -> tuple[tuple[int, ...], ...]:
    """Make all namespaces and links; return the open files of the nodes'."""
    linux.unshare(linux.NEW_NETWORK | linux.NEW_MOUNTS)
    linux.mount("none", "/", flags=linux.SLAVE | linux.RECURSIVE)  # mounts come in from the machine, none go out
    _mount_shared_memory()
    hosts = Path("/dev/shm/hosts")
    hosts.write_text(hosts_file(links.nodes))
    linux.mount(str(hosts), "/etc/hosts", flags=linux.BIND)
    switch, mounts = linux.open_namespace("net"), linux.open_namespace("mnt")
    make_switch()
    files = []
    for node in range(links.nodes):
        linux.enter(mounts)
        linux.unshare(linux.NEW_NETWORK | linux.NEW_MOUNTS | linux.NEW_UTS | linux.NEW_IPC)
        _mount_shared_memory()
        socket.sethostname(f"node{node}")
        files.append(tuple(linux.open_namespace(kind) for kind in NODE_NAMESPACES))
        linux.enter(switch)
        connect(node, files[-1][NODE_NAMESPACES.index("net")], links)
    return tuple(files)


def _mount_shared_memory() -> None:
    """Give POSIX shared memory a place of its own: no node sees another's, and none of it stays behind."""
    linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.NOSUID | linux.NODEV, "mode=1777")
