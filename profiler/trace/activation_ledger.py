"""Records one forward and backward: calls, live storages, and which call saved and wrote each.

Live memory is the sum over storages that the step allocated; parameters, buffers and other tensors
that outlive the step are *resident* and left out.  Bytes are exact; what a caching allocator adds by
rounding up to 512 is kept apart as *waste*, so that the exact part stays affine in the micro-batch.

With L the live bytes and S_j the bytes that call j was the first to save, an *event* of call c is

    L - sum(S_j for j < c)                                                        (`Ledger.mark`)

taken at the start of c's forward or backward and after each allocation in it; the peaks of c are the
maxima of its events.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from profiler.byte_sizes import ALLOCATION_BYTES
from profiler.trace.autograd_order import next_number

NOBODY = -1
"""Operator of the call before the first operator, owner of buffers, producer of inputs."""


@dataclass(slots=True)
class Tally:
    """Work and memory of one direction of a call."""

    flops: int = 0
    matmul_bytes: int = 0
    other_bytes: int = 0
    events: list[int] = field(default_factory=list)
    """Live bytes less what earlier calls saved, in order of time."""
    waste: int = 0
    """Most rounding that came on top of any of those, in bytes."""


@dataclass(slots=True)
class CallRecord:
    """The record of one call."""

    operator: int
    block: int | None
    base: int = 0
    """Bytes that earlier calls saved."""
    base_waste: int = 0
    """Rounding of those."""
    saved: int = 0
    """Bytes that this call is the first to save."""
    saved_waste: int = 0
    """Rounding of those."""
    forward: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    left: int | None = None
    """Number of the next autograd node when the operator's module was left, None if it was not."""
    inside: int | None = None
    """How many events of the forward came before the operator's module was left, None if it was not."""
    reached: int = 0
    """How many events of the backward came before it reached the module."""
    arrived: int | None = None
    """Bytes as of an event when the backward reached the module, None if it did not."""
    output: int = 0
    """Bytes that this call wrote and later calls read."""


class LiveStorage(weakref.ref[torch.UntypedStorage]):
    """A storage that the step allocated; calls back when it dies."""

    __slots__ = ("bytes", "handed", "key", "producer", "saver", "waste")

    bytes: int
    waste: int
    """Rounding of those."""
    key: int
    producer: int
    saver: int | None
    handed: bool


@dataclass(slots=True)
class Execution:
    """One run of a block's forward."""

    path: str
    """Module path of the block."""
    inputs: tuple[LiveStorage, ...]
    """The storages passed in."""
    kept_below_bytes: int = 0
    """Of those, what earlier calls keep, whether their own blocks are recomputed or not."""
    saved_first_bytes: int = 0
    """Of those, what its first call is the first to save."""


class Ledger:
    """The record that the meter fills: first a forward, then, after `turn`, its backward."""

    def __init__(self) -> None:
        self.in_backward = False
        self.call = CallRecord(NOBODY, None)
        """The call that runs now; the first waits for its operator."""
        self.tally = self.call.forward
        self.index = 0
        self.calls = [self.call]
        self.edges: set[tuple[int, int]] = set()
        self.live: dict[int, LiveStorage] = {}
        self.resident: dict[int, int] = {}
        """Owner (operator or NOBODY) of each storage that outlives the step."""
        self._starts = [next_number()]
        self._saves: list[tuple[LiveStorage, int]] = []
        self._pins: list[torch.UntypedStorage] = []
        self._bytes = self._waste = 0
        self._saved = self._saved_waste = 0

    # --- calls ------------------------------------------------------------------------------------

    def begin(self, operator: int, block: int | None, number: int) -> None:
        """Begin a call; its autograd nodes have numbers from `number` on."""
        if self.call.operator == NOBODY:
            self.call.operator, self.call.block = operator, block
            return
        self.call = CallRecord(operator, block, self._saved, self._saved_waste)
        self.tally = self.call.forward
        self.index = len(self.calls)
        self.calls.append(self.call)
        self._starts.append(max(number, self._starts[-1]))
        self.settle_saves()
        self.mark()

    def turn(self, loss: Tensor) -> None:
        """Close the forward; what comes from now on is the backward of `loss`."""
        self.settle_saves()
        self.call.output = loss.untyped_storage().nbytes()
        base = base_waste = 0
        for call in self.calls:
            call.base, call.base_waste = base, base_waste
            base += call.saved
            base_waste += call.saved_waste
        self.in_backward = True
        self._starts.append(next_number())
        self.go_back_to(len(self.calls) - 1)

    def end_forward(self) -> None:
        """Close a forward that no backward follows: a call hands on all that is live as the next one begins."""
        for call, after in pairwise(self.calls):
            call.output = after.forward.events[0]
        self.call.output = self._bytes

    def call_of(self, number: int) -> int | None:
        """Return the call in which the forward made an autograd node, None if it did not make it."""
        if number >= self._starts[-1]:
            return None
        if self._starts[self.index] <= number < self._starts[self.index + 1]:
            return self.index
        return max(bisect_right(self._starts, number) - 1, 0)

    def go_back_to(self, index: int) -> None:
        """Go on to the backward of a call."""
        self.index = index
        self.call = self.calls[index]
        self.tally = self.call.backward
        self.mark()

    def arrive(self) -> None:
        """Note that the backward of the current call reaches the operator's module, if it is the first time."""
        if self.call.arrived is None:
            self.call.arrived = self._bytes - self.call.base

    def mark(self) -> None:
        """Take an event of the current call."""
        self.tally.events.append(self._bytes - self.call.base)
        self.tally.waste = max(self.tally.waste, self._waste - self.call.base_waste)

    # --- storages ---------------------------------------------------------------------------------

    def pin(self, tensors: Iterable[Tensor], owner: int) -> None:
        """Exclude the tensors' storages from live memory; keep them alive, so that their keys are not reused."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.resident.setdefault(storage._cdata, owner)
            self._pins.append(storage)

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor made before the step as live until it dies (an input of the model)."""
        if tensor.untyped_storage()._cdata not in self.live:
            self._allocate(tensor, NOBODY)

    def use(self, storages: Sequence[LiveStorage]) -> None:
        """Note that the current call reads the storages."""
        for storage in storages:
            if storage.producer not in (self.index, NOBODY):
                self.edges.add((storage.producer, self.index))
                if not storage.handed:
                    storage.handed = True
                    self.calls[storage.producer].output += storage.bytes

    def produce(self, outputs: Sequence[Tensor]) -> bool:
        """Note that the current call wrote the outputs; return whether any is a new storage."""
        fresh = False
        for tensor in outputs:
            key = tensor.untyped_storage()._cdata
            storage = self.live.get(key)
            if storage is not None:
                if not self.in_backward:
                    storage.producer, storage.handed = self.index, False
            elif key not in self.resident:
                self._allocate(tensor, self.index)
                fresh = True
        if fresh:
            self.mark()
        return fresh

    def storages_of(self, tensors: Sequence[Tensor]) -> tuple[LiveStorage, ...]:
        """Return the tensors' live storages, each once."""
        keys = dict.fromkeys(tensor.untyped_storage()._cdata for tensor in tensors)
        return tuple(self.live[key] for key in keys if key in self.live)

    def kept_bytes(self) -> int:
        """Return the bytes of what the step made that is still alive."""
        return sum(storage.bytes for storage in self.live.values() if storage.producer != NOBODY)

    def _allocate(self, tensor: Tensor, producer: int) -> None:
        untyped = tensor.untyped_storage()
        storage = LiveStorage(untyped, self._release)
        storage.key = untyped._cdata
        storage.bytes = untyped.nbytes()
        storage.waste = -storage.bytes % ALLOCATION_BYTES
        storage.producer = producer
        storage.saver = None
        storage.handed = False
        self.live[storage.key] = storage
        self._bytes += storage.bytes
        self._waste += storage.waste

    def _release(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(storage, LiveStorage)
        del self.live[storage.key]
        self._bytes -= storage.bytes
        self._waste -= storage.waste
        if storage.saver is not None and not self.in_backward:
            self._charge(storage, -1)

    # --- what autograd saves ----------------------------------------------------------------------

    def save(self, tensor: Tensor) -> Tensor:
        """Note that autograd keeps the tensor; a pack hook for `saved_tensors_hooks`."""
        storage = self.live.get(tensor.untyped_storage()._cdata)
        if storage is not None and storage.saver is None and not self.in_backward:
            # The node that saves was made just before, and may precede the op that starts its call.
            self._saves.append((storage, next_number() - 1))
        return tensor

    def settle_saves(self) -> None:
        """Charge what was saved since the last op to the calls whose nodes saved it."""
        for storage, number in self._saves:
            if storage.saver is None and storage() is not None:
                storage.saver = max(bisect_right(self._starts, number) - 1, 0)
                self._charge(storage, 1)
        self._saves.clear()

    def _charge(self, storage: LiveStorage, sign: int) -> None:
        assert storage.saver is not None
        size, waste = sign * storage.bytes, sign * storage.waste
        call = self.calls[storage.saver]
        call.saved += size
        call.saved_waste += waste
        self._saved += size
        self._saved_waste += waste
        if storage.saver < self.index:
            self.call.base += size
            self.call.base_waste += waste
