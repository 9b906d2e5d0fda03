"""From measurements at a few micro-batches to quantities that grow with the micro-batch: `Affine`, or `Curve`.

With v(b) measured at the sizes b1 < b2 < b3, the line through the first two is checked at the third.  Where the three
are on no line, b4 is measured too: samples interact, as in a contrastive loss that compares all pairs of them, and

    v(b) = fixed + per_sample b + per_pair b^2

if the second differences of the four are equal and positive (they are counts of bytes and FLOPs, so exactly).  A peak
is a maximum over instants, and each instant is a curve of its own, so peaks are bounded by

    square = max_k square_k,    slope = max_k (slope_k + square_k - square),
    fixed = max_k (fixed_k + (slope_k + square_k - slope - square) b0)                   (`envelope`)

which is at least max_k curve_k(b) for every b >= b0 >= 1, since b^2 >= b.  Torch takes other ways at a micro-batch of 1
(a dimension of size 1 is contiguous whatever its stride), so that is measured too, and what it has more than the curve
is a part of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from profiler.affine import Affine, growth
from profiler.errors import OsdpError

SIZES = (2, 4, 6)
"""Micro-batches that give the lines."""
FOURTH = 8
"""Micro-batch that is measured where they give none; as far from the third as the others are from each other."""
SINGLE = 1
"""Micro-batch that is a case of its own; some models cannot run it (batch norm after pooling)."""
BEYOND = 33
"""Micro-batch that is measured where that at `SINGLE` is on no line, which may be one of steps that the others miss: of
half the samples, rounded down, they are 1, 2 and 3, as of 0.6 of them."""
ALL_SIZES = (*SIZES, SINGLE)
"""Order of all measurements where lines are found; the last may be missing."""
TOLERANCE = 0.005
"""Largest relative error of the line through the first two sizes at another."""
Sizes = Sequence[int]
"""Micro-batches that were measured: `SIZES`, perhaps `FOURTH`, perhaps `SINGLE`; or one alone, that the user fixed."""


class StepsError(OsdpError):
    """What a model computes or keeps is no polynomial of the micro-batch; at one that is fixed it is a number."""


def line(values: Sequence[float], sizes: Sizes = ALL_SIZES, *, add_bytes: float = 0.0) -> Affine:
    """Return a curve that is nowhere below `values`, plus `add_bytes`; exact if they are affine or quadratic."""
    fixed, slope, square, at_one = _curve(tuple(values), tuple(sizes))
    return growth(fixed + add_bytes, slope, square, at_one)


def exact_line(values: Sequence[float], what: str, sizes: Sizes = ALL_SIZES, *, add_bytes: float = 0.0) -> Affine:
    """Return `line(values)`, or raise StepsError if `what` grows in another way with the micro-batch."""
    found, growing = line(values, sizes, add_bytes=add_bytes), _growing(sizes)
    if len(growing) > 1:
        square = _square(values, sizes)
        first, second = (value - square * size**2 for value, size in zip(values[:2], growing, strict=False))
        slope = (second - first) / (growing[1] - growing[0])
        for value, size in list(zip(values, growing, strict=False))[2:]:
            expected = first + slope * (size - growing[0]) + square * size**2
            # A share that is rounded down has less beyond the others, which is no reason to refuse a model.
            if value - expected > TOLERANCE * value or (size != BEYOND and expected - value > TOLERANCE * value):
                raise StepsError(
                    f"{what} does not grow linearly with the micro-batch, nor with its square",
                    got=", ".join(f"{value:.6g} at {size}" for value, size in zip(values, growing, strict=False)),
                    expected=f"{expected:.6g} at {size}, from the first two",
                    advice="fix the micro-batch (--batch), at which alone it is measured then; or leave shapes "
                    "that depend on it in steps out of the model",
                )
    return found


def envelope(events: Sequence[Sequence[int]], sizes: Sizes = ALL_SIZES, *, add_bytes: float = 0.0) -> Affine:
    """Return a curve that bounds every instant's, from each size's live bytes at the same instants.

    Where the sizes ran different numbers of ops, instants cannot be matched; the maxima are fitted.
    """
    peaks = [max(instants, default=0) for instants in events]
    growing = tuple(_growing(sizes))
    count = len(growing)
    matched = events[:count]
    if len({len(instants) for instants in matched}) != 1:
        return line(peaks, sizes, add_bytes=add_bytes)
    curves = [_curve(values, growing)[:3] for values in zip(*matched, strict=True)]
    square = max((one[2] for one in curves), default=0.0)
    lines = [(fixed, slope + own - square) for fixed, slope, own in curves]
    slope = max((one for _, one in lines), default=0.0)
    smallest = min(growing) if len(events) > count else SINGLE
    fixed = max((fixed + (one - slope) * smallest for fixed, one in lines), default=0.0)
    return growth(fixed + add_bytes, slope, square, _beyond(peaks[count:], fixed + slope + square))


def _growing(sizes: Sizes) -> Sizes:
    """Return the sizes that give the curve."""
    return sizes if len(sizes) == 1 else [size for size in sizes if size != SINGLE]


def _square(values: Sequence[float], sizes: Sizes) -> float:
    """Return the part per pair of samples, 0 unless the values at the growing sizes are on a parabola that opens up."""
    if FOURTH not in sizes or len(sizes) == 1:
        return 0.0
    first, second, third, fourth = values[:4]
    bend = first - 2 * second + third
    return bend / (2 * (SIZES[1] - SIZES[0]) ** 2) if 0 < bend == second - 2 * third + fourth else 0.0


@lru_cache(maxsize=4096)  # the parts of a call, and its kinds of passes, share most instants
def _curve(values: tuple[float, ...], sizes: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Return (fixed, per sample, per pair, at one) of a curve that is nowhere below the values."""
    square, growing = _square(values, sizes), _growing(sizes)
    rest = [value - square * size**2 for value, size in zip(values, growing, strict=False)]
    rises = [(rest[i + 1] - rest[i]) / (growing[i + 1] - growing[i]) for i in range(len(growing) - 1)]
    slope = max(rises, default=0.0)
    fixed = max(value - slope * size for value, size in zip(rest, growing, strict=True))
    return fixed, slope, square, _beyond(values[len(growing) :], fixed + slope + square)


def _beyond(singles: Sequence[float], expected: float) -> float:
    """Return how much the value at `SINGLE`, where there is one, is above what is expected."""
    return max([0.0, *(value - expected for value in singles)])
