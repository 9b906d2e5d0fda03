"""The fractional knapsack: the least cost of so much gain, where any part of an item can be had for that part of its
cost."""

from __future__ import annotations

from collections.abc import Iterable


def least_cost(items: Iterable[tuple[float, float]], needed: float) -> float | None:
    """Return the least cost of (gain, cost) items that gain so much; None if all do not.

    Gains are above zero, costs at least zero.
    """
    total = 0.0
    for gain, cost in sorted(items, key=lambda item: item[1] / item[0]):
        if needed <= gain:
            return total + max(0.0, needed) / gain * cost
        total += cost
        needed -= gain
    return total if needed <= 0 else None
