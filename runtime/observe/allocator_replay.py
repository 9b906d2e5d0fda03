"""Replays what training steps allocate through a model of the CUDA caching allocator.

    allocated <= reserved <= limit

`reserved` is what the allocator has of the device, and `allocated` what storages have of that.  Steps follow each
other, as the second meets what the first has cached, and the last is repeated, as fragments may grow.  As with
`torch.cuda.reset_peak_memory_stats` after the first step, the peaks are those of the steps after it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profiler.byte_sizes import MIB
from runtime.observe.allocation_trace import AllocationTrace, Resize
from runtime.observe.caching_allocator import Block, CachingAllocator, OutOfMemoryError

STEPS = 4
"""Training steps that are replayed, if the last recorded one can follow itself."""
UNLIMITED_BYTES = 1 << 60
STEP_BYTES = 2 * MIB
"""No page and no segment is smaller."""


@dataclass(frozen=True)
class Replay:
    """What the allocator did."""

    allocated_bytes: int
    """At the peak."""
    reserved_bytes: int
    """At its own peak."""
    retries: int
    """Times in the last step that it gave cached memory back to serve a request; each waits for the device."""
    failed: str
    """Phase of the request that could not be served within the limit; empty: the steps ran."""
    most_asked_bytes: int
    """What it would have reserved at most, segments that it was refused included."""

    @property
    def runs(self) -> bool:
        return not self.failed


def replay(
    trace: AllocationTrace, limit_bytes: int, *, expandable: bool, workspaces_bytes: Sequence[int] = ()
) -> Replay:
    """Return what the allocator does within a limit; `workspaces_bytes` are of libraries, and stay allocated.

    They are made as the first step needs them, amid what lives then, or before it where the trace does not say.
    """
    allocator, retries = CachingAllocator(limit_bytes, expandable=expandable), 0
    blocks: dict[int, Block] = {}
    libraries = [Resize(-1 - number, size_bytes, 0, "start") for number, size_bytes in enumerate(workspaces_bytes)]
    first, *steps = trace.steps
    for at, library in reversed([*zip(trace.products, libraries, strict=False)]):
        first = (*first[:at], library, *first[at:])
    repeated = trace.steps[-1:] * (STEPS - len(trace.steps)) if trace.is_steady else ()
    failed = _play(allocator, blocks, (*trace.resident, *libraries[len(trace.products) :]))
    for number, step in enumerate((first, *steps, *repeated)):
        if failed:
            break
        if number == 1:
            allocator.reset_peaks()
        before = allocator.retries
        failed = _play(allocator, blocks, step)
        retries = allocator.retries - before
    return Replay(
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, retries, failed, allocator.most_asked_bytes
    )


def limit_without_retries_bytes(
    trace: AllocationTrace, *, expandable: bool, workspaces_bytes: Sequence[int] = ()
) -> int:
    """Return the least limit within which no cached memory is given back.

    It may be above what is reserved where nothing limits it: the allocator refuses by the size of a whole segment, also
    where pages that it has already are a part of that.
    """
    return replay(trace, UNLIMITED_BYTES, expandable=expandable, workspaces_bytes=workspaces_bytes).most_asked_bytes


def least_limit_bytes(
    trace: AllocationTrace, *, expandable: bool, workspaces_bytes: Sequence[int] = (), limits: int = 60
) -> int:
    """Return a limit within which the steps run, from what is reserved without one downwards until one fails.

    Limits are evenly spaced, so many down to what is allocated, but at least `STEP_BYTES` apart.
    """

    def within(limit_bytes: int) -> Replay:
        return replay(trace, limit_bytes, expandable=expandable, workspaces_bytes=workspaces_bytes)

    free = within(UNLIMITED_BYTES)
    step, limit_bytes = max(STEP_BYTES, (free.reserved_bytes - free.allocated_bytes) // limits), free.reserved_bytes
    while limit_bytes - step >= free.allocated_bytes and within(limit_bytes - step).runs:
        limit_bytes -= step
    return limit_bytes


def _play(allocator: CachingAllocator, blocks: dict[int, Block], events: Iterable[Resize]) -> str:
    """Serve requests until one fails, and return its phase; empty if none does."""
    for event in events:
        old = blocks.pop(event.storage, None)
        try:
            if event.size_bytes:
                blocks[event.storage] = allocator.allocate(event.size_bytes, event.stream)
        except OutOfMemoryError:
            return event.phase or "start"
        if old is not None:  # `resize_` copies what was there
            allocator.free(old)
    return ""
