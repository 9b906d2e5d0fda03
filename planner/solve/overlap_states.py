"""What the options of a stage tell its neighbours, and what the stages below can tell of the lowest stage that has its
option, given those above it: a state.

A stage adds to the step (`planner.cost.step_time`)

    alone_s(k) + windows(k, u, d)        u the upward face of the stage above, d the downward face of the one below

where the upward face of an option is what the stage above sees of it (the gather before its forward, its reduction)
and the downward face what the stage below sees (the gather before its backward); d is not known while stages are placed
from the top down.  So the sum splits into what is certain and the rest

    base_s(k, u)     = alone_s(k) + min_d windows(k, u, d)
    more_s(state, d) = windows(k, u, d) - min_d windows(k, u, d)

where (k, u) are one state if they agree in more_s for every d and in the upward face that the stage below sees of k.
There are far fewer states than pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.workload import Workload
from planner.options.overlap_terms import OverlapTerms

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

SAME_S = 1e-12
"""Seconds in which two states may differ, and which a bound loses for each stage: rounding of sums."""


@dataclass(frozen=True)
class Faces:
    """The options of one class of stages as arrays over options k."""

    upward: Array
    """Distinct (first gather, reduce-scatter, all-reduce), one row each."""
    upward_of: Indices
    """For each option, its row in `upward`."""
    downward: Array
    """Distinct gathers before backward."""
    downward_of: Indices
    windows: Array
    """The numbers of `planner.cost.step_time.OverlapTerms`, shape (options, numbers)."""
    turn_s: Array
    """What its forward does not hide of the gather before its backward, if it is the last stage."""


_FORWARD, _TOP, _TOP_GATHER, _BOTTOM, _SINGLE = (
    OverlapTerms._fields.index(name) for name in ("forward_s", "top_s", "top_gather_s", "bottom_s", "single")
)
INNER = OverlapTerms._fields.index("inner_s")
UPWARD = [OverlapTerms._fields.index(name) for name in ("first_gather_s", "reduce_s", "all_reduce_s")]
_DOWNWARD = OverlapTerms._fields.index("last_gather_s")
_BOTTOM_REDUCE, _BOTTOM_ALL_REDUCE, _TOP_COPY, _BOTTOM_COPY = (
    OverlapTerms._fields.index(name)
    for name in ("bottom_reduce_s", "bottom_all_reduce_s", "top_copy_s", "bottom_copy_s")
)


def faces_of(windows: Array) -> Faces:
    """Return the faces of the options of one class, given their terms."""
    upward, upward_of = np.unique(windows[:, UPWARD], axis=0, return_inverse=True)
    downward, downward_of = np.unique(windows[:, _DOWNWARD], return_inverse=True)
    turn_s = np.maximum(windows[:, _DOWNWARD] - windows[:, _FORWARD], 0.0)
    return Faces(upward, upward_of.reshape(-1), downward, downward_of, windows, turn_s)


def edges_s(faces: Faces, above: Array, below: Array, load: Workload) -> Array:
    """Return the seconds of the terms at the edges, shape (options, faces above, faces below)."""
    numbers = faces.windows[:, :, None, None]
    gather, single = below[None, None, :], numbers[:, _SINGLE] > 0
    own_gather = np.maximum(np.where(single, gather, numbers[:, _TOP_GATHER]), numbers[:, _TOP_COPY])
    copied = numbers[:, _BOTTOM_COPY]
    total = load.accumulation * np.maximum(numbers[:, _FORWARD], above[None, :, :1])
    for last, times in load.passes:
        top = np.maximum(numbers[:, _TOP], above[None, :, 1, None] + own_gather)
        bottom = np.maximum(numbers[:, _BOTTOM], numbers[:, _BOTTOM_REDUCE] + np.maximum(gather, copied))
        if last:
            top = np.maximum(top, above[None, :, 2, None])
            bottom = np.maximum(bottom, numbers[:, _BOTTOM_ALL_REDUCE])
        total = total + times * (top + np.where(single, 0.0, bottom))
    return total


@dataclass(frozen=True)
class OverlapStates:
    """The states of one class of stages between two others, by upward face."""

    of: Indices
    """The state of (option, upward face of the stage above)."""
    base_s: Array
    """The least seconds of the same."""
    more_s: Array
    """Seconds on top, shape (states, downward faces of the stage below)."""
    upward: Indices
    """Upward face of each state."""
    downward_of: Indices
    """Downward face of each option, which the stage above sees."""
    option: Indices
    """Option of each pair with an upward face of the stage above, by state."""
    pair_faces: Indices
    """Number of (upward face of the stage above, downward face of the option) of each pair."""
    pair_s: Array
    """The least seconds of each pair."""
    starts: Indices
    """Where the pairs of each state start."""
    upward_starts: Indices
    """The first state of each upward face."""

    @classmethod
    def of_stage(cls, faces: Faces, alone_s: Array, windows: Array) -> OverlapStates:
        """Return the states; `windows` are the terms at the edges (`edges_s`), `alone_s` is of each option."""
        options, above_faces, below_faces = windows.shape
        least = windows.min(axis=2)
        more = np.floor((windows - least[:, :, None]) / SAME_S).reshape(-1, below_faces)
        upward = np.repeat(faces.upward_of, above_faces)
        first, of = distinct(np.column_stack([upward, more]))
        order = np.argsort(of, kind="stable")
        option, above = np.divmod(order, above_faces)
        base_s = least + alone_s[:, None]
        return cls(
            of=of.reshape(options, above_faces),
            base_s=base_s,
            more_s=more[first] * SAME_S,
            upward=upward[first],
            downward_of=faces.downward_of,
            option=option,
            pair_faces=above * len(faces.downward) + faces.downward_of[option],
            pair_s=base_s.reshape(-1)[order],
            starts=np.searchsorted(of[order], np.arange(len(first))),
            upward_starts=np.searchsorted(upward[first], np.arange(len(faces.upward))),
        )

    def least_by_state(self, value: Array | None, paid_s: Array) -> Array:
        """Return the least cost of every state but for what the face below adds, shape (prices, states).

        `value` is V of the stage above, shape (prices, faces above, downward faces), None at the end of the chain;
        `paid_s` is what options pay for memory, shape (prices, options).
        """
        cost: Array = paid_s.take(self.option, axis=1)
        cost += self.pair_s
        if value is not None:
            cost += value.reshape(len(value), -1).take(self.pair_faces, axis=1)
        found: Array = np.minimum.reduceat(cost, self.starts, axis=1)
        return found

    def least_below(self, value: Array | None, paid_s: Array) -> Array:
        """Return V of the stage, given that of the stage above and what its options pay (`least_by_state`)."""
        return self.least_by_face(self.least_by_state(value, paid_s))

    @cached_property
    def _more_by_face(self) -> Array:
        """`more_s` by faces first, in one piece."""
        return np.ascontiguousarray(self.more_s.T)

    def least_by_face(self, least: Array) -> Array:
        """Return the least cost by upward face and face below, shape (prices, faces, faces), of one for each state."""
        by_face = least[:, None, :] + self._more_by_face
        found: Array = np.minimum.reduceat(by_face, self.upward_starts, axis=2).transpose(0, 2, 1)
        return found

    def least_above(self, below: Array | None) -> Array | None:
        """Return what the stages below cost at least for every state, shape (prices, states), given `least_by_pair` of
        the stage below; None if there is none."""
        if below is None:
            return None
        found: Array = (self.more_s.T[None] + below[:, :, self.upward]).min(axis=1)
        return found

    @cached_property
    def _by_pair(self) -> tuple[Indices, Indices, Array, Indices]:
        """State, option and base seconds of each pair of an option and a face above, by (downward face, face above),
        and where each of those starts."""
        above_faces = self.of.shape[1]
        key = (self.downward_of[:, None] * above_faces + np.arange(above_faces)).reshape(-1)
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))
        return self.of.reshape(-1)[order], order // above_faces, self.base_s.reshape(-1)[order], starts

    def least_by_pair(self, paid_s: Array, rest_s: Array) -> Array:
        """Return the least cost of the stages up to this one, shape (prices, downward faces, faces above).

        `rest_s` is what the stages below cost at least, shape (prices, states); `paid_s` as in `least_by_state`.
        """
        state, option, base_s, starts = self._by_pair
        cost = rest_s.take(state, axis=1)
        cost += base_s
        cost += paid_s.take(option, axis=1)
        found: Array = np.minimum.reduceat(cost, starts, axis=1)
        return found.reshape(len(found), -1, self.of.shape[1])


def distinct(rows: Array) -> tuple[Indices, Indices]:
    """Return where the first of equal rows is, by rising first column, and for each row the number of its first."""
    # Sorting one number for each row takes a tenth of the time that sorting rows does.
    weights = np.modf(np.arange(1, rows.shape[1] + 1) * 0.6180339887498949)[0]
    weights[0] = 0.0
    key = rows @ weights
    order = np.lexsort((key, rows[:, 0]))
    is_new = np.ones(len(rows), dtype=bool)
    is_new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    of = np.empty(len(rows), dtype=np.intp)
    of[order] = np.cumsum(is_new) - 1
    return order[is_new], of
