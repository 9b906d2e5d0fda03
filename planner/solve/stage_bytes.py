"""What the options of every stage hold at one moment, with the input of the last reduction above it.

A moment of stage e in backward may see the input of the last reduction, which is that of the nearest stage above e that
reduces anything: past stages that reduce nothing, as those of strategy `owner` do, it lives on.  So from e upwards
stages are quiet up to the one that was the last to reduce, and above that all are free:

    free     what an option holds
    last     the same, and the input of its reduction; infinite if it reduces nothing
    quiet    the same as free if it reduces nothing, infinite if it does

`free` of e and below, then `quiet` of none or more stages, `last` of one, and `free` of the others is what a plan
holds at the moment; if no stage above reduces, all of them are quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
T = TypeVar("T")
A = TypeVar("A", bound=NDArray[Any])


class StageBytes(NamedTuple):
    """Bytes of the options of one stage at a moment, or what they pay for them, shape (..., options)."""

    free: Array
    last: Array | None = None
    """None: the stage is not above the moment's, or above one that always reduces, or nothing is seen of it."""
    quiet: Array | None = None
    """None with `last`: every option reduces something."""

    @classmethod
    def above(cls, held: Array, reduces: Array, reduce_input: Array) -> StageBytes:
        """Return the bytes of a stage above the moment's, given what its options hold beside the input."""
        does = reduces > 0
        quiet = None if does.all() else np.where(does, np.inf, held)
        return cls(held, np.where(does, held + reduce_input, np.inf), quiet)


def payments(moments: Sequence[Sequence[StageBytes]], prices: Array) -> list[StageBytes]:
    """Return what the options of every stage pay for some moments together, at prices of shape (prices, moments).

    Equal stages share theirs.  Only the last of the moments may be one that sees the last reduction.
    """
    known = dict[tuple[int, ...], StageBytes]()
    found = list[StageBytes]()
    for rows in zip(*moments, strict=True):
        key = tuple(map(id, rows))
        if key not in known:
            *others, own = rows
            paid: Array = prices[:, :-1] @ np.array([row.free for row in others]) if others else np.zeros(1)
            last, quiet = (None if held is None else _paid(held, prices[:, -1:], paid) for held in own[1:])
            known[key] = StageBytes(_paid(own.free, prices[:, -1:], paid), last, quiet)
        found.append(known[key])
    return found


def _paid(held: Array, prices: Array, others: Array) -> Array:
    possible = np.isfinite(held)  # An option that is not possible stays so at price 0 too.
    paid: Array = np.where(possible, prices * np.where(possible, held, 0.0) + others, np.inf)
    return paid


def least_above(
    ways: Sequence[T | None], least: Callable[[T, A], A], rest: A | None, quiet: A | None
) -> tuple[A | None, A | None]:
    """Return the least seconds up to a stage, and those up to it if it and all down to the moment's are quiet.

    `ways` are of the stage, in the order of `StageBytes`; `least` gives the least seconds with one of them on top of
    others; `rest` and `quiet` are those below the stage.  None: there is no such plan.
    """
    free, last, silent = ways
    found = None if rest is None or free is None else least(free, rest)
    if quiet is None or last is None:
        return found, None
    ends = least(last, quiet)
    return ends if found is None else np.minimum(found, ends), None if silent is None else least(silent, quiet)
