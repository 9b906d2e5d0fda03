"""Sets of about equal cost: every item once, as near to the best as the literature says, and steps split by hand."""

from __future__ import annotations

from itertools import chain, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.balanced_sets import METHODS, greedy, karmarkar_karp, split_step
from profiler.errors import OsdpError

COSTS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


def sums(sets: list[tuple[int, ...]], costs: list[int]) -> list[int]:
    """Return what each set costs."""
    return [sum(costs[i] for i in items) for items in sets]


def least_makespan(costs: list[int], parts: int, size: int | None = None) -> int:
    """Return the least possible largest sum, by trying everything; of sets of `size` items, if given."""
    return min(
        max(sum(c for c, p in zip(costs, places, strict=True) if p == part) for part in range(parts))
        for places in product(range(parts), repeat=len(costs))
        if size is None or all(places.count(part) == size for part in range(parts))
    )


@pytest.mark.parametrize(
    ("method", "costs", "parts", "wanted"),
    [
        # 8 | 7, 6 to the 7, 5 to the 8, 4 to either: 8 5 4 | 7 6.
        ("greedy", [8, 7, 6, 5, 4], 2, [17, 13]),
        ("greedy", [4, 5, 6, 7, 8], 3, [11, 11, 8]),
        ("greedy", [10], 3, [10, 0, 0]),
        # Graham's worst case for three sets: 4/3 - 1/9 times the least, which is 9.
        ("greedy", [5, 5, 4, 4, 3, 3, 3], 3, [11, 8, 8]),
        # Karmarkar and Karp's own steps: 8-7=1, 6-5=1, 4-1=3, 3-1=2.
        ("karmarkar_karp", [8, 7, 6, 5, 4], 2, [16, 14]),
        ("karmarkar_karp", [4, 5, 6, 7, 8], 3, [11, 11, 8]),
        ("karmarkar_karp", [10], 3, [10, 0, 0]),
        ("karmarkar_karp", [3, 3, 3, 3], 4, [3, 3, 3, 3]),
        ("karmarkar_karp", [1, 2, 3], 1, [6]),
    ],
)
def test_known_values(method: str, costs: list[int], parts: int, wanted: list[int]) -> None:
    assert sums(METHODS[method](costs, parts, False), costs) == wanted


def test_the_best_of_known_values_is_lower() -> None:
    assert least_makespan([8, 7, 6, 5, 4], 2) == 15
    assert least_makespan([5, 5, 4, 4, 3, 3, 3], 3) == 9


@settings(max_examples=60, deadline=None)
@given(COSTS, st.integers(1, 3))
def test_every_item_is_in_one_set_within_the_bound(costs: list[int], parts: int) -> None:
    least = least_makespan(costs, parts)
    # Graham 1969; of differencing with two sets Fischetti and Martello 1987.
    graham = 4 / 3 - 1 / (3 * parts)
    for method, bound in ((greedy, graham), (karmarkar_karp, 7 / 6 if parts == 2 else graham)):
        sets = method(costs, parts)
        found = sums(sets, costs)
        assert sorted(chain(*sets)) == list(range(len(costs)))
        assert len(sets) == parts
        assert found == sorted(found, reverse=True)
        assert found[0] <= bound * least + 1e-9
        # Items that suffice for all sets leave none empty.
        assert all(sets) or len(costs) < parts


# --- equal sizes


@pytest.mark.parametrize("method", METHODS)
def test_equal_sizes_by_hand(method: str) -> None:
    # Rows 9 8 | 5 1: the 9 gets the 1. In sets of any size the 9 and the 1 would not be better off alone.
    costs = [1, 9, 5, 8]
    assert METHODS[method](costs, 2, True) == [(2, 3), (0, 1)]
    # One long sample and five short ones: it cannot be alone.
    assert sums(METHODS[method]([10, 1, 1, 1, 1, 1], 2, True), [10, 1, 1, 1, 1, 1]) == [12, 3]
    assert sums(METHODS[method]([10, 1, 1, 1, 1, 1], 2, False), [10, 1, 1, 1, 1, 1]) == [10, 5]


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), parts=st.integers(1, 4), size=st.integers(1, 5))
def test_equal_sizes_differ_by_no_more_than_a_row(method: str, data: st.DataObject, parts: int, size: int) -> None:
    """Who is ahead gets the cheaper of two items of a row, so a difference never outgrows the widest row."""
    costs = data.draw(st.lists(st.integers(1, 60), min_size=parts * size, max_size=parts * size))
    sets = METHODS[method](costs, parts, True)
    assert sorted(chain(*sets)) == list(range(len(costs)))
    assert {len(items) for items in sets} == {size}
    falling = sorted(costs, reverse=True)
    rows = [falling[start : start + parts] for start in range(0, len(falling), parts)]
    found = sums(sets, costs)
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= max(row[0] - row[-1] for row in rows)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), parts=st.integers(1, 3))
def test_pairs_are_the_best_that_there_are(method: str, data: st.DataObject, parts: int) -> None:
    """Of sets of two, the longest with the shortest and so on is best."""
    costs = data.draw(st.lists(st.integers(1, 60), min_size=2 * parts, max_size=2 * parts))
    assert sums(METHODS[method](costs, parts, True), costs)[0] == least_makespan(costs, parts, size=2)


def test_sizes_that_cannot_be_equal_are_refused() -> None:
    for method in METHODS.values():
        with pytest.raises(OsdpError, match="equally many"):
            method([1, 2, 3], 2, True)


# --- steps


@pytest.mark.parametrize("method", METHODS)
def test_a_step_by_hand(method: str) -> None:
    # Rows 9 8 | 4 1: side by side run 9 and 8, then 1 and 4; the sums are 10 and 12.
    assert split_step([4, 9, 1, 8], 2, 2, METHODS[method]) == (((3,), (0,)), ((1,), (2,)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("equal_sizes", [True, False])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), micro_batches=st.integers(1, 4), size=st.integers(1, 3))
def test_every_sample_of_a_step_once_and_alike_side_by_side(
    method: str, equal_sizes: bool, data: st.DataObject, ranks: int, micro_batches: int, size: int
) -> None:
    count = ranks * micro_batches * size
    costs = data.draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    step = split_step(costs, ranks, micro_batches, METHODS[method], equal_sizes)
    packs = list(chain(*step))
    assert [len(own) for own in step] == [micro_batches] * ranks
    assert sorted(chain(*packs)) == list(range(count))
    assert all(packs)
    assert not equal_sizes or {len(pack) for pack in packs} == {size}
    rows = [sums(list(row), costs) for row in zip(*step, strict=True)]
    assert all(min(row) >= max(after) for row, after in pairwise(rows))
