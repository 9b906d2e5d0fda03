"""Imbalance: how long ranks wait for the slowest when micro-batches are not all alike.

Micro-batches of ranks are independent and cost X seconds of compute each, with mean 1 and distribution
function F.  Where the N ranks wait for each other in every micro-batch (any collective before or after a layer), each
takes as long as the slowest rank's; where they wait for each other once per step, the step takes as long as the
slowest sum of M micro-batches (David and Nagaraja, "Order Statistics", 2003, section 2.1):

    per_micro_batch = E[max of N draws of X] = int x d(F(x)^N)                         `_slowest`
    per_step        = the same of (X_1 + ... + X_M) / M

With a coefficient of variation c, X is log-normal: X = exp(sigma Z - sigma^2 / 2), sigma^2 = ln(1 + c^2),
and for N = 2 the integral is 2 Phi(sigma / sqrt(2)).  A sum of M is taken for log-normal with the
coefficient c / sqrt(M), which has its mean and variance (Fenton, "The sum of log-normal probability
distributions in scatter transmission systems", 1960, after Wilkinson).             `lognormal_slowest`

With lengths, a micro-batch of b samples costs the sum of b draws from them, a step that of b M.  The model
was traced with samples of full length, which the longest are taken to have: memory is that of b samples of full
length, and the mean micro-batch computes for `fill` = mean / longest of the seconds of one.  The
distribution of a sum of n draws is the n-fold convolution of the lengths' histogram: the n-th power of
its Fourier transform, on a grid about the mean.                                     `lengths_slowest`

Left out: groups that are smaller than the world wait for fewer ranks than this says, and
communication that would have been exposed can hide in the wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray

from planner.cost.balanced_waits import balanced_lengths, balanced_lognormal

Array = NDArray[np.float64]
Factor = Annotated[float, Ge(1), Lt(math.inf)]
Cells = tuple[tuple[float, float], ...]
"""A histogram: values, ascending, and the share that each has."""

MAX_CELLS = 4096
"""Cells that lengths are put into if there are more distinct ones."""
GRID = 1 << 14
"""Points of the grid of a sum of lengths: a few milliseconds."""
STEPS = 4000
"""Points of the quadrature of a log-normal maximum."""
REACH = 10.0
"""Standard deviations of the normal Z that the quadrature spans, and those of a sum on each side of its mean."""


@dataclass(frozen=True)
class Waits:
    """The slowest rank's compute time over the mean rank's."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    per_micro_batch: Factor = 1.0
    """If ranks wait for each other in every micro-batch."""
    per_step: Factor = 1.0
    """If they wait for each other once per step only."""
    source: str = ""
    """Description of where the imbalance comes from; empty if micro-batches are equal."""
    fill: Annotated[float, Gt(0), Le(1)] = 1.0
    """Compute time of the mean micro-batch over that of one whose samples have the model's full length."""

    @property
    def are_uneven(self) -> bool:
        """Whether synchronizing ranks in every micro-batch takes longer than once per step."""
        return self.per_micro_batch > self.per_step

    def factor(self, syncs: bool) -> float:
        """Return the factor, given whether ranks wait for each other in every micro-batch."""
        return self.per_micro_batch if syncs else self.per_step


NO_WAITS = Waits()


@dataclass(frozen=True)
class Imbalance:
    """The user's description of micro-batches: a coefficient of variation, or the lengths of samples."""

    variation: float = 0.0
    """Standard deviation of one micro-batch's compute time over its mean, whatever its size."""
    lengths: Cells = ()
    """Lengths of samples, in any unit (`histogram`), the longest being full; they take precedence over `variation`."""
    source: str = ""
    """Description of where that comes from; empty if micro-batches are equal."""
    balanced: bool = False
    """Whether the samples of a step are dealt to ranks by their cost (`planner.cost.balanced_waits`); with a
    `variation`, whole micro-batches are."""

    def waits(self, ranks: int, micro_batch: int, accumulation: int) -> Waits:
        """Return the waits of so many ranks at one workload."""
        if not self.lengths:
            per_step = lognormal_slowest(self.variation / math.sqrt(accumulation), ranks)
            found = Waits(lognormal_slowest(self.variation, ranks), per_step, self.source)
        else:
            found = Waits(
                lengths_slowest(self.lengths, micro_batch, ranks),
                lengths_slowest(self.lengths, micro_batch * accumulation, ranks),
                self.source,
                sum(length * share for length, share in self.lengths) / self.lengths[-1][0],
            )
        return self._dealt(found, ranks, micro_batch, accumulation) if self.balanced and ranks > 1 else found

    def _dealt(self, drawn: Waits, ranks: int, micro_batch: int, accumulation: int) -> Waits:
        """Return the waits of samples that are dealt by their cost, given those of samples as they are drawn."""
        if (micro_batch if self.lengths else 1) * accumulation == 1:  # a sample for each rank: nothing to deal
            return drawn
        if self.lengths:
            each, once = balanced_lengths(self.lengths, micro_batch, accumulation, ranks)
        else:
            each, once = balanced_lognormal(math.sqrt(math.log1p(self.variation**2)), accumulation, ranks)
        # Sums of the same numbers in another order; and dealing makes nothing worse.
        once = max(1.0, min(once, drawn.per_step))
        each = max(once, min(each, drawn.per_micro_batch))
        return replace(drawn, per_micro_batch=each, per_step=once)


BALANCED = Imbalance()


@lru_cache(maxsize=1024)
def lognormal_slowest(variation: float, ranks: int) -> float:
    """Return E[max] over ranks of a log-normal variable of mean 1 with that coefficient of variation."""
    if ranks == 1 or variation == 0:
        return 1.0
    sigma = math.sqrt(math.log1p(variation**2))
    # The mean is dominated by values about z = sigma, and the largest of many ranks lies beyond.
    edges: Array = np.linspace(-REACH, sigma + REACH, STEPS + 1)
    tails = np.array([0.5 * math.erfc(z / math.sqrt(2)) for z in edges])
    middles: Array = (edges[1:] + edges[:-1]) / 2
    return _slowest(np.exp(sigma * middles - sigma**2 / 2), tails, ranks)


@lru_cache(maxsize=1024)
def lengths_slowest(lengths: Cells, count: int, ranks: int) -> float:
    """Return E[max] over ranks of the sum of `count` draws from the lengths, in units of its mean."""
    if ranks == 1 or len(lengths) == 1:
        return 1.0
    values, shares = np.array(lengths, dtype=np.float64).T
    mean = float((values * shares).sum())
    deviation = math.sqrt(float(((values - mean) ** 2 * shares).sum()))
    reach = float(values[-1] - values[0])
    # A sum stays within count * reach; for many draws, a few extreme ones and REACH deviations are wide enough.
    width = min(count * reach, 4 * reach + 2 * REACH * deviation * math.sqrt(count))
    step = width / (GRID // 2)
    places, parts = np.divmod((values - mean) / step, 1.0)
    # A value between two grid points is divided between them so that the mean is preserved.
    below = places.astype(np.intp) % GRID
    one = np.bincount(below, shares * (1 - parts), GRID) + np.bincount((below + 1) % GRID, shares * parts, GRID)
    sums = np.fft.fftshift(np.fft.irfft(np.fft.rfft(one) ** count, GRID))
    tails: Array = np.concatenate([[1.0], np.clip(1 - np.cumsum(np.maximum(sums, 0.0)), 0.0, 1.0)])
    points = count * mean + step * np.arange(-GRID // 2, GRID // 2, dtype=np.float64)
    return max(1.0, _slowest(points, tails, ranks) / (count * mean))


def histogram(lengths: Iterable[float]) -> Cells:
    """Return the distinct lengths with their shares; if there are very many, the means of narrow cells."""
    values, counts = np.unique(np.fromiter(lengths, np.float64), return_counts=True)
    if len(values) > MAX_CELLS:
        cells = ((values - values[0]) / (values[-1] - values[0]) * (MAX_CELLS - 1)).astype(np.intp)
        sums, counts = np.bincount(cells, values * counts), np.bincount(cells, counts)
        values, counts = sums[counts > 0] / counts[counts > 0], counts[counts > 0]
    return tuple(zip(values.tolist(), (counts / counts.sum()).tolist(), strict=True))


def _slowest(points: Array, tails: Array, ranks: int) -> float:
    """Return the sum of points times the increments of F^N, given 1 - F before the first point and after each."""
    with np.errstate(divide="ignore"):  # where F is 0, its logarithm is minus infinity and F^N is 0
        above = -np.expm1(ranks * np.log1p(-tails))
    # Not a dot product: BLAS would start threads for it, which take longer.
    return float((points * (above[:-1] - above[1:])).sum())
