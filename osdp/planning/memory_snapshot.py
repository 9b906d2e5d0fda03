"""A plan's predicted memory as a snapshot of PyTorch's allocator, for https://pytorch.org/memory_viz.

The format is that of `torch.cuda.memory._snapshot()`.  Between two moments of the memory model
(`planner/cost/memory_over_step.py`) what is gone is freed, then what is new is allocated, so that the peak of the
replayed trace is the plan's predicted peak less the reserve, which PyTorch's allocator does not hold.
"""

import pickle
from bisect import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planner.cost.memory_over_step import StepMoment, moments_of_step
from planner.cost.peak_memory import Holding
from planner.pricing import PricedPlan
from profiler.yaml_files import write_bytes_atomic

FIRST_ADDRESS = 1 << 40
"""Where the one segment begins."""
_Owner = tuple[str, int | None, bool]
"""What tells the holdings of a moment apart: category, stage, whether it passes."""
_Frames = list[dict[str, Any]]


def write_snapshot(path: Path, plan: PricedPlan) -> None:
    """Write the predicted snapshot of a plan as it runs, as a pickle. Raises OsdpError if it cannot be written."""
    write_bytes_atomic(path, pickle.dumps(snapshot(plan)))


def snapshot(plan: PricedPlan) -> dict[str, Any]:
    """Return the predicted snapshot of a plan as plain data; sizes and addresses in bytes.

    Times are numbers of moments: how long each of them takes, the memory model does not say.
    """
    peak_bytes = sum(round(size) for name, size in plan.peak.categories.items() if name != "reserve")
    heap = _Heap()
    for number, moment in enumerate(moments_of_step(plan.options, plan.load)):
        heap.time_us = number
        heap.become(_whole_bytes(moment, peak_bytes), moment, plan)
    return heap.snapshot()


def _whole_bytes(moment: StepMoment, peak_bytes: int) -> dict[_Owner, int]:
    """Return the size of each holding, rounded so that no moment is above the peak that the plan's file states.

    That is the sum of the rounded categories.
    """
    sizes = dict[_Owner, int]()
    for holding in moment.holdings:
        sizes[_owner(holding)] = sizes.get(_owner(holding), 0) + int(holding.size_bytes)
    if not sizes:  # the optimizer step of a model that is offloaded
        return sizes
    largest = max(sizes, key=sizes.__getitem__)
    # The highest moment is some fractions of a byte below the peak, or above it.
    short_bytes = peak_bytes - sum(sizes.values())
    if short_bytes < 0 or moment.total_bytes + len(sizes) >= peak_bytes:
        sizes[largest] += short_bytes
    return sizes


def _owner(holding: Holding) -> _Owner:
    return holding.category, holding.place, holding.is_passing


class _Heap:
    """Live blocks, with the trace of how they came and went."""

    def __init__(self) -> None:
        self.time_us = 0
        self.live = dict[_Owner, tuple[int, int, _Frames]]()
        """Address, size and frames of each holding's block."""
        self.end = FIRST_ADDRESS
        """First address that was never used."""
        self._spans = list[tuple[int, int]]()
        """Start and end of the live blocks, sorted."""
        self._trace = list[dict[str, Any]]()

    def become(self, sizes: dict[_Owner, int], moment: StepMoment, plan: PricedPlan) -> None:
        """Free what is not held any more, or in another size; then allocate what is new."""
        for owner in [owner for owner, (_, size, _) in self.live.items() if sizes.get(owner) != size]:
            address, size, frames = self.live.pop(owner)
            self._spans.remove((address, address + size))
            self._note("free_requested", address, size, frames)
            self._note("free_completed", address, size, frames)
        for owner, size in sizes.items():
            if size > 0 and owner not in self.live:
                address = self._place(size)
                frames = _frames(owner, moment, plan)
                self.live[owner] = address, size, frames
                self._note("alloc", address, size, frames)

    def _place(self, size: int) -> int:
        """Return the address of the first gap that is large enough."""
        address = FIRST_ADDRESS
        for start, end in self._spans:
            if start - address >= size:
                break
            address = end
        span = address, address + size
        self._spans.insert(bisect(self._spans, span), span)
        self.end = max(self.end, address + size)
        return address

    def _note(self, action: str, address: int, size: int, frames: _Frames) -> None:
        where = {"addr": address, "size": size, "stream": 0, "device": 0}
        self._trace.append({"action": action, **where, "time_us": self.time_us, "frames": frames})

    def snapshot(self) -> dict[str, Any]:
        size = self.end - FIRST_ADDRESS
        live_bytes = sum(block[1] for block in self.live.values())
        segment = {
            "device": 0,
            "address": FIRST_ADDRESS,
            "total_size": size,
            "allocated_size": live_bytes,
            "active_size": live_bytes,
            "requested_size": live_bytes,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": list(_blocks(sorted(self.live.values(), key=lambda block: block[0]), self.end)),
        }
        first = {"action": "segment_alloc", "addr": FIRST_ADDRESS, "size": size, "stream": 0, "device": 0}
        trace = [{**first, "time_us": 0, "frames": []}, *self._trace]
        return {"segments": [segment], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}


def _blocks(live: Sequence[tuple[int, int, _Frames]], end: int) -> Iterator[dict[str, Any]]:
    """Yield the blocks of the segment at the end of the step: live ones, and the gaps between them."""
    address = FIRST_ADDRESS
    for start, size, frames in (*live, (end, 0, [])):
        if start > address:
            gap = {"address": address, "size": start - address, "requested_size": 0}
            yield {**gap, "state": "inactive", "frames": []}
        if size:
            block = {"address": start, "size": size, "requested_size": size}
            yield {**block, "state": "active_allocated", "frames": frames}
        address = start + size


def _frames(owner: _Owner, moment: StepMoment, plan: PricedPlan) -> _Frames:
    """Return what a viewer shows of a block, innermost first: its category, whose it is, and where it came to be."""
    category, stage, _ = owner
    names = [category, "outside of all operators" if stage is None else plan.space.model.stages[stage].name]
    operator = plan.space.operator_named_at(moment.stage, moment.operator)
    if operator is not None:
        names.append(f"{moment.phase} of {operator.name}")
    else:
        names.append(moment.phase)
    return [{"name": name, "filename": "predicted by osdp", "line": 0} for name in names]
