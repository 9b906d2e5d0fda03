"""The model of CUDA's caching allocator: each rule by hand, and random programs against a second implementation."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import draws

from profiler.byte_sizes import MIB
from runtime.observe.caching_allocator import Block, CachingAllocator, OutOfMemoryError

NO_LIMIT = 1 << 50


def state(allocator: CachingAllocator) -> tuple[float, float]:
    """Return MiB allocated and reserved."""
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


def free(allocator: CachingAllocator, *blocks: Block) -> None:
    for block in blocks:
        allocator.free(block)


# --- settings as they are by default -------------------------------------------------------------


def test_small_requests_are_rounded_to_512_bytes_and_share_segments_of_2_mib() -> None:
    allocator = CachingAllocator(NO_LIMIT)
    blocks = [allocator.allocate(size) for size in (1, 512, 513)]
    assert [block.size_bytes for block in blocks] == [512, 512, 1024]
    assert [block.address for block in blocks] == [0, 512, 1024]
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(MIB)  # the largest that is small
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(MIB)  # 2 KiB less than 1 MiB is left of the first segment
    assert allocator.reserved_bytes == 4 * MIB


def test_requests_below_10_mib_share_segments_of_20_and_others_have_their_own() -> None:
    allocator = CachingAllocator(NO_LIMIT)
    allocator.allocate(MIB + 1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (MIB + 512, 20 * MIB)
    allocator.allocate(10 * MIB - 512)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(10 * MIB)  # 9 MiB are left
    assert allocator.reserved_bytes == 30 * MIB
    allocator.allocate(21 * MIB)  # rounded up to 2 MiB
    assert allocator.reserved_bytes == 52 * MIB


def test_large_blocks_are_split_only_if_more_than_1_mib_is_left() -> None:
    allocator = CachingAllocator(NO_LIMIT)
    first = allocator.allocate(11 * MIB)  # of 12
    assert (first.size_bytes, first.after) == (12 * MIB, None)
    second = allocator.allocate(11 * MIB - 512)
    assert second.size_bytes == 11 * MIB - 512
    assert second.after is not None
    assert second.after.size_bytes == MIB + 512


def test_the_smallest_block_that_is_large_enough_is_taken_and_of_equal_ones_the_lowest() -> None:
    allocator = CachingAllocator(NO_LIMIT)
    blocks = [allocator.allocate(size * MIB) for size in (30, 12, 16, 12)]
    free(allocator, *reversed(blocks))
    assert allocator.allocate(12 * MIB).address == blocks[1].address
    assert allocator.allocate(12 * MIB).address == blocks[3].address
    assert allocator.allocate(12 * MIB).address == blocks[2].address
    assert state(allocator) == (36, 70)


def test_memory_of_one_stream_is_not_anothers() -> None:
    allocator = CachingAllocator(NO_LIMIT)
    allocator.free(allocator.allocate(12 * MIB, stream=1))
    allocator.allocate(12 * MIB, stream=0)
    assert state(allocator) == (12, 24)
    allocator.allocate(12 * MIB, stream=1)
    assert state(allocator) == (24, 24)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_free_neighbours_become_one(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator(NO_LIMIT)
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    free(allocator, *(blocks[index] for index in order))
    assert allocator.allocate(20 * MIB).address == 0
    assert state(allocator) == (20, 20)


def test_under_pressure_segments_that_are_free_as_a_whole_are_given_back() -> None:
    allocator = CachingAllocator(50 * MIB)
    used, unused = allocator.allocate(2 * MIB), allocator.allocate(20 * MIB, stream=1)
    allocator.free(unused)
    allocator.allocate(30 * MIB)
    assert (state(allocator), allocator.retries, allocator.peak_reserved_bytes) == ((32, 50), 1, 50 * MIB)
    # 18 MiB of the first segment are free, but not all of it.
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(20 * MIB)
    allocator.free(used)
    allocator.allocate(20 * MIB)
    assert (state(allocator), allocator.retries) == ((50, 50), 2)


# --- expandable segments -------------------------------------------------------------------------


def test_expandable_segments_grow_by_pages() -> None:
    allocator = CachingAllocator(NO_LIMIT, expandable=True)
    first, second = allocator.allocate(5 * MIB), allocator.allocate(16 * MIB)
    # 15 MiB are free behind the first: one more page makes it 35.
    assert (first.address, second.address, second.size_bytes) == (0, 5 * MIB, 16 * MIB)
    assert state(allocator) == (21, 40)
    allocator.allocate(512)
    assert state(allocator)[1] == 42, "small requests have a segment and pages of 2 MiB of their own"


def test_large_blocks_of_expandable_segments_are_always_split() -> None:
    allocator = CachingAllocator(NO_LIMIT, expandable=True)
    allocator.allocate(20 * MIB - 512)
    assert allocator.allocated_bytes == 20 * MIB - 512


def test_a_block_that_can_be_extended_counts_as_large_as_it_could_get() -> None:
    allocator = CachingAllocator(NO_LIMIT, expandable=True)
    hole = allocator.allocate(8 * MIB)
    allocator.allocate(6 * MIB)  # 6 MiB are left of the page
    allocator.free(hole)
    assert allocator.allocate(5 * MIB).address == hole.address, "though the 6 MiB at the end fit better"


def test_pages_without_allocated_bytes_are_given_back_and_filled_first() -> None:
    allocator = CachingAllocator(66 * MIB, expandable=True)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(25 * MIB)
    assert state(allocator) == (55, 60)
    allocator.free(first)
    other = allocator.allocate(18 * MIB, stream=1)  # takes the first page, as the second is in use from 30 MiB on
    assert (state(allocator), allocator.retries) == ((43, 60), 1)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(25 * MIB)
    allocator.free(other)
    again = allocator.allocate(25 * MIB)  # a page at 0 is added to the 10 MiB that are free before the second block
    assert (again.address, second.address) == (0, 30 * MIB)
    assert state(allocator) == (50, 60)


def test_the_limit_binds_by_the_size_of_a_segment_and_by_pages() -> None:
    allocator = CachingAllocator(39 * MIB, expandable=True)
    allocator.allocate(19 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(2 * MIB)  # 20 + 20 MiB
    allocator = CachingAllocator(60 * MIB, expandable=True)
    allocator.allocate(41 * MIB)  # three pages
    with pytest.raises(OutOfMemoryError):
        # 19 MiB are free, but the request is checked as if it had a segment of its own.
        allocator.allocate(20 * MIB)


# --- random programs -----------------------------------------------------------------------------


@dataclass
class Plain:
    """The same rules on intervals, which are searched from one end to the other."""

    limit: int
    expandable: bool
    mapped: dict[tuple[int, bool], list[list[int]]] = field(default_factory=dict)
    """By pool: intervals of addresses that have memory; expandable ones that touch are one."""
    used: dict[tuple[int, bool], dict[int, int]] = field(default_factory=dict)
    """By pool: end of what is allocated, by its start."""

    def reserved(self) -> int:
        return sum(end - start for intervals in self.mapped.values() for start, end in intervals)

    def holes(self, pool: tuple[int, bool]) -> list[tuple[int, int, int]]:
        """Return (start, end, what could be added behind) of what is free."""
        found = []
        intervals = sorted(self.mapped[pool])
        for number, (start, end) in enumerate(intervals):
            following = intervals[number + 1][0] if number + 1 < len(intervals) else 1 << 50
            places = sorted((a, b) for a, b in self.used[pool].items() if start <= a < end)
            starts, ends = [start, *(b for _, b in places)], [*(a for a, _ in places), end]
            for a, b in zip(starts, ends, strict=True):
                if a < b:
                    found.append((a, b, following - end if self.expandable and b == end else 0))
        return found

    def allocate(self, size: int, stream: int) -> tuple[int, int]:
        size = -(-size // 512) * 512
        pool = (stream, size <= MIB)
        self.mapped.setdefault(pool, []), self.used.setdefault(pool, {})
        for _ in range(2):
            fitting = sorted((b - a, a, more) for a, b, more in self.holes(pool) if b - a >= size)
            while len(fitting) > 1 and sum(fitting[1][::2]) < sum(fitting[0][::2]):
                fitting.pop(0)
            if not fitting and self.reserved() + self.segment(size) <= self.limit and self.extend(pool, size):
                fitting = [(b - a, a, 0) for a, b, _ in self.holes(pool) if b - a >= size][-1:]
                if self.expandable:
                    fitting = [(size, self.place, 0)]
            if fitting:
                length, start = fitting[0][:2]
                whole = not self.expandable and size > MIB and length - size <= MIB
                if self.expandable:
                    length = next(b - a for a, b, _ in self.holes(pool) if a == start)
                self.used[pool][start] = start + (length if whole else size)
                return start, self.used[pool][start] - start
            self.release()
        raise OutOfMemoryError

    @staticmethod
    def segment(size: int) -> int:
        return 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB

    def extend(self, pool: tuple[int, bool], size: int) -> bool:
        intervals = self.mapped[pool]
        if not self.expandable:
            start = max((end for _, end in intervals), default=0) + MIB
            intervals.append([start, start + self.segment(size)])
            return True
        page = 2 * MIB if pool[1] else 20 * MIB
        gaps = [*(end for _, end in sorted(intervals)), 0]
        for gap in sorted(gaps):
            if any(start <= gap < end for start, end in intervals):
                continue
            start = next((a for a, b, _ in self.holes(pool) if b == gap), gap)
            if not any(start < b and a < start + size for a, b in self.used[pool].items()):
                break
        self.place = start
        at = start
        while at < start + size:
            inside = [end for a, end in intervals if a <= at < end]
            if inside:
                at = inside[0]
                continue
            upto = min([a for a, _ in intervals if a > at], default=1 << 50)
            pages = -(-(min(start + size, upto) - at) // page) * page
            if self.reserved() + pages > self.limit:
                return False
            intervals.append([at, at + pages])
            self.join(pool)
        return True

    def join(self, pool: tuple[int, bool]) -> None:
        merged: list[list[int]] = []
        for start, end in sorted(self.mapped[pool]):
            if merged and merged[-1][1] == start:
                merged[-1][1] = end
            else:
                merged.append([start, end])
        self.mapped[pool][:] = merged

    def release(self) -> None:
        for pool, intervals in self.mapped.items():
            page = 2 * MIB if pool[1] else 20 * MIB
            for start, end, _ in self.holes(pool):
                if not self.expandable:
                    if [start, end] in intervals:
                        intervals.remove([start, end])
                    continue
                first, last = -(-start // page) * page, end // page * page
                if first < last:
                    (around,) = [one for one in intervals if one[0] <= first and last <= one[1]]
                    intervals.remove(around)
                    intervals.extend(part for part in ([around[0], first], [last, around[1]]) if part[0] < part[1])


SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 6).map(lambda size: size * MIB // 2),
    st.integers(1, 3 * MIB),
    st.integers(1, 45).map(lambda size: size * MIB),
)
PROGRAMS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1), st.integers(0, 99)), min_size=20, max_size=60)


@settings(max_examples=draws(40))
@given(PROGRAMS, st.booleans(), st.sampled_from([44, 66, 100, 1 << 30]))
def test_random_programs(program: list[tuple[bool, int, int, int]], expandable: bool, limit_mib: int) -> None:
    allocator, plain = CachingAllocator(limit_mib * MIB, expandable=expandable), Plain(limit_mib * MIB, expandable)
    live: list[tuple[Block, tuple[int, bool], int]] = []
    for frees, size, stream, index in program:
        if frees and live:
            block, pool, start = live.pop(index % len(live))
            allocator.free(block)
            del plain.used[pool][start]
        else:
            try:
                start, length = plain.allocate(size, stream)
            except OutOfMemoryError:
                with pytest.raises(OutOfMemoryError):
                    allocator.allocate(size, stream)
            else:
                block = allocator.allocate(size, stream)
                assert block.size_bytes == length >= size
                live.append((block, (stream, -(-size // 512) * 512 <= MIB), start))
        assert allocator.reserved_bytes == plain.reserved() <= allocator.limit_bytes
        assert allocator.allocated_bytes == sum(block.size_bytes for block, *_ in live) <= allocator.reserved_bytes
        ranges = sorted((block.address, block.address + block.size_bytes) for block, *_ in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    for block, *_ in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0


@settings(max_examples=draws(40))
@given(PROGRAMS, st.booleans())
def test_the_least_limit_without_pressure(program: list[tuple[bool, int, int, int]], expandable: bool) -> None:
    """A byte less, and something is given back or refused."""

    def play(limit_bytes: int) -> CachingAllocator:
        allocator, live = CachingAllocator(limit_bytes, expandable=expandable), list[Block]()
        for frees, size, stream, index in program:
            if frees and live:
                allocator.free(live.pop(index % len(live)))
            else:
                live.append(allocator.allocate(size, stream))
        return allocator

    free = play(NO_LIMIT)
    assert play(free.most_asked_bytes).retries == free.retries == 0
    with suppress(OutOfMemoryError):
        assert play(free.most_asked_bytes - 1).retries > 0
