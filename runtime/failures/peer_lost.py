"""The error of a rank that has lost another, and how it says whom."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.errors import FaultError
from runtime.failures.liveness import Lost

ANSWER_S = 5.0
"""How long a failed rank waits for the others to fail too. All of them wait for the same collective, so
their timeouts end within the time by which one is ahead of another."""


class PeerLost(FaultError):  # noqa: N818 - a condition to catch, not a mistake of the caller
    """A collective failed because a rank died, hangs or cannot be reached.

    The process group cannot be used any more.
    """


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 0, 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def describe_lost(lost: tuple[Lost, ...] | None) -> tuple[str, str]:
    """Say in words what `find_lost` knows about the others, and what to look at."""
    if lost is None:
        what = "the store of the process group is gone too, with the process or machine that hosted it"
        return what, "the log of rank 0's machine; launch by torchrun, whose store outlives the ranks"
    if not lost:
        what = "every rank answered, so the network failed or ranks disagree on what they exchange"
        shown = "TORCH_DISTRIBUTED_DEBUG=DETAIL shows which differ"
        return what, f"the same model, plan and data sizes on every rank; {shown}"
    fates = (f"rank {one.rank} {one.how}{f' (last seen in {one.last_seen})' if one.last_seen else ''}" for one in lost)
    ranks = format_ranks([one.rank for one in lost])
    return "; ".join(fates), f"the log of {ranks} (out of memory? killed?), then resume the last checkpoint"
