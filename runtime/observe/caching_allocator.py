"""A model of PyTorch's CUDA caching allocator: which addresses it hands out and how much of the device it reserves.

    allocator = CachingAllocator(limit_bytes=8 << 30, expandable=True)
    block = allocator.allocate(3 << 20, stream=0)
    allocator.free(block)
    print(allocator.peak_reserved_bytes)

Rules, from `c10/cuda/CUDACachingAllocator.cpp` (function in brackets) and `c10/core/AllocatorConfig.h` of torch 2.13,
and from the notes on `PYTORCH_CUDA_ALLOC_CONF` in `docs/source/notes/cuda.rst`:

    rounding     to 512 bytes                                                                (round_size)
    pools        per stream one for requests up to 1 MiB, small, and one for larger ones       (get_pool)
    best fit     the smallest free block of the pool that is large enough; of equal ones
                 that of the lowest address                                            (get_free_block)
    segments     where none is, the device is asked for 2 MiB (small), 20 MiB (less than
                 10 MiB) or the request rounded up to 2 MiB                      (get_allocation_size)
    splitting    what is over becomes a free block if it is at least 512 bytes (small, or
                 expandable segments) or more than 1 MiB (large)                       (should_split)
    coalescing   a block that is freed becomes one with free neighbours             (try_merge_blocks)
    pressure     a request that would exceed the limit first gives back all segments that
                 are free as a whole, of all pools, and is then tried once more
                                                            (malloc, release_cached_blocks)

With `expandable_segments:True` a pool has one segment, a range of addresses that is backed by pages of 2 MiB (small)
or 20 MiB (large).  A request that fits nowhere is placed at the lowest address with room, pages being added to what is
free there (try_allocate_expandable_block); of equal fits, a block that can be extended counts as large as it could get
(get_free_block); under pressure all pages without any allocated byte are given back (unmap_block).

The limit binds as `set_per_process_memory_fraction` does, by the size that a segment would have (alloc_block), and
pages beyond it cannot be had either, as where it is all that the device has.  PyTorch is given these where the device
has more (`PAGE_EXCESS_BYTES`).  Left out, as no plan uses them: `max_split_size_mb`, rounding to powers of two,
`garbage_collection_threshold`, pools of CUDA graphs, and `record_stream`, which FSDP2 does without.  Of segments only
the order of addresses matters; here later ones have higher addresses, and the range of an expandable segment has no
end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from profiler.byte_sizes import ALLOCATION_BYTES, MIB, allocated_bytes

SMALL_BYTES = MIB
"""Largest request of the small pool (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""A segment of the small pool, and its page if segments are expandable (`kSmallBuffer`)."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""A segment for requests below `OWN_SEGMENT_BYTES`, and the large pool's page (`large_segment_size`)."""
OWN_SEGMENT_BYTES = 10 * MIB
"""Requests from here on get a segment of their own size (`kMinLargeAlloc`)."""
SEGMENT_STEP_BYTES = 2 * MIB
"""Sizes of such segments are multiples of this (`kRoundLarge`)."""
PAGE_EXCESS_BYTES = LARGE_SEGMENT_BYTES - SEGMENT_STEP_BYTES
"""How much more than its limit PyTorch may reserve with expandable segments: it compares sizes with that in steps of 2
MiB, and takes pages of 20 MiB.  On an H200 with torch 2.11 it was 0.3 % of a limit of 1.5 GB."""
_ADDRESSES = 1 << 50
"""Of an expandable segment."""


class OutOfMemoryError(Exception):
    """A request that the allocator cannot serve within its limit."""


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses of one segment."""

    pool: Pool
    address: int
    size_bytes: int
    is_free: bool = True
    is_mapped: bool = True
    """Whether memory is behind the addresses."""
    before: Block | None = None
    """Neighbour in the same segment."""
    after: Block | None = None


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks of a stream, for small or for large requests."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    """(size, address, block), sorted; addresses differ."""
    unmapped: list[tuple[int, Block]] = field(default_factory=list)
    """(address, block), sorted; of expandable segments."""

    @property
    def page_bytes(self) -> int:
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def add(self, block: Block) -> None:
        """List a block that is free or unmapped."""
        if block.is_mapped:
            insort(self.free, (block.size_bytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block off its list."""
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """The allocator of one device."""

    def __init__(self, limit_bytes: int, *, expandable: bool = False) -> None:
        self.limit_bytes = limit_bytes
        """The most that it may have of the device."""
        self.expandable = expandable
        self.allocated_bytes = 0
        """Handed out now."""
        self.reserved_bytes = 0
        """Had of the device now."""
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.most_asked_bytes = 0
        """The least limit within which no request would have made it give cached memory back."""
        self.retries = 0
        """Times that cached memory was given back for a request; each waits for the device."""
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._end = 0
        """Address of the next segment."""

    def reset_peaks(self) -> None:
        """Forget the peaks; what holds now are the new ones."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Return a block of at least so many bytes, of which there must be some; raises OutOfMemoryError."""
        size = allocated_bytes(size_bytes)
        is_small = size <= SMALL_BYTES
        pool = self._pools.setdefault((stream, is_small), Pool(is_small))
        block = _best_fit(pool, size) or self._new_block(pool, size)
        if block is None:
            self.retries += 1
            self._release_cached()
            block = self._new_block(pool, size)
        if block is None:
            raise OutOfMemoryError(f"{size} bytes beside {self.allocated_bytes}, with {self.reserved_bytes} reserved")
        pool.remove(block)
        over = block.size_bytes - size
        if over >= ALLOCATION_BYTES if is_small or self.expandable else over > SMALL_BYTES:
            pool.add(_cut(block, size))
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        self.allocated_bytes -= block.size_bytes
        block.is_free = True
        block.pool.add(_merged(block))

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        """Return a listed free block that is large enough, from memory that the device gives; None if it cannot."""
        asked_bytes = self.reserved_bytes + segment_bytes(size)
        self.most_asked_bytes = max(self.most_asked_bytes, asked_bytes)
        if asked_bytes > self.limit_bytes:
            return None
        if self.expandable:
            return self._extended(pool, size)
        block = Block(pool, self._end, segment_bytes(size))
        self._end += block.size_bytes + SEGMENT_STEP_BYTES
        pool.add(block)
        self._reserve(block.size_bytes)
        return block

    def _reserve(self, size_bytes: int) -> None:
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.most_asked_bytes = max(self.most_asked_bytes, self.reserved_bytes)

    # --- expandable segments

    def _extended(self, pool: Pool, size: int) -> Block | None:
        block = self._lowest_with_room(pool, size)
        if not block.is_mapped:
            mapped = self._map(block, min(size, block.size_bytes))
            if mapped is None:
                return None
            block = mapped
        while block.size_bytes < size:
            missing = block.after
            assert missing is not None
            mapped = self._map(missing, min(size - block.size_bytes, missing.size_bytes))
            if mapped is None:
                return None
            block = mapped
        return block

    def _lowest_with_room(self, pool: Pool, size: int) -> Block:
        """Return the first of neighbouring blocks, free or unmapped, that have room together."""
        for _, unmapped in pool.unmapped:
            first = unmapped.before if unmapped.before is not None and unmapped.before.is_free else unmapped
            room, block = 0, first
            while block is not None and block.is_free and room < size:
                room += block.size_bytes
                block = block.after  # type: ignore[assignment]
            if room >= size:
                return first
        segment = Block(pool, self._end, _ADDRESSES, is_mapped=False)
        self._end += _ADDRESSES
        pool.add(segment)
        return segment

    def _map(self, block: Block, size: int) -> Block | None:
        """Put pages behind the first bytes of an unmapped block; return the free block that they are then part of."""
        pool = block.pool
        size = -(-size // pool.page_bytes) * pool.page_bytes
        if self.reserved_bytes + size > self.limit_bytes:
            return None
        pool.remove(block)
        if size < block.size_bytes:
            pool.add(_cut(block, size))
        block.is_mapped = True
        block = _merged(block)
        pool.add(block)
        self._reserve(size)
        return block

    # --- pressure

    def _release_cached(self) -> None:
        release: Callable[[Block], None] = self._unmap if self.expandable else self._release
        for pool in self._pools.values():
            for *_, block in list(pool.free):
                release(block)

    def _release(self, block: Block) -> None:
        """Give a segment back if it is free as a whole."""
        if block.before is None and block.after is None:
            block.pool.remove(block)
            self.reserved_bytes -= block.size_bytes

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block."""
        pool, page = block.pool, block.pool.page_bytes
        offset = block.address % _ADDRESSES
        first, end = -(-offset // page) * page, (offset + block.size_bytes) // page * page
        if first >= end:
            return
        pool.remove(block)
        if first > offset:
            kept = block
            block = _cut(kept, first - offset)
            pool.add(kept)
        if end - first < block.size_bytes:
            pool.add(_cut(block, end - first))
        block.is_mapped = False
        pool.add(_merged(block))
        self.reserved_bytes -= end - first


def segment_bytes(size_bytes: int) -> int:
    """Return how much the device is asked for where a rounded request fits into no free block."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def _best_fit(pool: Pool, size: int) -> Block | None:
    found = bisect_left(pool.free, (size,))
    if found == len(pool.free):
        return None
    # Only a block that can be extended has room for more than its size.
    while found + 1 < len(pool.free) and _room(pool.free[found + 1][2]) < _room(pool.free[found][2]):
        found += 1
    return pool.free[found][2]


def _room(block: Block) -> int:
    """Return the size that a block has or could be extended to."""
    after = block.after
    return block.size_bytes + (after.size_bytes if after is not None and not after.is_mapped else 0)


def _cut(block: Block, size: int) -> Block:
    """Shorten a block to so many bytes and return the rest, a new block with the same state."""
    rest = Block(block.pool, block.address + size, block.size_bytes - size, True, block.is_mapped, block, block.after)
    if block.after is not None:
        block.after.before = rest
    block.after, block.size_bytes = rest, size
    return rest


def _merged(block: Block) -> Block:
    """Return a free or unmapped block that is not listed, one with such neighbours, which are listed no more."""
    after, before = block.after, block.before
    if after is not None and after.is_free and after.is_mapped == block.is_mapped:
        block.pool.remove(after)
        _join(block, after)
    if before is not None and before.is_free and before.is_mapped == block.is_mapped:
        block.pool.remove(before)
        _join(before, block)
        block = before
    return block


def _join(first: Block, second: Block) -> None:
    first.size_bytes += second.size_bytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first
