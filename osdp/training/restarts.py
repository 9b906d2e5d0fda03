"""Starts the ranks again after a fault: each round is a run of torch's elastic agent, and begins with a rendezvous.

The agent's own restarts cannot tell a lost rank from bad input, which would only fail again; so the rounds are
counted here.  Of several nodes all are in the same round: its number, and the message that has ended the job, are in
the store at the rendezvous endpoint.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from osdp.training.launch import Nodes, RankError, launch
from osdp.training.meeting import Meeting, address_towards, join_store
from osdp.training.progress import FOLDER, ROUND, Restarts, read
from profiler.errors import OsdpError

LEAVE_S = 10.0
"""How long the node that has the store waits for the others to leave it."""


class Rounds:
    """The number of the round on one node, or, with a store, on all."""

    def __init__(self, nodes: Nodes, store: Any = None, meeting: Meeting | None = None) -> None:
        self._nodes, self._store, self._meeting = nodes, store, meeting
        self._number = 0

    def nodes_of(self, number: int) -> Nodes:
        """Return the nodes as they meet in a round."""
        meeting = self._meeting and dataclasses.replace(self._meeting, round=number)
        return dataclasses.replace(self._nodes, meeting=meeting)

    def number(self) -> int:
        if self._store is not None:
            with self._reaching():
                self._number = self._store.add("osdp/round", 0)
        return self._number

    def next(self, number: int) -> None:
        """End round `number`, if no other node has."""
        if self._store is None:
            self._number = number + 1
        else:
            with self._reaching():
                self._store.compare_set("osdp/round", str(number), str(number + 1))

    def end(self, message: str) -> None:
        """Let no node begin another round."""
        if self._store is not None:
            with suppress(RuntimeError):  # The node that has the store may be gone first.
                self._store.compare_set("osdp/ended", "", message)

    def ended(self) -> str:
        """Return the message with which another node has ended the job, if one has."""
        if self._store is None:
            return ""
        with self._reaching():
            return self._store.get("osdp/ended").decode() if self._store.check(["osdp/ended"]) else ""

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn errors of a store that cannot be reached into ours."""
        try:
            yield
        except RuntimeError:
            what = f"the node at the rendezvous endpoint {self._nodes.endpoint} is gone, and with it the store"
            raise RankError(f"{what}; start all nodes again: --resume auto continues") from None


def launch_again(
    restarts: int, say: Callable[[str], None], command: Sequence[str], ranks: int, nodes: Nodes, *rest: Any
) -> None:
    """Do as `osdp.training.launch.launch`, and again after a fault, up to `restarts` times; `say` announces it.

    Raises as `launch` does; OsdpError, which is of bad input, at once.
    """
    with tempfile.TemporaryDirectory(prefix="osdp-progress-") as folder, _rounds(nodes, rest[1]) as rounds:
        os.environ[FOLDER] = folder
        while True:
            number = rounds.number()
            os.environ[ROUND] = str(number)
            try:
                launch(command, ranks, rounds.nodes_of(number), *rest)
                return
            except OsdpError as error:
                rounds.end(str(error))
                raise
            except RankError as error:
                if message := rounds.ended():
                    raise OsdpError(message) from None
                if number >= restarts:
                    rounds.end(f"another node gave up after {number} restarts: {error}")
                    noted = read(folder)
                    if noted is not None and number:
                        say(str(Restarts(number, noted.lost_steps, noted.lost_s)))
                    raise
                say(f"restart {number + 1} of {restarts}: {error}")
                rounds.next(number)


@contextmanager
def _rounds(nodes: Nodes, timeout_s: float) -> Iterator[Rounds]:
    """Join the store of all nodes, and leave it: the node that has it, last."""
    if nodes.count == 1:
        yield Rounds(nodes)
        return
    store, is_host = join_store(nodes.endpoint, timeout_s)
    meeting = Meeting(nodes.least or nodes.count, address_towards(nodes.endpoint), is_host)
    store.add("osdp/joined", 1)
    try:
        yield Rounds(nodes, store, meeting)
    finally:
        with suppress(RuntimeError):
            store.add("osdp/left", 1)
            end_s = time.monotonic() + LEAVE_S
            while is_host and store.add("osdp/left", 0) < store.add("osdp/joined", 0) and time.monotonic() < end_s:
                time.sleep(0.1)
