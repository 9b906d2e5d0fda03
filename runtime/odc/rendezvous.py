"""How ranks of one machine synchronize: every rank has a segment of shared memory that its peers have mapped.

In its header a rank writes which barrier it has reached and its note there, that it gave up or closed,
and shows by a lock that it lives (`runtime.odc.shared_segment`).  Windows on the CPU lie behind the header; those on
GPUs elsewhere.
"""

import os
from pathlib import Path

from runtime.failures.peer_faults import PeerLost
from runtime.failures.peer_lost import format_ranks
from runtime.failures.rank_agreement import Agreement
from runtime.odc.shared_segment import CLOSED, FLAGS, HEADER_BYTES, OPEN, Patience, Segment

GAVE_UP = "gave up waiting"


class Rendezvous:
    """The segments of all ranks of a group, as this rank has them mapped."""

    def __init__(self, agreement: Agreement, ranks: tuple[int, ...], rank: int, size_bytes: int = HEADER_BYTES) -> None:
        """Make this rank's segment and map those of the others, then unlink the files. Collective.

        Args:
            agreement: of the group.
            ranks: the global ranks of the group.
            rank: this one's rank within the group.
            size_bytes: of each segment.

        Raises:
            OsdpError: on every rank, if one has no room.
        """
        self.ranks, self.rank = ranks, rank
        self.segments: list[Segment] = []
        """Of all ranks, in order of rank."""
        mine: list[Segment] = []

        def make() -> tuple[Path, int]:
            mine.append(Segment.create(size_bytes))
            return mine[0].path, os.getpid()

        def attach() -> None:
            for other, (path, _) in enumerate(made):
                self.segments.append(mine[0] if other == rank else Segment(path, size_bytes))

        try:
            made = agreement.gather("make shared memory", make)
            agreement.together("map the shared memory of the others", attach)
        except BaseException:
            for segment in {*mine, *self.segments}:
                segment.path.unlink(missing_ok=True)
                segment.close()
            raise
        mine[0].path.unlink()
        self._pids = [pid for _, pid in made]

    def others_first(self) -> list[int]:
        """Return all ranks from the next one on, so that they do not all go to the same one."""
        ranks = len(self.ranks)
        return [(self.rank + hop) % ranks for hop in range(1, ranks + 1)]

    def wait(self, number: int, note: float, timeout_s: float) -> tuple[float, ...]:
        """Reach a barrier and wait for all; return their notes. Raises PeerLost."""
        own, patience = self.segments[self.rank], Patience(timeout_s)
        if not own.reach(number, note, patience):
            raise self.held(self.rank, FLAGS, timeout_s)
        missing = [rank for rank in self.others_first() if rank != self.rank]
        while missing := [rank for rank in missing if not self.segments[rank].has_reached(number)]:
            lost = self._lost_of(missing, number)
            if not lost and not patience.sleep():
                lost = dict.fromkeys(missing, "did not reach the barrier")
            if lost:
                raise self.lost(lost, number, timeout_s)
        # One that gave up a later barrier did reach this one.
        gave_up = [rank for rank, segment in enumerate(self.segments) if OPEN < segment.state <= number]
        if gave_up:
            raise self.lost(dict.fromkeys(gave_up, GAVE_UP), number, timeout_s)
        return tuple(segment.note(number) for segment in self.segments)

    def _lost_of(self, missing: list[int], number: int) -> dict[int, str]:
        """Return which of the missing ranks do not come any more, and why: only those that others gave up for."""
        fates = {rank: how for rank in missing if (how := self._fate(rank, number))}
        if GAVE_UP in fates.values():  # For one that was gone before: seen now, if it was not when it was looked at.
            again = {rank: self._fate(rank, number) for rank in missing}
            fates = {rank: how for rank, how in again.items() if how not in ("", GAVE_UP)} or fates
        return fates

    def _fate(self, rank: int, number: int) -> str:
        """Return what became of a rank that has not reached a barrier; empty if it still may."""
        segment = self.segments[rank]
        if OPEN < segment.state <= number:
            return GAVE_UP
        # A rank may reach it and then leave, so whether it did is asked last.
        gone = self.gone(rank)
        return "" if segment.has_reached(number) else gone

    def gone(self, rank: int) -> str:
        """Return how a rank left; empty if it has not."""
        segment = self.segments[rank]
        is_alive = segment.is_alive()
        if segment.state == CLOSED:  # Asked second: what it is where a rank has ended does not change any more.
            return "closed its windows"
        return "" if is_alive else "died"

    def lost(self, lost: dict[int, str], number: int, timeout_s: float) -> PeerLost:
        """Return what to raise when ranks are lost; each with what became of it."""
        fates = "; ".join(f"rank {self.ranks[rank]} {how}" for rank, how in sorted(lost.items()))
        got = f"rank {self.ranks[self.rank]} waited at barrier {number}"
        expected = f"{format_ranks(self.ranks)} within {timeout_s:g} s"
        logs = f"the log of {format_ranks([self.ranks[rank] for rank in sorted(lost)])}"
        advice = f"{logs} (out of memory? killed? a step longer than the timeout?), then resume the last checkpoint"
        return PeerLost(f"a barrier of odc failed: {fates}", got=got, expected=expected, advice=advice)

    def held(self, rank: int, place: tuple[int, int], timeout_s: float) -> PeerLost:
        """Return what to raise when bytes of a rank's segment stay locked."""
        pid = self.segments[rank].holder(*place)
        who = f"rank {self.ranks[self._pids.index(pid)]}" if pid in self._pids else "another rank"
        what = f"{who} is stuck in the middle of a push or a barrier"
        got = f"memory of rank {self.ranks[rank]} locked for {timeout_s:g} s"
        advice = f"the log of {who} (stopped? swapping?), then resume the last checkpoint"
        return PeerLost(what, got=got, expected="a fraction of a millisecond", advice=advice)

    def give_up(self, number: int) -> None:
        """Let the others know that this rank gave up a barrier."""
        if self.segments:
            self.segments[self.rank].state = number

    def leave(self, timeout_s: float) -> bool:
        """Mark that this rank uses nothing of the others any more; return whether all others did too, or are gone."""
        self._close()
        self.segments[self.rank].has_left = True
        patience = Patience(timeout_s)
        while not all(
            segment.has_left or not segment.is_alive()
            for rank, segment in enumerate(self.segments)
            if rank != self.rank
        ):
            if not patience.sleep():
                return False
        return True

    def release(self) -> None:
        """Unmap all segments; the others see that this rank closed. May be called again."""
        if not self.segments:
            return
        self._close()
        for segment in self.segments:
            segment.close()
        self.segments.clear()

    def _close(self) -> None:
        own = self.segments[self.rank]
        if own.state == OPEN:
            own.state = CLOSED
