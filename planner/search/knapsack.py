"""Knapsacks: the least cost of so much gain, where any part of an item can be had for that part of its cost, and where
items are whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


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


def whole_choices(
    groups: Sequence[Sequence[tuple[float, float]]], needed: float, most: int
) -> list[tuple[float, tuple[int, ...]]] | None:
    """Return choices of one (gain, cost) point of each group that gain so much, as their cost and the points' numbers.

    By rising cost, and without those that another gains as much as for no more.  None if, group by group, more than
    `most` are left.
    """
    costs, gains, numbers = np.zeros(1), np.zeros(1), np.zeros((1, 0), int)
    rest = sum(max(gain for gain, _ in group) for group in groups)
    if rest < needed:
        return []
    for group in groups:
        rest -= max(gain for gain, _ in group)
        costs = np.concatenate([costs + cost for _, cost in group])
        gains = np.concatenate([gains + gain for gain, _ in group])
        numbers = np.concatenate([np.insert(numbers, numbers.shape[1], k, axis=1) for k in range(len(group))])
        order = np.lexsort((-gains, costs))
        best = np.maximum.accumulate(np.concatenate(([-np.inf], gains[order])))
        kept = order[(gains[order] > best[:-1]) & (gains[order] + rest >= needed)]
        if len(kept) > most:
            return None
        costs, gains, numbers = costs[kept], gains[kept], numbers[kept]
    return [(cost, tuple(row)) for cost, row in zip(costs.tolist(), numbers.tolist(), strict=True)]
