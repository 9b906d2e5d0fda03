"""Leaves out the options that no plan within the limit has, as some moment would hold too much whatever the others are.

At a moment e, with m_t(k) what option k of stage t holds, every plan with it holds at least

    fixed + sum over stages s of min m_s + m_t(k) - min m_t

An option of a class of stages is left out if that exceeds the limit at each stage of the class, at any moment there is;
what is left may have higher minima, so it is done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from planner.options.candidate_set import CandidateSet
from planner.solve.lagrangian_bound import ChainBound, MemoryEvent

MOST_STAGES = 128
"""Of longer chains none is left out: it takes time that grows with the square of the stages."""
ROUNDS = 3
ROUNDING_BYTES = 1.0
"""Of sums over stages."""


def without_misfits(chain: ChainBound, limit_bytes: float) -> ChainBound | None:
    """Return the chain of the options that are left, the same one if all are; None if no plan fits."""
    for _ in range(ROUNDS if len(chain.candidates.stage_classes) <= MOST_STAGES else 0):
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


def _fitting(chain: ChainBound, limit_bytes: float) -> list[NDArray[np.bool_]]:
    """Return, for each class of stages, which of its options fit at one of its stages at least."""
    candidates = chain.candidates
    fits = [np.ones(len(candidates.options[c]), dtype=bool) for c in candidates.stage_classes]
    for on_rank in chain.on_ranks:
        ends = dict[int, tuple[float, float]]()  # of rows, which the chain keeps
        for event in _events(on_rank.candidates):
            rows = on_rank.memory(event)
            for row in rows:
                if id(row) not in ends:
                    ends[id(row)] = float(row.min()), float(row.max())
            least_bytes = sum(ends[id(row)][0] for row in rows)
            room_bytes = limit_bytes - on_rank.candidates.fixed_bytes - least_bytes + ROUNDING_BYTES
            for at, row in zip(fits, rows, strict=True):
                least, most = ends[id(row)]
                if most - least > room_bytes:
                    at &= row - least <= room_bytes
    of_class: list[list[NDArray[np.bool_]]] = [[] for _ in candidates.options]
    for at, stage_class in zip(fits, candidates.stage_classes, strict=True):
        of_class[stage_class].append(at)
    return [reduce(np.logical_or, found) for found in of_class]


def _events(candidates: CandidateSet) -> Iterator[MemoryEvent]:
    """Yield every moment of every stage's backward, and the optimizer step."""
    yield MemoryEvent(None)
    for stage, stage_class in enumerate(candidates.stage_classes):
        yield from (MemoryEvent(stage, sees) for sees in candidates.columns[stage_class].highest if not sees[0])
