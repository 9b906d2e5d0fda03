"""How long ranks wait where the samples of a step are dealt to them by their cost.

There is no closed form, so steps are made and dealt as `osdp.uneven_lengths.balanced_batches` does it, by the same
`planner.cost.balanced_sets.split_step` with batches of equal sizes.  With c_rj the cost of micro-batch j of rank r,

    per_micro_batch = sum over steps and j of max over r of c_rj / (sum of all c_rj / N)
    per_step        = sum over steps of max over r of sum over j of c_rj / (the same)          `balanced_slowest`

The costs of all samples made are the distribution's quantiles at equal distances, in an order that is always the
same: all that is left to chance is which of them meet in a step.  A step with more than `MOST_IN_STEP` samples is given
fewer in each micro-batch, which balance no better.
"""

from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from planner.cost.balanced_sets import split_step

SAMPLES = 8192
"""Samples that are made, in as many steps as they fill."""
MOST_IN_STEP = 4096

Array = NDArray[np.float64]


@lru_cache(maxsize=1024)
def balanced_lengths(
    lengths: tuple[tuple[float, float], ...], micro_batch: int, accumulation: int, ranks: int
) -> tuple[float, float]:
    """Return the factors of one micro-batch and of one step, for lengths with the share that each has."""
    values, shares = np.array(lengths, dtype=np.float64).T

    def quantiles(at: Array) -> Array:
        found: Array = values[np.minimum(np.searchsorted(np.cumsum(shares), at), len(values) - 1)]
        return found

    return balanced_slowest(quantiles(_places(micro_batch, accumulation, ranks)), micro_batch, accumulation, ranks)


@lru_cache(maxsize=1024)
def balanced_lognormal(sigma: float, accumulation: int, ranks: int) -> tuple[float, float]:
    """Return the factors for micro-batches that are dealt whole, log-normal with that deviation of the logarithm."""
    places = _places(1, accumulation, ranks)
    normal = NormalDist()
    costs: Array = np.exp(sigma * np.array([normal.inv_cdf(place) for place in places.tolist()]))
    return balanced_slowest(costs, 1, accumulation, ranks)


def balanced_slowest(costs: Array, micro_batch: int, accumulation: int, ranks: int) -> tuple[float, float]:
    """Return the factors for steps that have these costs in turn; what fills no step is left out."""
    in_step = _in_step(micro_batch, accumulation, ranks)
    steps = np.random.default_rng(0).permutation(costs)[: len(costs) // in_step * in_step].reshape(-1, in_step)
    each_micro_batch, each_step = 0.0, 0.0
    for step in steps.tolist():
        dealt = [[sum(step[i] for i in batch) for batch in own] for own in split_step(step, ranks, accumulation)]
        each_micro_batch += sum(map(max, zip(*dealt, strict=True)))
        each_step += max(map(sum, dealt))
    mean = float(steps.sum()) / ranks
    return each_micro_batch / mean, each_step / mean


def _in_step(micro_batch: int, accumulation: int, ranks: int) -> int:
    """Return how many samples are dealt in a step that is made."""
    batches = accumulation * ranks
    return batches * max(1, min(micro_batch, MOST_IN_STEP // batches))


def _places(micro_batch: int, accumulation: int, ranks: int) -> Array:
    """Return the shares of samples below each that is made, for whole steps of them."""
    in_step = _in_step(micro_batch, accumulation, ranks)
    count = max(1, SAMPLES // in_step) * in_step
    places: Array = (np.arange(count) + 0.5) / count
    return places
