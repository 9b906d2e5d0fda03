"""The fractional knapsack: the least cost of so much gain, where any part of an item can be had for that part of its
cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def upgrades(points: Sequence[tuple[float, float]]) -> list[tuple[int, float, float]]:
    """Return the steps from the first of some (saved, cost) points to others that save more, with their (gain, cost).

    Those on the lower convex hull, by growing cost of a byte: so mixing points is never cheaper than a part of a step.
    The first number of each is the position of the point that it leads to.
    """
    at, found = 0, list[tuple[int, float, float]]()
    while True:
        saved, cost = points[at]
        further = [
            (max(0.0, price - cost) / (gain - saved), saved - gain, index)
            for index, (gain, price) in enumerate(points)
            if gain > saved
        ]
        if not further:
            return found
        _, _, after = min(further)
        found.append((after, points[after][0] - saved, max(0.0, points[after][1] - cost)))
        at = after
