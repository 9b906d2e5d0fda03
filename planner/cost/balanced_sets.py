"""Splits items into sets of about equal cost, and the samples of a step into micro-batches of ranks.

    greedy          the costliest item first, each to the set that costs least so far (longest processing time;
                    Graham 1969): the largest sum is at most 4/3 - 1/(3 m) of the least possible, m sets     `greedy`
    karmarkar_karp  largest differencing (Karmarkar and Karp 1982): each item starts as a solution with one full
                    and m - 1 empty sets; the two solutions whose costliest and cheapest set differ most
                    become one, the costliest set of either with the cheapest of the other          `karmarkar_karp`

With equal sizes the items are sorted by cost and cut into rows of m, of which each set gets one: the greedy rule deals
row by row, and a row starts as one solution of differencing (Michiels, Korst, Aarts and van Leeuwen 2003).

A step of N ranks and M micro-batches is split twice by the same rule: samples into N M micro-batches, and these, with
equal sizes, into ranks.  So each rank has one of the N costliest micro-batches, one of the next N and so on:
those that run side by side are alike, and so are the sums of ranks             `split_step`
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count

from profiler.errors import OsdpError

Items = tuple[int, ...]
"""Positions in the costs that were given."""
Solution = list[tuple[float, Items]]
"""Sets with their costs, from the costliest on."""


def greedy(costs: Sequence[float], parts: int, equal_sizes: bool = False) -> list[Items]:
    """Split items into `parts` sets, some perhaps empty; return them from the costliest on.

    With `equal_sizes` all have the same number of items; raises OsdpError if that cannot be.
    """
    heap: list[tuple[float, int, Items]] = [(0.0, part, ()) for part in range(parts)]
    for row in _rows(costs, parts) if equal_sizes else [[item] for item in _falling(costs)]:
        least = [heapq.heappop(heap) for _ in row]
        for item, (cost, part, items) in zip(row, least, strict=True):
            heapq.heappush(heap, (cost + costs[item], part, (*items, item)))
    return [tuple(sorted(items)) for _, _, items in sorted(heap, key=lambda one: (-one[0], one[1]))]


def karmarkar_karp(costs: Sequence[float], parts: int, equal_sizes: bool = False) -> list[Items]:
    """Split items into sets by largest differencing; arguments, result and errors are those of `greedy`."""
    rows = _rows(costs, parts) if equal_sizes else [[item] for item in range(len(costs))]
    tie, solutions = count(), list[tuple[float, int, Solution]]()
    for row in rows:
        start: Solution = [(costs[item], (item,)) for item in row] + [(0.0, ())] * (parts - len(row))
        solutions.append((start[-1][0] - start[0][0], next(tie), start))
    heapq.heapify(solutions)
    while len(solutions) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(solutions), heapq.heappop(solutions)
        sets = [(a + b, p + q) for (a, p), (b, q) in zip(first, reversed(second), strict=True)]
        sets.sort(key=lambda one: -one[0])
        heapq.heappush(solutions, (sets[-1][0] - sets[0][0], next(tie), sets))
    found = solutions[0][2] if solutions else [(0.0, ())] * parts
    return [tuple(sorted(items)) for _, items in found]


Split = Callable[[Sequence[float], int, bool], list[Items]]
METHODS: dict[str, Split] = {"karmarkar_karp": karmarkar_karp, "greedy": greedy}


def split_step(
    costs: Sequence[float], ranks: int, micro_batches: int, split: Split = karmarkar_karp, equal_sizes: bool = True
) -> tuple[tuple[Items, ...], ...]:
    """Split the samples of a step; return, of each rank, the samples of each of its micro-batches.

    Raises OsdpError if micro-batches cannot all have equally many samples, and `equal_sizes` says that they must.
    """
    packs = split(costs, ranks * micro_batches, equal_sizes)
    sums = [sum(costs[item] for item in pack) for pack in packs]
    # Packs come from the costliest on, and so do those of a rank.
    return tuple(tuple(packs[pack] for pack in own) for own in split(sums, ranks, True))


def _falling(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda item: -costs[item])


def _rows(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Return the items in rows of `parts`, the costliest first."""
    if len(costs) % parts:
        what, expected = "sets cannot have equally many items", f"a multiple of {parts}"
        raise OsdpError(what, got=f"{len(costs)} items for {parts} sets", expected=expected)
    falling = _falling(costs)
    return [falling[start : start + parts] for start in range(0, len(falling), parts)]
