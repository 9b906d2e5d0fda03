"""Lower bounds on what the lower part of a chain still costs, by the memory that is left for it.

A price of memory (`planner.solve.completion_bounds`) mixes options as if a part of a stage could take one and the rest
another.  Where one stage has to give up much time to save a little memory, such as the only one that is offloaded, that
is far below what any plan costs.  So here memory at one moment is a resource, and not priced: with q_i(k) what option k
of stage i holds at that moment above the least of its stage, in whole units, and g the units that are left,

    H_i(d, u, g) = min over options k with downward face d of  base_s(k, u) + lambda other_i(k)
                                                                  + Z_i(state of k, u; g - q_i(k))
    Z_j(s, g)    = min_d more_s(s, d) + H_(j-1)(d, upward face of s, g)                 infinite where g < 0

with memory at other moments at prices lambda, or none.  Rounding q down only relaxes it.  Units are a part of what all
stages together may hold above the least, so the table is as fine as the limit is tight.

Where a moment sees the last reduction there is a second Z, of stages that are quiet down to the moment's, as in
`planner.solve.completion_bounds`.

Tables are in single precision, for half of the time.  No number is below zero, so with two sums of rounded numbers for
each stage, Z is at most (1 + u)^4n times what it should be, with u the unit roundoff: that is taken off again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.options.dominance import undominated_rows
from planner.solve.overlap_states import OverlapStates
from planner.solve.stage_bytes import StageBytes, least_above

Array = NDArray[np.float64]
Table = NDArray[np.float32]
Indices = NDArray[np.intp]

UNITS = np.arange(64, 257)
"""Numbers of units, of which a table takes the one whose rounding loses least: up to one for each stage."""
ROUNDING = 1e-9
"""Part of a unit by which a quotient may be rounded up."""
SLACK_BYTES = 1.0
"""For the rounding of sums."""


class RoomTable:
    """Bounds for the labels of one chain, by what is left at one moment."""

    def __init__(
        self,
        states: Sequence[OverlapStates],
        rows: Sequence[StageBytes],
        paid_s: Sequence[StageBytes],
        room_bytes: float,
    ) -> None:
        """`rows` are the bytes of every stage's options at the moment, `paid_s` what they pay for others, shape (1,
        options)."""
        kinds = {id(row): row.free for row in rows}
        least = {kind: float(held.min()) for kind, held in kinds.items()}
        self.least_below = [0.0]
        """Bytes that all completions add, by the number of stages that are not placed."""
        for row in rows:
            self.least_below.append(self.least_below[-1] + least[id(row)])
        self.room_bytes = room_bytes + SLACK_BYTES
        spare_bytes = max(self.room_bytes - self.least_below[-1], SLACK_BYTES)
        self.unit_bytes = spare_bytes / _units([held - least[kind] for kind, held in kinds.items()], spare_bytes)
        units = round(spare_bytes / self.unit_bytes)
        self.kept = 1.0 - 2.0 * (len(states) + 1) * float(np.finfo(np.float32).eps)
        """Part of a number of the tables that no plan is below."""
        self.least_s: list[Table | None] = []
        """Z of every stage, shape (states, units), as in `planner.solve.completion_bounds`."""
        self.quiet_s: list[Table | None] = []
        known = dict[tuple[int, int, int], list[_Pairs | None]]()
        below: Table | None = None
        quiet_below: Table | None = None
        for index, (some, row, pays) in enumerate(zip(states, rows, paid_s, strict=True)):
            rest = np.zeros((len(some.upward), units + 1), np.float32) if index == 0 else _least(some, below)
            quiet = _least(some, quiet_below)
            if index and _above(row, pays) and not _above(rows[index - 1], paid_s[index - 1]):
                rest, quiet = None, rest  # The stage below is the moment's.
            self.least_s.append(rest)
            self.quiet_s.append(quiet)
            key = id(some), id(row), id(pays)
            if key not in known:
                known[key] = [*self._pairs(some, row, pays, least[id(row)])]
            below, quiet_below = least_above(known[key], _Pairs.least_by_face, rest, quiet)

    def _pairs(
        self, states: OverlapStates, row: StageBytes, pays: StageBytes, least_bytes: float
    ) -> Iterator[_Pairs | None]:
        """Yield the pairs of a stage that is free, the last to reduce, and quiet."""
        for held, paid_s in zip(row, pays, strict=True):
            if held is None and paid_s is None:
                yield None
                continue
            held, paid_s = row.free if held is None else held, (pays.free if paid_s is None else paid_s)[0]
            possible = np.isfinite(held)
            units = self._units(np.where(possible, held, least_bytes) - least_bytes)
            yield _Pairs(states, units, np.where(possible, paid_s, np.inf))

    def _units(self, held: Array) -> Indices:
        units = np.floor(held / self.unit_bytes - ROUNDING)
        found: Indices = np.maximum(units, 0.0).astype(np.intp)
        return found

    def seconds(
        self, index: int, state: Indices, held: Array, pending: Array | float, pending_s: Array | float
    ) -> Array:
        """Return seconds that the stages below one add at least, with what they pay for other moments.

        `state` and `held`, the bytes at the moment so far, are of labels that end there; `pending` and `pending_s` are
        what their last reduction adds to that, and pays for others, if the stages below are quiet.
        """
        found = self._seconds(self.least_s[index], index, state, held)
        if self.quiet_s[index] is not None:
            np.minimum(found, self._seconds(self.quiet_s[index], index, state, held + pending) + pending_s, out=found)
        return found

    def _seconds(self, table: Table | None, index: int, state: Indices, held: Array) -> Array:
        if table is None:
            return np.full(len(state), np.inf)
        left = np.floor((self.room_bytes - self.least_below[index] - held) / self.unit_bytes)
        most = table.shape[1] - 1
        found: Array = self.kept * table[state, np.clip(left, 0, most).astype(np.intp)].astype(np.float64)
        found[left < 0] = np.inf
        found[left > most] = -np.inf  # The table ends at what is left if stages above held their least.
        return found


def _above(row: StageBytes, pays: StageBytes) -> bool:
    """Whether a moment sees the stage's reduction."""
    return row.last is not None or pays.last is not None


def _least(states: OverlapStates, below: Table | None) -> Table | None:
    """Return Z of a stage, given H of the one below; None if there is none."""
    if below is None:
        return None
    rest = np.full((len(states.upward), below.shape[2]), np.inf, np.float32)
    # Face by face: an array of all of them does not fit in the processor's cache.
    for more_s, least_s in zip(states.more_s.T.astype(np.float32), below, strict=True):
        np.minimum(rest, more_s[:, None] + least_s[states.upward], out=rest)
    return rest


def _units(rows: Sequence[Array], spare_bytes: float) -> int:
    """Return the number of units with which the options of all stages, in the mean, lose the least."""
    unit_bytes = spare_bytes / UNITS
    held = np.concatenate(rows)[:, None]
    lost = held - np.floor(held / unit_bytes - ROUNDING) * unit_bytes
    return int(UNITS[np.argmin(lost[(held < spare_bytes)[:, 0]].mean(axis=0))])


class _Pairs:
    """Pairs of an option and a face above it; those of one state and downward face that no other is better than."""

    def __init__(self, states: OverlapStates, units: Indices, price_s: Array) -> None:
        self.faces = states.base_s.shape[1]
        face = (states.downward_of[:, None] * self.faces + np.arange(self.faces)).reshape(-1)
        state, units = states.of.reshape(-1), np.repeat(units, self.faces)
        cost_s = (states.base_s + price_s[:, None]).reshape(-1)
        same = face * len(states.upward) + state
        (possible,) = np.nonzero(np.isfinite(cost_s))
        rows = np.column_stack([same, -same, units, cost_s])[possible].astype(float)
        kept = possible[undominated_rows(rows)] if len(possible) else possible
        # One pair of each face in the first layer, the second of each that has one in the next: `np.minimum.reduceat`
        # takes several times as long as a few minima of whole layers.
        kept = kept[np.argsort(face[kept], kind="stable")]
        starts = np.flatnonzero(np.diff(face[kept], prepend=-1))
        sizes = np.diff(starts, append=len(kept))
        largest_first = np.argsort(-sizes, kind="stable")
        self.present = face[kept[starts[largest_first]]]
        """The faces of a layer, those of most pairs first."""
        self.downward = int(states.downward_of.max()) + 1
        most = sizes.max(initial=0)
        layers = (kept[starts[largest_first[: (sizes > number).sum()]] + number] for number in range(most))
        self.layers = [(state[one], units[one], cost_s[one, None].astype(np.float32)) for one in layers]

    def least_by_face(self, rest: Table) -> Table:
        """Return H of a stage, shape (downward faces, faces above, units), given its Z."""
        count = rest.shape[1]
        padded = np.concatenate([np.full((len(rest), count), np.inf, np.float32), rest], axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(padded, count, axis=1)
        least = np.full((self.downward * self.faces, count), np.inf, np.float32)
        found = np.full((len(self.present), count), np.inf, np.float32)
        for state, units, cost_s in self.layers:
            some = found[: len(state)]
            np.minimum(some, windows[state, count - np.minimum(units, count)] + cost_s, out=some)
        least[self.present] = found
        return least.reshape(self.downward, self.faces, count)
