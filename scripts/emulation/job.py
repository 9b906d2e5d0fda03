"""One command on every node of a cluster: its output line by line, its deadlines, its exit status."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import BinaryIO

from . import linux
from .cluster import Cluster
from .nodes import environment, program, start

STOP_S = 5.0
"""How long a command has after SIGTERM until SIGKILL."""
TIMED_OUT = 124
"""Exit status after a timeout, as timeout(1) has it."""


def note(text: str) -> None:
    """Tell the user what the tool itself has to say."""
    print(f"emulated_cluster: {text}", file=sys.stderr, flush=True)


def cores_of_nodes(nodes: int, cores: list[int]) -> list[list[int]]:
    """Return each node's cores: as many for each, none shared unless there are fewer cores than nodes."""
    share = len(cores) // nodes
    if share == 0:
        return [[cores[node % len(cores)]] for node in range(nodes)]
    return [cores[node * share : (node + 1) * share] for node in range(nodes)]


def run(
    cluster: Cluster, command: list[str], *, timeout_s: float = inf, grace_s: float = 10.0, pin: bool = False
) -> int:
    """Run a command on every node; return 0, the status of the first that failed, or TIMED_OUT.

    Args:
        cluster: where.
        command: program and arguments, the same on all nodes.
        timeout_s: after so long all are stopped.
        grace_s: after the first failure the others have so long.
        pin: whether nodes get cores of their own.
    """
    nodes = cluster.links.nodes
    cores = cores_of_nodes(nodes, sorted(os.sched_getaffinity(0))) if pin else [None] * nodes
    job = _Job()
    try:
        for node in range(nodes):
            body = program(command, environment(cluster, node, f"run-{os.getpid()}"))
            job.start(node, partial(start, cluster, node, body, cores[node]))
        return job.wait(timeout_s, grace_s)
    finally:
        job.stop()


class _Job:
    """The processes of a run.  Events come from the pipes of their output and from their ends."""

    def __init__(self) -> None:
        self.gates: dict[int, int] = {}  # node: PID
        self.failed: list[int] = []  # statuses in the order of the failures
        self.failed_at_s = inf
        self.selector = selectors.DefaultSelector()

    def start(self, node: int, starter: Callable[[tuple[int, int, int]], int]) -> None:
        """Start a node's command with pipes for its output."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        out, err = os.pipe(), os.pipe()
        try:
            with linux.deferred():  # or a process could be there that `stop` does not know
                pid = self.gates[node] = starter((nothing, out[1], err[1]))
                ended = os.pidfd_open(pid)
                self.selector.register(ended, selectors.EVENT_READ, partial(self._reap, ended, node))
        finally:
            for file in (nothing, out[1], err[1]):
                os.close(file)
        for file, target in ((out[0], sys.stdout.buffer), (err[0], sys.stderr.buffer)):
            lines = _Lines(f"[node{node}] ".encode(), target)
            self.selector.register(file, selectors.EVENT_READ, partial(self._read, file, lines))

    def wait(self, timeout_s: float, grace_s: float) -> int:
        """Return the status of the run when all is over, or when the time is."""
        timed_out_at_s = time.monotonic() + timeout_s
        while self.selector.get_map():
            until_s = min(timed_out_at_s, self.failed_at_s + grace_s)
            if not self._handle(until_s):
                if until_s == timed_out_at_s:
                    note(f"stopping all nodes: --timeout {timeout_s:g} is over")
                    return TIMED_OUT
                note(f"stopping the other nodes, {grace_s:g} s after the failure")
                break
        return self.failed[0] if self.failed else 0

    def stop(self) -> None:
        """End what still runs, first asking it to."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.gates.values():
                os.kill(pid, number)  # until we have waited for it the PID is not another's
            until_s = time.monotonic() + STOP_S
            while self.gates and self._handle(until_s):
                pass
        self.selector.close()

    def _handle(self, until_s: float) -> bool:
        """Handle what happens next; whether anything did in time."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return False
        events = self.selector.select(None if left_s == inf else left_s)
        for key, _ in events:
            key.data()
        return bool(events)

    def _read(self, file: int, lines: _Lines) -> None:
        data = os.read(file, 1 << 16)
        lines.write(data)
        if not data:
            self.selector.unregister(file)
            os.close(file)

    def _reap(self, ended: int, node: int) -> None:
        self.selector.unregister(ended)
        os.close(ended)
        status = linux.exit_status(os.waitpid(self.gates.pop(node), 0)[1])
        if status:
            note(f"node{node}: exit status {status}" + (f" (signal {status - 128})" if status > 128 else ""))
            self.failed.append(status)
            self.failed_at_s = min(self.failed_at_s, time.monotonic())


class _Lines:
    """Writes whole lines, each with a prefix, so that those of several nodes do not mix."""

    def __init__(self, prefix: bytes, target: BinaryIO) -> None:
        self.prefix = prefix
        self.target = target
        self.rest = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        """Write what is complete; nothing as `data` means that no more will come."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines, self.rest = [self.rest], b""
        if not lines or self.closed:
            return
        try:
            self.target.write(b"".join(self.prefix + line + b"\n" for line in lines))
            self.target.flush()
        except BrokenPipeError:
            self.closed = True  # tell it once; while we stop, there may be more output
            raise
