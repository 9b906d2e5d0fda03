"""Lower bounds on what the lower part of a chain still costs, by the memory that is left for it.

A price of memory (`planner.solve.completion_bounds`) mixes options as if a part of a stage could take one and the rest
another.  Where one stage has to give up much time to save a little memory, such as the only one that is offloaded, that
is far below what any plan costs.  So here memory at one moment is a resource, and not priced: with q_i(k) what option k
of stage i holds at that moment above the least of its stage, in whole units, and g the units that are left,

    H_i(d, u, g) = min over options k with downward face d of  base_s(k, u) + lambda other_i(k)
                                                                  + Z_i(state of k, u; g - q_i(k))
    Z_j(s, g)    = min_d more_s(s, d) + H_(j-1)(d, upward face of s, g)                 infinite where g < 0

with memory at one other moment at a price lambda, or none.  Rounding q down only relaxes it.  Units are a part of
what all stages together may hold above the least, so the table is as fine as the limit is tight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.options.dominance import undominated_rows
from planner.solve.overlap_states import OverlapStates

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

UNITS = np.arange(128, 513)
"""Numbers of units, of which a table takes the one whose rounding loses least: up to one for each stage."""
ROUNDING = 1e-9
"""Part of a unit by which a quotient may be rounded up."""
SLACK_BYTES = 1.0
"""For the rounding of sums."""


class RoomTable:
    """Bounds for the labels of one chain, by what is left at one moment."""

    def __init__(
        self, states: Sequence[OverlapStates], rows: Sequence[Array], priced_s: Sequence[Array], room_bytes: float
    ) -> None:
        """`rows` are the bytes of every stage's options at the moment, `priced_s` what they pay for another moment."""
        kinds = {id(row): row for row in rows}
        least = {kind: float(row.min()) for kind, row in kinds.items()}
        self.least_below = [0.0]
        """Bytes that all completions add, by the number of stages that are not placed."""
        for row in rows:
            self.least_below.append(self.least_below[-1] + least[id(row)])
        self.room_bytes = room_bytes + SLACK_BYTES
        spare_bytes = max(self.room_bytes - self.least_below[-1], SLACK_BYTES)
        self.unit_bytes = spare_bytes / _units(
            [row - least[id(row)] for row in {id(row): row for row in rows}.values()], spare_bytes
        )
        units = round(spare_bytes / self.unit_bytes)
        self.least_s: list[Array] = []
        """Z of every stage, shape (states, units)."""
        pairs = dict[tuple[int, int, int], _Pairs]()
        below: Array | None = None
        for some, row, price_s in zip(states, rows, priced_s, strict=True):
            if below is None:
                rest = np.zeros((len(some.upward), units + 1))
            else:
                rest = np.full((len(some.upward), units + 1), np.inf)
                # Face by face: an array of all of them does not fit in the processor's cache.
                for more_s, least_s in zip(some.more_s.T, below, strict=True):
                    np.minimum(rest, more_s[:, None] + least_s[some.upward], out=rest)
            self.least_s.append(rest)
            key = id(some), id(row), id(price_s)
            if key not in pairs:
                pairs[key] = _Pairs(some, self._units(row - least[id(row)]), price_s)
            below = pairs[key].least_by_face(rest)

    def _units(self, held: Array) -> Indices:
        units = np.floor(held / self.unit_bytes - ROUNDING)
        found: Indices = np.maximum(units, 0.0).astype(np.intp)
        return found

    def seconds(self, index: int, state: Indices, held: Array) -> Array:
        """Return seconds that the stages below one add at least, with what they pay for the other moment; `state` and
        `held`, the bytes at the moment so far, are of labels that end there."""
        table = self.least_s[index]
        left = np.floor((self.room_bytes - self.least_below[index] - held) / self.unit_bytes)
        place = np.clip(left, 0, table.shape[1] - 1).astype(np.intp)
        found: Array = np.where(left < 0, np.inf, table[state, place])
        return found


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
        kept = undominated_rows(np.column_stack([same, -same, units, cost_s]).astype(float))
        # One pair of each face in the first layer, the second of each that has one in the next: `np.minimum.reduceat`
        # takes several times as long as a few minima of whole layers.
        kept = kept[np.argsort(face[kept], kind="stable")]
        starts = np.flatnonzero(np.diff(face[kept], prepend=-1))
        sizes = np.diff(starts, append=len(kept))
        largest_first = np.argsort(-sizes, kind="stable")
        self.place = np.argsort(largest_first)
        """Where the faces are in a layer, which has those of most pairs first."""
        layers = (kept[starts[largest_first[: (sizes > number).sum()]] + number] for number in range(sizes.max()))
        self.layers = [(state[one], units[one], cost_s[one, None]) for one in layers]

    def least_by_face(self, rest: Array) -> Array:
        """Return H of a stage, shape (downward faces, faces above, units), given its Z."""
        count = rest.shape[1]
        padded = np.concatenate([np.full((len(rest), count), np.inf), rest], axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(padded, count, axis=1)
        least = np.full((len(self.place), count), np.inf)
        for state, units, cost_s in self.layers:
            some = least[: len(state)]
            np.minimum(some, windows[state, count - np.minimum(units, count)] + cost_s, out=some)
        return least[self.place].reshape(-1, self.faces, count)
