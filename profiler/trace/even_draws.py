"""Random numbers in the tensors of a trace: spread evenly over their range, alike for each share of a micro-batch.

The i-th is at frac(i phi) of its range, phi the golden ratio.  A pass whose micro-batch is `repeats` times the smallest
draws for each of its shares as that one drew: along the dimension that has grown so.  Where the range has grown so
too, as that of the nodes at the ends of edges in a batch of graphs, each share has a part of the range to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class _Draw:
    """One of the draws of a pass."""

    shape: tuple[int, ...]
    low: float
    high: float


def spread(rows: int, chosen: int, options: int, imbalance: float = 1.0) -> Tensor:
    """Return which `chosen` of the `options` each of the `rows` chooses: (rows, chosen), int64, on the CPU.

    The last option gets ceil(imbalance * rows * chosen / options) choices, at most `rows`.
    """
    row, column = torch.arange(rows), torch.arange(chosen)
    if imbalance == 1:
        period = options // math.gcd(options, chosen)  # shifted by one after each, so that columns are even, too
        return ((row * chosen + row // period)[:, None] + column) % options
    hot = min(rows, math.ceil(Fraction(imbalance).limit_denominator(10**6) * rows * chosen / options))
    has_last = (row + 1) * hot // rows > row * hot // rows
    picks = chosen - has_last.long()
    table = ((picks.cumsum(0) - picks)[:, None] + column) % max(1, options - 1)
    table[:, -1] = torch.where(has_last, options - 1, table[:, -1])
    turn = ((row * GOLDEN).frac() * chosen).long()
    return table.gather(1, (column + turn[:, None]) % chosen)


class EvenDraws:
    """The draws of a pass, in their order."""

    def __init__(self) -> None:
        self._repeats, self._count = 1.0, 0
        self._smallest: list[_Draw] = []
        """Those of the last pass with the smallest micro-batch."""

    def begin(self, repeats: float) -> None:
        """Begin a pass whose micro-batch is `repeats` times the smallest."""
        self._repeats, self._count = repeats, 0
        if repeats == 1:
            self._smallest.clear()

    def next(self, shape: tuple[int, ...], low: float, high: float) -> tuple[Hashable, Callable[[], Tensor]]:
        """Return what tells the values of a draw apart from others, and a function that makes them, in fp64."""
        draw = _Draw(shape, low, high)
        if self._repeats == 1:
            self._smallest.append(draw)
        like = self._smallest[self._count] if self._count < len(self._smallest) else draw
        self._count += 1
        repeats = max(1, int(self._repeats)) if self._smallest else 1
        grown = [dim for dim, size in enumerate(shape) if like.shape[dim : dim + 1] != (size,)]
        apart = like.high - like.low if high - low == repeats * (like.high - like.low) else 0.0
        is_like = (
            [*shape] == [size * (repeats if dim in grown else 1) for dim, size in enumerate(like.shape)]
            and len(grown) == 1
            and like.low == low
            and (like.high == high or apart > 0)
        )
        if is_like:
            return (low, high, grown[0], apart), lambda: _shares(like, repeats, grown[0], apart)
        numel = torch.Size(shape).numel()
        flat = _Draw((numel // repeats if numel % repeats == 0 else numel,), low, high)
        return (low, high), lambda: _shares(flat, numel // flat.shape[0] if numel else 1, 0, 0.0).view(shape)


def _shares(one: _Draw, repeats: int, dim: int, apart: float) -> Tensor:
    """Return a draw several times along a dimension, each range `apart` from the one before."""
    even = (torch.arange(1, torch.Size(one.shape).numel() + 1, dtype=torch.float64) * GOLDEN).frac()
    values = (one.low + even * (one.high - one.low)).view(one.shape)
    return torch.cat([values + share * apart for share in range(repeats)], dim)
