"""The few options of each class of stages that are best at some prices of time and memory: a core of the problem.

Where labels are too few for all options, they go far in this subset, as the core of a knapsack problem does (Balas and
Zemel, An algorithm for large zero-one knapsack problems, Operations Research 1980): plans are mostly of such options.
What is found is a plan like any other; nothing is proven.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.solve.label_memory import StageMemory
from planner.solve.lagrangian_bound import ChainBound

PRICES = 400
"""Sets of prices that are tried; each has one best option of each class."""
SMALLEST = np.exp(-7.0)
"""Of prices, against the largest."""


def core_of(chain: ChainBound) -> ChainBound:
    """Return the chain of the options that are the best of their class at some of a fixed sample of prices."""
    kept = [sorted({*mine}.union(*others)) for mine, *others in zip(*map(_best, chain.on_ranks), strict=True)]
    return ChainBound(chain.candidates.only(kept))


def _best(chain: ChainBound) -> list[list[int]]:
    """Return the options of each class that are the best at some prices."""
    draw, kept = np.random.default_rng(0), list[list[int]]()
    for stage_class, columns in enumerate(chain.candidates.columns):
        memory = StageMemory(columns, chain.load)
        context = next(context for context in chain.contexts if context[1] == stage_class)
        peak = np.where(np.isfinite(memory.backward_peak), memory.backward_peak, 0.0)
        prefetched = columns.prefetches * columns.prefetched
        held = (
            memory.passing,
            memory.backward,
            memory.resting,
            peak,
            memory.reduce_input,
            prefetched,
            memory.optimizer,
        )
        costs = _scaled(np.stack([chain.alone_s(context), *held], axis=1))
        prices = SMALLEST ** draw.uniform(size=(PRICES, costs.shape[1]))
        kept.append(sorted({*np.argmin(costs @ prices.T, axis=0).tolist()}))
    return kept


def _scaled(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return columns from 0 to 1."""
    least, most = costs.min(axis=0), costs.max(axis=0)
    scaled: NDArray[np.float64] = (costs - least) / np.where(most > least, most - least, 1.0)
    return scaled
