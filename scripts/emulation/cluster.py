"""The keeper: one process that is the cluster.

It is the first process of a PID namespace, holds every node's namespaces open, and then sleeps.  All that
runs in the nodes runs in its PID namespace.  So when it ends, for whatever reason, the kernel kills all of it,
and with the last process and open file the namespaces and their links are gone: there is nothing to undo step
by step, and nothing to be left half undone.  The keeper is killed by the kernel when the tool ends, by
`kill -9` too.
"""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen

from . import linux
from .errors import RefusalError
from .network import Links, address, connect, find, hosts_file, make_switch

NODE_NAMESPACES = ("net", "uts", "ipc", "mnt")
"""What a node has for itself, in the order to enter them."""
RENDEZVOUS_PORT, MASTER_PORT = 29400, 29500
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass(frozen=True)
class Cluster:
    """A cluster that is there."""

    links: Links
    """Its network."""
    keeper: int
    """PID of the process that is the cluster."""
    files: tuple[tuple[int, ...], ...]
    """For each node the keeper's open files, one for each of NODE_NAMESPACES."""

    def start(
        self, node: int, command: list[str], cores: Iterable[int] | None = None, output: int | None = None
    ) -> Popen[bytes]:
        """Start a program in a node, in a session of its own.

        `cores` are those that it may use, `output` is of standard output and error as `Popen` takes it. Raises OSError.
        """
        namespaces = [os.open(f"/proc/{self.keeper}/fd/{file}", os.O_RDONLY) for file in self.files[node]]
        pids = os.open(f"/proc/{self.keeper}/ns/pid", os.O_RDONLY)
        folder, pipes = os.getcwd(), {"stdin": DEVNULL, "stdout": output, "stderr": output}

        def enter_node() -> None:
            if cores is not None:
                os.sched_setaffinity(0, cores)
            for namespace in namespaces:
                linux.enter(namespace)
            os.chdir(folder)  # entering a mount namespace led to its root

        try:
            with linux.inside(pids, "pid"):
                words = environment(self.links, node)
                return Popen(command, env=words, preexec_fn=enter_node, start_new_session=True, **pipes)
        finally:
            for file in (*namespaces, pids):
                os.close(file)


def environment(links: Links, node: int) -> dict[str, str]:
    """Return the environment of a command on a node; torchrun takes its options' defaults from PET_*."""
    words = {
        "NODE_RANK": str(node),
        "NNODES": str(links.nodes),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "PET_NNODES": str(links.nodes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{address(0)}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": f"emulated-{os.getpid()}",
        "PET_RDZV_CONF": f"is_host={int(node == 0)}",  # or torchrun guesses it from host names
        "PET_LOCAL_ADDR": address(node),
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }
    ours = {"OMP_NUM_THREADS": "1", **os.environ, **words}
    return {key: value for key, value in ours.items() if key not in PROXIES}  # a node reaches nodes and nothing else


@contextlib.contextmanager
def emulated(links: Links) -> Iterator[Cluster]:
    """A cluster for the time of a `with`; raises RefusalError on a machine where none can be made."""
    if os.geteuid() != 0:
        what = "a cluster can only be made by root"
        expected = "user id 0, for network namespaces and traffic control"
        advice = "run it as root, or in a container of your own: docker run --privileged"
        raise RefusalError(what, got=f"user id {os.geteuid()}", expected=expected, advice=advice)
    find("ip")
    find("tc")
    reader, writer = os.pipe()
    try:
        keeper = linux.fork_namespace(lambda: _keep(links, writer))
    except OSError as error:
        raise _not_allowed(error) from None
    finally:
        os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            message = json.loads(pipe.read() or '{"refusal": ["the keeper of the cluster died", "", "", ""]}')
        if "refusal" in message:
            what, got, expected, advice = message["refusal"]
            raise RefusalError(what, got=got, expected=expected, advice=advice)
        yield Cluster(links, keeper, tuple(map(tuple, message["files"])))
    finally:
        os.kill(keeper, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:  # the keeper's end waits until all our children in its PID namespace are reaped
                os.wait()


def _not_allowed(error: OSError) -> RefusalError:
    expected = "the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN, and a kernel with namespaces"
    advice = "run it on the machine itself, or in a container: docker run --privileged"
    what = "this machine does not let us make a cluster"
    return RefusalError(what, got=str(error), expected=expected, advice=advice)


def _keep(links: Links, writer: int) -> int:
    """Be the keeper: make the nodes, report their files or a refusal, and sleep until killed."""
    os.setsid()
    message: dict[str, object]
    try:
        message = {"files": _make_nodes(links)}
    except RefusalError as error:
        message = {"refusal": error.parts}
    except OSError as error:
        message = {"refusal": _not_allowed(error).parts}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that become ours leave no zombies
    os.write(writer, json.dumps(message).encode())
    os.close(writer)
    while "files" in message:
        signal.pause()
    return 0


def _make_nodes(links: Links) -> list[list[int]]:
    """Make all namespaces and links; return the open files of the nodes'."""
    linux.unshare(linux.NEW_NETWORK | linux.NEW_MOUNTS)
    linux.mount("none", "/", flags=linux.SLAVE | linux.RECURSIVE)  # mounts come in from the machine, none go out
    linux.mount("proc", "/proc", "proc")
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
        files.append([linux.open_namespace(kind) for kind in NODE_NAMESPACES])
        linux.enter(switch)
        connect(node, files[-1][NODE_NAMESPACES.index("net")], links)
    return files


def _mount_shared_memory() -> None:
    """Give POSIX shared memory a place of its own: no node sees another's, and none of it stays behind."""
    linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.NOSUID | linux.NODEV, "mode=1777")
