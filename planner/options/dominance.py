"""Which rows are at most others in every column, as sets of bits.

Compared pair by pair, n rows of m columns take n^2 m comparisons of numbers.  With the rows sorted by one column, those
that are at most v there are the first so many, and the set of the first k is a table of k bits.  So

    at_most(row) = AND over columns c of first[c][number of rows that are at most row[c] in c]

takes n m words of 64 rows each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Sets = NDArray[np.uint64]
"""One set of rows per row of the array, 64 rows in each word."""

FEW = 128
"""So many rows are compared pair by pair: sorting takes longer."""
BLOCK = 1024
"""Rows that are compared with each other at once: tables of 128 KiB."""
FILTERS = 1, 3
"""After these columns, rows that no row is at most so far are left out."""


class Column:
    """Numbers of some rows, to ask which of them are small."""

    def __init__(self, numbers: Array) -> None:
        order = numbers.argsort(kind="stable")
        self.numbers = numbers[order]
        self.first = _first_of(order)

    def at_most(self, numbers: Array) -> Sets:
        """Return, for each number, the rows that are at most that."""
        found: Sets = self.first[self.numbers.searchsorted(numbers, side="right")]
        return found

    def below(self, numbers: Array) -> Sets:
        """Return, for each number, the rows that are less than that."""
        found: Sets = self.first[self.numbers.searchsorted(numbers, side="left")]
        return found


class Rows:
    """Rows of numbers, to ask which of them are small in every column."""

    def __init__(self, rows: Array) -> None:
        self.columns = [Column(numbers) for numbers in rows.T]

    def at_most(self, rows: Array) -> Sets:
        """Return, for each row, those that are at most it in every column."""
        own, *others = zip(self.columns, rows.T, strict=True)
        found = own[0].at_most(own[1])
        for column, numbers in others:
            found &= column.at_most(numbers)
        return found


def _first_of(order: Indices) -> Sets:
    """Return the sets of the first 0, 1, ... of some rows in an order."""
    count = len(order)
    bits = np.zeros((count + 1, (count + 63) // 64), dtype=np.uint64)
    bits[np.arange(1, count + 1), order >> 6] = np.uint64(1) << (order & 63).astype(np.uint64)
    found: Sets = np.bitwise_or.accumulate(bits, axis=0)
    return found


def undominated_rows(rows: Array) -> Indices:
    """Return the rows that no other is at most in every column; of equal rows the first."""
    order = np.lexsort(rows.T[::-1])  # whatever dominates a row comes before it
    rows = rows[order]
    if len(rows) <= FEW:
        return order[_pair_by_pair(rows)]
    ranks, found, known = _ranks(rows), list[Indices](), list[_Block]()
    for start in range(0, len(rows), BLOCK):
        alive = np.arange(start, min(start + BLOCK, len(rows)))
        for earlier in known:
            alive = alive[~earlier.holds_better(ranks, alive)]
        if len(alive):
            alive = alive[~_Block(ranks, alive).holds_better(ranks, alive, before=True)]
        if len(alive) and start + BLOCK < len(rows):
            known.append(_Block(ranks, alive))
        found.append(alive)
    return order[np.concatenate(found)]


def _ranks(rows: Array) -> list[Indices]:
    """Return for each column but the first, by which rows are sorted, the places of its numbers among them; of columns
    with the same places one."""
    found = dict[bytes, Indices]()
    for numbers in rows.T[1:]:
        order = numbers.argsort(kind="stable")
        in_order = numbers[order]
        places = np.empty(len(order), dtype=np.intp)
        places[order[0]] = 0
        places[order[1:]] = np.cumsum(in_order[1:] != in_order[:-1])
        if places[order[-1]]:
            found.setdefault(places.tobytes(), places)
    return [*found.values()]


class _Block:
    """Some rows, to ask whether they hold one that is at most another in every column."""

    def __init__(self, ranks: Sequence[Indices], members: Indices) -> None:
        self.count = len(members)
        self.sets, self.counts = list[Sets](), list[Indices]()
        for places in ranks:
            own = places[members]
            self.sets.append(_first_of(own.argsort(kind="stable")))
            # A table of all places takes less than to search for each.
            self.counts.append(np.cumsum(np.bincount(own, minlength=int(places.max()) + 1)))

    def holds_better(self, ranks: Sequence[Indices], rows: Indices, before: bool = False) -> NDArray[np.bool_]:
        """Return whether some row is at most each of others, which come later; or of its own rows, one `before` it."""
        found = np.ones(len(rows), dtype=bool)
        left = _first_of(np.arange(self.count))[:-1] if before else np.full((len(rows), 1), ~np.uint64(0))
        for number, (sets, counts, places) in enumerate(zip(self.sets, self.counts, ranks, strict=True)):
            left = left & sets[counts[places[rows]]]
            if number in FILTERS:
                some = left.any(axis=1)
                found[found] = some
                rows, left = rows[some], left[some]
        found[found] = left.any(axis=1)
        return found


def _pair_by_pair(rows: Array) -> NDArray[np.bool_]:
    """Return whether no row before each is at most it in every column."""
    count = len(rows)
    at_most = np.ones((count, count), dtype=bool)
    for numbers in rows.T[1:]:
        at_most &= numbers[:, None] <= numbers
    return np.logical_not((at_most & _BEFORE[:count, :count]).any(axis=0))


_BEFORE = np.arange(FEW)[:, None] < np.arange(FEW)
