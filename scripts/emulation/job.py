"""One command on every node of a cluster: its output line by line, its deadlines, its exit status."""

import os
import signal
import sys
import time
from math import inf
from subprocess import PIPE, Popen
from threading import Event, Lock, Thread
from typing import BinaryIO

from .cluster import emulated
from .network import Links

POLL_S = 0.05
STOP_S = 5.0
"""How long a command has after SIGTERM until SIGKILL."""
TIMED_OUT, CANNOT_RUN, NOT_FOUND = 124, 126, 127
"""Exit statuses, as timeout(1) and shells have them."""


def note(text: str) -> None:
    """Print a message of the tool itself."""
    print(f"emulated_cluster: {text}", file=sys.stderr, flush=True)


def cores_of_nodes(nodes: int, cores: list[int]) -> list[list[int]]:
    """Return each node's cores: as many for each, none shared unless there are fewer cores than nodes."""
    share = len(cores) // nodes
    if share == 0:
        return [[cores[node % len(cores)]] for node in range(nodes)]
    return [cores[node * share : (node + 1) * share] for node in range(nodes)]


def run(links: Links, command: list[str], *, timeout_s: float = inf, grace_s: float = 10.0, pin: bool = False) -> int:
    """Run a command on every node of a cluster of its own; return 0, the status of the first that failed, or TIMED_OUT.

    Args:
        links: the cluster's network.
        command: program and arguments, the same on all nodes.
        timeout_s: after so long all are stopped.
        grace_s: after the first failure the others have so long.
        pin: whether nodes get cores of their own.
    """
    cores = cores_of_nodes(links.nodes, sorted(os.sched_getaffinity(0))) if pin else [None] * links.nodes
    job = _Job()
    try:
        with emulated(links) as cluster:
            try:
                for node in range(links.nodes):
                    job.running[node] = cluster.start(node, command, cores[node], PIPE)
                job.relay_output()
                return job.wait(timeout_s, grace_s)
            except (FileNotFoundError, PermissionError) as error:
                note(f"cannot run '{command[0]}': {error.strerror}")
                return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
            finally:
                job.stop()
    finally:  # not before the cluster's end, which is the end of all that may still write
        for thread in job.relays:
            thread.join()


class _Job:
    """The processes of a run."""

    def __init__(self) -> None:
        self.running: dict[int, Popen[bytes]] = {}  # by node
        self.failed: list[int] = []  # statuses in the order of the failures
        self.failed_at_s = inf
        self.relays: list[Thread] = []
        self.output_closed = Event()

    def relay_output(self) -> None:
        """Begin to print what the processes print."""
        lock = Lock()
        for node, process in self.running.items():
            for source, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
                arguments = (source, f"[node{node}] ".encode(), target, lock, self.output_closed)
                self.relays.append(Thread(target=relay, args=arguments, daemon=True))
                self.relays[-1].start()

    def wait(self, timeout_s: float, grace_s: float) -> int:
        """Return the status of the run when all is over, or when the time is."""
        timed_out_at_s = time.monotonic() + timeout_s
        while self._reap():
            if self.output_closed.is_set():
                raise BrokenPipeError
            if time.monotonic() >= timed_out_at_s:
                note(f"stopping all nodes: --timeout {timeout_s:g} is over")
                return TIMED_OUT
            if time.monotonic() >= self.failed_at_s + grace_s:
                note(f"stopping the other nodes, {grace_s:g} s after the failure")
                break
            time.sleep(POLL_S)
        return self.failed[0] if self.failed else 0

    def stop(self) -> None:
        """End what still runs, first asking it to."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.running.values():
                os.killpg(process.pid, number)  # until we have waited for it the PID is not another's
            until_s = time.monotonic() + STOP_S
            while self._reap() and time.monotonic() < until_s:
                time.sleep(POLL_S)

    def _reap(self) -> bool:
        """Report the processes that have ended; whether any still runs."""
        for node, process in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[node]
            if code:
                status = code if code > 0 else 128 - code  # 128 + n after signal n, as shells have it
                note(f"node{node}: exit status {status}" + (f" (signal {status - 128})" if status > 128 else ""))
                self.failed.append(status)
                self.failed_at_s = min(self.failed_at_s, time.monotonic())
        return bool(self.running)


def relay(source: BinaryIO, prefix: bytes, target: BinaryIO, lock: Lock, closed: Event) -> None:
    """Write whole lines with a prefix, so that those of several nodes do not mix; set `closed` if nobody reads them."""
    try:
        for line in source:
            with lock:
                target.write(prefix + line.removesuffix(b"\n") + b"\n")
                target.flush()
    except BrokenPipeError:
        closed.set()
