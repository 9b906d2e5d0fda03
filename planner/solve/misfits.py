"""Leaves out the options that no plan within the limit has, as some moment would hold too much whatever the others are.

At a moment e, with m_t(k) what option k of stage t holds, every plan with it holds at least

    fixed + sum over stages s of min m_s + m_t(k) - min m_t

An option of a class of stages is left out if that exceeds the limit at each stage of the class, at any moment there is;
what is left may have higher minima, so it is done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from planner.solve.lagrangian_bound import FAR_ABOVE, ChainBound, MemoryEvent

Fits = NDArray[np.bool_]
ROUNDS = 3
ROUNDING_BYTES = 1.0
"""Of sums over stages."""


def without_misfits(chain: ChainBound, limit_bytes: float) -> ChainBound | None:
    """Return the chain of the options that are left, the same one if all are; None if no plan fits."""
    for _ in range(ROUNDS):
        candidates = chain.candidates
        kept = [np.flatnonzero(fits).tolist() for fits in _fitting(chain, limit_bytes)]
        if not all(kept):
            return None
        if all(map(_is_whole, kept, candidates.options)):
            break
        chain = ChainBound(candidates.only(kept))
    return chain


def _is_whole(kept: list[int], options: Sequence[object]) -> bool:
    return len(kept) == len(options)


def _fitting(chain: ChainBound, limit_bytes: float) -> list[Fits]:
    """Return, for each class of stages, which of its options fit at one of its stages at least."""
    classes = chain.candidates.stage_classes
    fits = [np.ones(len(chain.candidates.options[stage_class]), dtype=bool) for stage_class in classes]
    for on_rank in chain.on_ranks:
        free_bytes = limit_bytes - on_rank.candidates.fixed_bytes + ROUNDING_BYTES
        _narrow_at_optimizer(fits, on_rank, free_bytes)
        _narrow_in_backward(fits, on_rank, free_bytes)
    of_class: list[list[Fits]] = [[] for _ in chain.candidates.options]
    for at, stage_class in zip(fits, classes, strict=True):
        of_class[stage_class].append(at)
    return [reduce(np.logical_or, found) for found in of_class]


def _narrow_at_optimizer(fits: Sequence[Fits], chain: ChainBound, free_bytes: float) -> None:
    """Mark the options that do not fit in the optimizer's step."""
    rows = list(map(_Row.of, chain.memory(MemoryEvent(None))))
    room_bytes = free_bytes - sum(row.least for row in rows)
    for at, row in zip(fits, rows, strict=True):
        row.narrow(at, room_bytes)


def _narrow_in_backward(fits: Sequence[Fits], chain: ChainBound, free_bytes: float) -> None:
    """Mark the options that do not fit at a moment of some stage's backward.

    What a stage holds at moments far from it does not depend on how far: sums of the minima of such stages are there
    before, and of all moments that are far from a stage the one with the least room counts.
    """
    classes, columns = chain.candidates.stage_classes, chain.candidates.columns
    known, count = dict[int, _Row](), len(classes)  # of arrays that the chain keeps

    def row_of(held: NDArray[np.float64]) -> _Row:
        if id(held) not in known:
            known[id(held)] = _Row.of(held)
        return known[id(held)]

    far = {relation: list(map(row_of, chain.far_memory(relation))) for relation in (-FAR_ABOVE, FAR_ABOVE)}
    sums = {relation: np.cumsum([0.0, *(row.least for row in rows)]) for relation, rows in far.items()}
    room = np.full(count, np.inf)
    """Of each stage's moments, the least."""
    for stage, stage_class in enumerate(classes):
        below, above = max(0, stage - FAR_ABOVE + 1), min(count, stage + FAR_ABOVE)
        far_bytes = sums[-FAR_ABOVE][below] + sums[FAR_ABOVE][count] - sums[FAR_ABOVE][above]
        for sees in columns[stage_class].highest:
            if not sees[0]:
                near = [(index, row_of(held)) for index, held in chain.near_memory(MemoryEvent(stage, sees))]
                room_bytes = free_bytes - far_bytes - sum(row.least for _, row in near)
                room[stage] = min(room[stage], room_bytes)
                for index, row in near:
                    row.narrow(fits[index], room_bytes)
    from_there, until_there = np.minimum.accumulate(room[::-1])[::-1], np.minimum.accumulate(room)
    for stage in range(count):
        if stage + FAR_ABOVE < count:
            far[-FAR_ABOVE][stage].narrow(fits[stage], from_there[stage + FAR_ABOVE])
        if stage >= FAR_ABOVE:
            far[FAR_ABOVE][stage].narrow(fits[stage], until_there[stage - FAR_ABOVE])


@dataclass(frozen=True)
class _Row:
    """What each option of a stage holds at a moment."""

    held: NDArray[np.float64]
    least: float
    most: float

    @classmethod
    def of(cls, held: NDArray[np.float64]) -> _Row:
        return cls(held, float(held.min()), float(held.max()))

    def narrow(self, fits: Fits, room_bytes: float) -> None:
        """Mark the options that hold more than the least by more than there is room."""
        if self.most - self.least > room_bytes:
            fits &= self.held - self.least <= room_bytes
