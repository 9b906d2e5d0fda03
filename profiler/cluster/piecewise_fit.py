"""Fits the time of a collective to its size: a line where that does, else two or three joined ones.

With knots 0 = k_0 < k_1 < .. < k_p at measured sizes, the time is

    t(S) = latency + sum_i slope_i * clip(S - k_(i-1), 0, k_i - k_(i-1))        (the last segment has no end)

with latency and slopes not negative: it is continuous and never falls, and it is not negative.  The
coefficients minimise the sum of ((t(S) - measured) / measured)^2, so that small tensors count as much as
large ones.  They are found exactly: the least-squares solution on some subset of the coefficients, the
others 0, is the constrained one, and there are at most 16 subsets.  Knots are found by trying all.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from profiler.cluster.measurements import FitSegment
from profiler.errors import OsdpError

MIN_POINTS = 3
"""Sizes that a fit needs: every two lie on a line."""
GOOD_RESIDUAL = 0.10
"""A fit with this largest residual or less gets no more segments."""
BAD_RESIDUAL = 0.20
"""A fit with a larger residual than this is bad."""
MAX_PIECES = 3

Array = NDArray[np.float64]


def fit(points: Sequence[tuple[float, float]], max_pieces: int = MAX_PIECES) -> tuple[tuple[FitSegment, ...], float]:
    """Return the fitted segments and the residual, the largest |fit - measured| / measured.

    Args:
        points: (bytes, seconds), each size once, in any order.
        max_pieces: 1 for a line whatever the residual.

    Raises:
        OsdpError: fewer than three points, a size twice, or a number that is not positive and finite.
    """
    sizes, seconds = _checked(points)
    best: tuple[tuple[FitSegment, ...], float] | None = None
    for pieces in range(1, max_pieces + 1):
        found = [_fit_with_knots(sizes, seconds, knots) for knots in _knots(len(sizes), pieces)]
        found = [one for one in found if _may_end_so(sizes, *one[1:])]
        if not found:
            break
        _, knots, coefficients = min(found, key=lambda one: one[0])
        residual = float(np.max(np.abs(_basis(sizes, knots) @ coefficients - seconds) / seconds))
        if best is None or residual < best[1]:
            best = _pieces(knots, coefficients), residual
        if best[1] <= GOOD_RESIDUAL:
            break
    assert best is not None, "one segment has no knots to choose"
    return best


def is_bad(residual: float) -> bool:
    """Whether a fit is too far off to plan with."""
    return residual > BAD_RESIDUAL


def describe(residual: float) -> str:
    """Return in words how good a fit is."""
    verdict = "bad" if is_bad(residual) else "good" if residual <= GOOD_RESIDUAL else "fair"
    return f"{verdict}: within {100 * residual:.3g} % of every measured time"


def _checked(points: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    """Return sizes, ascending, and seconds."""
    values = np.array(sorted(points), dtype=np.float64).reshape(-1, 2)
    given = ", ".join(f"{seconds:g} s at {size:g} bytes" for size, seconds in values) or "nothing"
    if not (np.isfinite(values).all() and (values > 0).all()):
        what, expected = "timings must be positive and finite", "sizes and seconds greater than 0"
        advice = "measure again, with larger sizes if the clock shows 0"
        raise OsdpError(what, got=given, expected=expected, advice=advice)
    if len(np.unique(values[:, 0])) < len(values):
        raise OsdpError("a size was given twice", got=given, expected="each size once, with its median")
    if len(values) < MIN_POINTS:
        expected = f"{MIN_POINTS} sizes or more: any two lie on a line"
        raise OsdpError("too few sizes for a fit", got=given, expected=expected, advice="measure more sizes")
    return values[:, 0], values[:, 1]


def _knots(count: int, pieces: int) -> Iterator[tuple[int, ...]]:
    """Yield the sizes (of `count`) that can be knots, with at least two points per segment."""
    if pieces == 1:
        yield ()
    elif count >= 2 * pieces:
        yield from combinations(range(1, count - 1), pieces - 1)


def _may_end_so(sizes: Array, knots: Sequence[float], coefficients: Array) -> bool:
    """Whether the last segment can be extrapolated: a flatter slope from only two points may be noise."""
    return not knots or knots[-1] < sizes[-2] or bool(coefficients[-1] >= coefficients[-2])


def _basis(sizes: Array, knots: Sequence[float]) -> Array:
    """Return the coefficients of latency and of each slope at each size: (sizes, 1 + segments)."""
    starts, ends = (0.0, *knots), (*knots, np.inf)
    columns = [np.clip(sizes - start, 0.0, end - start) for start, end in zip(starts, ends, strict=True)]
    return np.stack([np.ones_like(sizes), *columns], axis=1)


def _fit_with_knots(sizes: Array, seconds: Array, at: Sequence[int]) -> tuple[float, tuple[float, ...], Array]:
    """Return (sum of squared relative errors, knots in bytes, latency and slopes)."""
    knots = tuple(float(sizes[index]) for index in at)
    relative = _basis(sizes, knots) / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)  # Columns of like size keep the solution exact.
    error, coefficients = _non_negative_least_squares(relative / scale)
    return error, knots, coefficients / scale


def _non_negative_least_squares(matrix: Array) -> tuple[float, Array]:
    """Return the least |matrix x - 1|^2 over x >= 0, and that x."""
    count = matrix.shape[1]
    best = float(matrix.shape[0]), np.zeros(count)
    for subset in (some for size in range(1, count + 1) for some in combinations(range(count), size)):
        solution = np.linalg.lstsq(matrix[:, subset], np.ones(matrix.shape[0]), rcond=None)[0]
        if (solution < 0).any():
            continue
        error = float(np.sum((matrix[:, subset] @ solution - 1) ** 2))
        if error < best[0]:
            best = error, np.zeros(count)
            best[1][list(subset)] = solution
    return best


def _pieces(knots: Sequence[float], coefficients: Array) -> tuple[FitSegment, ...]:
    """Return the segments, each with its line's value at size 0."""
    latency_s, slopes = float(coefficients[0]), [float(slope) for slope in coefficients[1:]]
    pieces = []
    for start, slope, before in zip((0.0, *knots), slopes, (slopes[0], *slopes), strict=False):
        latency_s += (before - slope) * start
        pieces.append(FitSegment(start, latency_s, slope))
    return tuple(pieces)
