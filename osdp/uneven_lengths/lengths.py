"""Lengths of training samples: log-normal with a stated fit, or from the user's file.

With F the distribution of exp(N(ln median, sigma^2)), lengths are drawn from it *given that* they do not
exceed the maximum m: for u uniform in (0, 1],

    F^-1(u F(m)) = median exp(sigma Phi^-1(u F(m))),    rounded up                  `draw_lengths`

so that P(length <= k) = F(k) / F(m) for whole k, and quantile p is F^-1(p F(m))    `LogNormal.quantile`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from osdp.planning.imbalance_option import lengths_in
from profiler.errors import OsdpError

NORMAL = NormalDist()


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths, cut off at a maximum."""

    median: float
    """Median before the cut, in tokens."""
    sigma: float
    """Standard deviation of the logarithm before the cut; 0: all have the median, rounded up."""
    maximum: int
    """No sample is longer, in tokens."""

    def __post_init__(self) -> None:
        if self.maximum < 1:
            raise OsdpError("the longest sample is too short", got=f"{self.maximum} tokens", expected="at least 1")
        if not 0 < self.median <= self.maximum:
            expected = f"more than 0 and at most {self.maximum}, the longest"
            raise OsdpError("the median length is wrong", got=f"{self.median:g} tokens", expected=expected)
        if not 0 <= self.sigma < math.inf:
            raise OsdpError("the spread of lengths is wrong", got=f"sigma {self.sigma:g}", expected="at least 0")

    def quantile(self, share: float) -> float:
        """Return the length, not rounded, that a share (0 to 1) of the samples does not exceed."""
        if not self.sigma:
            return self.median
        within = share * NORMAL.cdf(math.log(self.maximum / self.median) / self.sigma)
        # Beyond this a normal distribution has less than doubles can tell from 0 and 1.
        z = NORMAL.inv_cdf(min(max(within, 1e-300), 1 - 1e-16))
        return min(self.median * math.exp(self.sigma * z), float(self.maximum))

    def scaled(self, maximum: int) -> LogNormal:
        """Return the same distribution with all lengths in proportion, for another maximum."""
        return LogNormal(self.median * maximum / self.maximum, self.sigma, maximum)


def fit_range(shortest: float, longest: int, share: float) -> LogNormal:
    """Return the log-normal whose middle `share` of samples lies from `shortest` to `longest`, cut off there."""
    half_width = math.log(longest / shortest) / 2
    return LogNormal(math.sqrt(shortest * longest), half_width / NORMAL.inv_cdf((1 + share) / 2), longest)


LONGALIGN = fit_range(8192, 65536, share=0.95)
"""LongAlign-like lengths: median 23170 tokens, sigma 0.53, at most 65536.

Bai et al. 2024 ("LongAlign", arXiv:2401.18058) publish that the 10,000 samples of LongAlign-10k have 8k to 64k tokens.
The fit takes that range for the middle 95 % of a log-normal.  The 95 % and the form are our assumption: the
samples themselves were not at hand, and nothing was fitted to them.
"""


def draw_lengths(distribution: LogNormal, count: int, rng: np.random.Generator) -> list[int]:
    """Return `count` independent lengths in whole tokens, at least 1; one number of `rng` makes one length."""
    return [max(1, math.ceil(distribution.quantile(1.0 - number))) for number in rng.random(count)]


def read_lengths(path: Path) -> list[int]:
    """Return the lengths in a file, one whole number of tokens in each line.

    Raises OsdpError if it cannot be read, is empty or has anything else in it.
    """
    lengths = lengths_in(path)
    odd = next((length for length in lengths if length != int(length)), None)
    if odd is not None:
        raise OsdpError(f"{path} has a length that is no number of tokens", got=f"{odd:g}", expected="whole numbers")
    return [int(length) for length in lengths]


def scale_lengths(lengths: Sequence[int], maximum: int) -> list[int]:
    """Return lengths in proportion, so that the longest has `maximum` tokens; as they are if none is longer."""
    longest = max(lengths)
    return list(lengths) if longest <= maximum else [max(1, length * maximum // longest) for length in lengths]
