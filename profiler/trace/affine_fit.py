"""From measurements at a few micro-batches to `Affine` quantities.

With v(b) measured at the sizes b1 < b2 < b3, the line through the first two is checked at the third.
A peak is a maximum over instants, and each instant is a line of its own, so peaks are bounded by

    slope = max_k slope_k,    fixed = max_k (fixed_k + slope_k - slope)        (`envelope`)

which is at least max_k line_k(b) for every b >= 1.  Torch takes other ways at a micro-batch of 1 (a
dimension of size 1 is contiguous whatever its stride), so that is measured too and lifts the line
where it lies higher.
"""

from __future__ import annotations

from collections.abc import Sequence

from profiler.errors import OsdpError
from profiler.model_graph import Affine

SIZES = (2, 4, 6)
"""Micro-batches that give the lines."""
SINGLE = 1
"""Micro-batch that may only lift them; some models cannot run it (batch norm after pooling)."""
ALL_SIZES = (*SIZES, SINGLE)
"""Order of all measurements; the last may be missing."""
TOLERANCE = 0.005
"""Largest relative error of the line at the third size."""


def line(values: Sequence[float], *, add_bytes: float = 0.0) -> Affine:
    """Return a line that is nowhere below `values`, plus `add_bytes`; exact if they are affine."""
    slope = max((values[i + 1] - values[i]) / (SIZES[i + 1] - SIZES[i]) for i in range(len(SIZES) - 1))
    fixed = max(value - slope * size for value, size in zip(values, ALL_SIZES, strict=False))
    return Affine(fixed + add_bytes, slope)


def exact_line(values: Sequence[float], what: str, *, add_bytes: float = 0.0) -> Affine:
    """Return `line(values)`, or raise OsdpError if `what` does not grow linearly with the micro-batch."""
    slope = (values[1] - values[0]) / (SIZES[1] - SIZES[0])
    expected = values[0] + slope * (SIZES[2] - SIZES[0])
    if abs(values[2] - expected) > TOLERANCE * abs(values[2]):
        raise OsdpError(
            f"{what} does not grow linearly with the micro-batch",
            got=", ".join(f"{value:.6g} at {size}" for value, size in zip(values, SIZES, strict=False)),
            expected=f"{expected:.6g} at {SIZES[2]}, from the first two",
            advice="samples must not interact (as in a contrastive loss across the batch), and shapes "
            "must not depend on the micro-batch in steps; trace the model without that part",
        )
    return line(values, add_bytes=add_bytes)


def envelope(events: Sequence[Sequence[int]], *, add_bytes: float = 0.0) -> Affine:
    """Return a line that bounds every instant's, from each size's live bytes at the same instants.

    Where the sizes ran different numbers of ops, instants cannot be matched; the maxima are fitted.
    """
    peaks = [max(instants, default=0) for instants in events]
    matched = events[: len(SIZES)]
    if len({len(instants) for instants in matched}) != 1:
        return line(peaks, add_bytes=add_bytes)
    lines = [line(values) for values in zip(*matched, strict=True)]
    slope = max((one.per_sample for one in lines), default=0.0)
    bounds = [one.fixed + (one.per_sample - slope) * SINGLE for one in lines]
    bounds += [peak - slope * SINGLE for peak in peaks[len(SIZES) :]]
    return Affine(max(bounds, default=0.0) + add_bytes, slope)
