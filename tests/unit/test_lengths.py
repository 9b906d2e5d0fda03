"""Lengths of samples: drawn as the closed form says, fitted as stated, read from files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from osdp.uneven_lengths.lengths import LONGALIGN, LogNormal, draw_lengths, fit_range, read_lengths, scale_lengths
from profiler.errors import OsdpError


def phi(x: float) -> float:
    """Return the standard normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


@pytest.mark.parametrize(("median", "sigma", "maximum"), [(50, 1.0, 10**9), (50, 1.0, 80), (23170, 0.53, 65536)])
def test_draws_follow_the_closed_form(median: float, sigma: float, maximum: int) -> None:
    distribution = LogNormal(median, sigma, maximum)
    drawn = np.array(draw_lengths(distribution, 20_000, np.random.default_rng(3)))
    assert drawn.max() <= maximum
    assert drawn.min() >= 1
    for length in (median / 4, median / 2, median, 1.4 * median):
        whole = math.floor(length)
        wanted = phi(math.log(whole / median) / sigma) / phi(math.log(maximum / median) / sigma)
        # Four standard deviations of a binomial share are under 0.015.
        assert np.mean(drawn <= whole) == pytest.approx(wanted, abs=0.015)


def test_quantiles_by_hand() -> None:
    # Without a cut that is felt: one standard deviation up is a factor of e^sigma, Phi(1) = 0.8413447.
    wide = LogNormal(100, 0.5, 10**9)
    assert wide.quantile(0.5) == pytest.approx(100)
    assert wide.quantile(0.8413447460685429) == pytest.approx(100 * math.exp(0.5))
    # Cut at the median only the lower half is left, whose median is the lower quartile, z = -0.6744898.
    halved = LogNormal(100, 1.0, 100)
    assert halved.quantile(0.5) == pytest.approx(100 * math.exp(-0.6744897501960817))
    assert halved.quantile(1.0) == pytest.approx(100)
    assert draw_lengths(LogNormal(12.5, 0, 20), 3, np.random.default_rng(0)) == [13, 13, 13]


def test_the_same_seed_gives_the_same_lengths() -> None:
    first, again, other = (draw_lengths(LONGALIGN, 5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_longalign_is_the_stated_fit() -> None:
    """8k and 64k are 2.5 % and 97.5 %: z = 1.959964 standard deviations from the middle in the logarithm."""
    assert LONGALIGN.median == pytest.approx(math.sqrt(8192 * 65536))
    assert LONGALIGN.median * math.exp(-1.959964 * LONGALIGN.sigma) == pytest.approx(8192, rel=1e-6)
    assert LONGALIGN.median * math.exp(1.959964 * LONGALIGN.sigma) == pytest.approx(65536, rel=1e-6)
    assert LONGALIGN.maximum == 65536
    assert fit_range(1, 100, 0.5).median == pytest.approx(10)


def test_scaling_keeps_the_shape() -> None:
    small = LONGALIGN.scaled(256)
    assert (small.maximum, small.sigma) == (256, LONGALIGN.sigma)
    for share in (0.1, 0.5, 0.9):
        assert small.quantile(share) == pytest.approx(LONGALIGN.quantile(share) / 256)
    assert scale_lengths([10, 400, 3], 100) == [2, 100, 1]
    assert scale_lengths([10, 100], 100) == [10, 100]


@pytest.mark.parametrize(
    ("median", "sigma", "maximum"), [(0, 1, 10), (11, 1, 10), (5, -1, 10), (5, math.nan, 10), (5, 1, 0)]
)
def test_bad_distributions_are_refused(median: float, sigma: float, maximum: int) -> None:
    with pytest.raises(OsdpError):
        LogNormal(median, sigma, maximum)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n\n 17 \n1e3\n")
    assert read_lengths(path) == [5, 17, 1000]
    for text, said in (("", "no lengths"), ("5\nsix\n", "line 2"), ("5\n0\n", "line 2"), ("5.5\n", "whole numbers")):
        path.write_text(text)
        with pytest.raises(OsdpError, match=said):
            read_lengths(path)
