"""Quantities as functions of the micro-batch b: f(b) = fixed + per_sample * b.

Where samples interact, as in a contrastive loss, there is a part in b^2 too, and where torch takes another way at
b = 1, a part for that alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantity that grows linearly with the micro-batch."""

    fixed: float = 0.0
    """Part that does not depend on the micro-batch (bytes or FLOPs)."""
    per_sample: float = 0.0
    """Part per sample of the micro-batch (bytes or FLOPs per sample)."""

    def __call__(self, micro_batch: int) -> float:
        return self.fixed + self.per_sample * micro_batch

    def __add__(self, other: Affine) -> Affine:
        return growth(*(one + two for one, two in zip(self.coefficients, other.coefficients, strict=True)))

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Parts that do not depend on the micro-batch b, that go with b and with b^2, and that are there at b = 1."""
        return self.fixed, self.per_sample, 0.0, 0.0

    def times(self, factor: float) -> Affine:
        """Return that many of it."""
        return growth(*(factor * one for one in self.coefficients))

    def at_least(self, other: Affine) -> Affine:
        """Return a quantity that is nowhere below either."""
        return growth(*map(max, self.coefficients, other.coefficients))


@dataclass(frozen=True, slots=True)
class Curve(Affine):
    """A quantity that grows with the square of the micro-batch too, or is larger than on its line at one of 1."""

    per_pair: float = 0.0
    """Part per pair of samples of the micro-batch, and each with itself (bytes or FLOPs)."""
    at_one: float = 0.0
    """Part of a micro-batch of 1 alone (bytes or FLOPs)."""

    def __call__(self, micro_batch: int) -> float:
        line = self.fixed + self.per_sample * micro_batch + self.per_pair * micro_batch**2
        return line + self.at_one if micro_batch == 1 else line

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        return self.fixed, self.per_sample, self.per_pair, self.at_one


def growth(fixed: float = 0.0, per_sample: float = 0.0, per_pair: float = 0.0, at_one: float = 0.0) -> Affine:
    """Return a quantity with these parts."""
    return Curve(fixed, per_sample, per_pair, at_one) if per_pair or at_one else Affine(fixed, per_sample)
