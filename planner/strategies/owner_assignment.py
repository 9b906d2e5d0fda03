"""Which rank owns which unit, where units are held whole."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType


def assign_owners(
    sizes_bytes: Sequence[int], ranks: int, given: Mapping[int, int] = MappingProxyType({})
) -> tuple[int, ...]:
    """Return the owning rank of each unit that one rank holds whole, in the order given.

    Largest first to the rank that owns least, ties to the lowest rank (Graham's longest processing
    time rule, SIAM J. Appl. Math. 1969: the fullest rank is within 4/3 of the best that can be).
    `given` has the ranks of those that the user decided, by their position.
    """
    owned, owners = [0] * ranks, dict(given)
    for index, rank in given.items():
        owned[rank] += sizes_bytes[index]
    for index in sorted(range(len(sizes_bytes)), key=lambda index: -sizes_bytes[index]):
        if index not in given:
            owners[index] = owned.index(min(owned))
            owned[owners[index]] += sizes_bytes[index]
    return tuple(owners[index] for index in range(len(sizes_bytes)))


def least_of_fullest(sizes: Sequence[float], ranks: int) -> float:
    """Return what some rank has at least, however units of these sizes are shared."""
    falling, counts = sorted(sizes, reverse=True), range(len(sizes) // ranks + 1)
    # Of one unit more than `times` for each rank, some rank has more than `times`.
    return max(sum(falling[times * (ranks - 1) : times * ranks + 1]) for times in counts)
