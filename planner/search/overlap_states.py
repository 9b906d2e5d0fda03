"""What the stages below can tell of the lowest stage that has its option, given those above it: a state.

A stage adds to the step (`planner.cost.step_time`)

    alone_s(k) + windows(k, u, d)        u the upward face of the stage above, d the downward face of the one below

and d is not known while stages are placed from the top down.  So the sum splits into what is certain and the rest

    base_s(k, u)     = alone_s(k) + min_d windows(k, u, d)
    more_s(state, d) = windows(k, u, d) - min_d windows(k, u, d)

where (k, u) are one state if they agree in more_s for every d and in the upward face that the stage below sees of k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from planner.search.lagrangian_bound import ChainBound

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

SAME_S = 1e-12
"""Seconds in which two states may differ: rounding of sums."""


@dataclass(frozen=True)
class OverlapStates:
    """The states of one class of stages between two others."""

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

    @classmethod
    def of_stage(cls, chain: ChainBound, index: int) -> OverlapStates:
        """Return the states of a stage of a chain."""
        above, stage_class, below = chain.places[index]
        faces, windows = chain.faces[stage_class], chain.table(above, stage_class, below)
        options, above_faces, below_faces = windows.shape
        least = windows.min(axis=2)
        more = np.round((windows - least[:, :, None]) / SAME_S) * SAME_S
        upward = np.repeat(faces.upward_of, above_faces)
        rows = np.column_stack([more.reshape(-1, below_faces), upward])
        distinct, of = np.unique(rows, axis=0, return_inverse=True)
        return cls(
            of=of.reshape(options, above_faces),
            base_s=least + chain.alone_s(index)[:, None],
            more_s=distinct[:, :below_faces],
            upward=distinct[:, below_faces].astype(np.intp),
            downward_of=faces.downward_of,
        )


class ChainStates:
    """The states of all stages of a chain; stages between equal neighbours share them."""

    def __init__(self, chain: ChainBound) -> None:
        self.chain = chain
        of_place = cache(lambda place: OverlapStates.of_stage(chain, chain.places.index(place)))
        self.states = [of_place(place) for place in chain.places]

    def worse_s(self, index: int, some: Indices) -> Array:
        """Return by how many seconds at most a completion costs more from one state than from another.

        `some` are states of a stage above another; the shape of the result is (from, than).
        """
        states, below = self.states[index], self.chain.table(*self.chain.places[index - 1])
        upward, faces = np.unique(states.upward[some], return_inverse=True)
        seen = below[:, upward].transpose(1, 0, 2).reshape(len(upward), -1)
        by_face = np.array([(row - seen).max(axis=1) for row in seen])
        more = states.more_s[some]
        by_window = np.array([(row - more).max(axis=1) for row in more])
        worse: Array = by_window + by_face[np.ix_(faces, faces)]
        return worse
