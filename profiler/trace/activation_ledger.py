"""Records one forward and backward: calls, live storages, and who keeps each for backward.

Live memory is the sum over storages that the step allocated; parameters, buffers and other tensors
that outlive the step are *resident* and left out.  Bytes are exact; what a caching allocator adds by
rounding up to 512 is kept apart as *waste*, so that the exact part stays affine in the micro-batch.

What is kept from forward to backward is charged to calls: K_j to call j where blocks keep their activations, R_j where
they are recomputed (`Ledger.turn`).  With L the live bytes, an *event* of call c is

    L - sum(K_j for j < c)          of a pass that recomputes nothing; R_j of one that recomputes every block

taken at the start of c's forward or backward and after each allocation in it; the peaks of c are the
maxima of its events.

Recomputed selectively, a block keeps beside R_j what its matrix products and attention return
(`profiler.selective_recomputation`): of a third kind of pass that is charged to the calls that made it (`kept`), unless
R_j has it, as the input of another block.

A plan recomputes some blocks and keeps others, and adds up charges accordingly.  So a storage is charged once, to whom
holds it either way: the code around blocks, or a block that saves its own input, which recomputation holds on to.  If
there is nobody, it is charged to the call that saves it where its block is kept, and to the block that takes it where
that is recomputed.  Several blocks that take it, as they take a mask, hold it once: the first is
charged if any of them is recomputed, itself or not.

A model that makes a list of what it hands to blocks holds that through its forward, whether they are recomputed or not.
That is in the events of the forward, not in K_j, and in R_j, as it is there in backward; so of R_j it is *held*, and
in forward events are taken less R_j without it.  The other way round, what a block returns may be in K_j, as the block
saves it, and not in R_j.  If the model's forward holds that on, events of calls after the last block lack it where that
is recomputed: what is released only after the highest of them, in passes that recompute more than in the others, counts
negatively as held.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from profiler.byte_sizes import ALLOCATION_BYTES
from profiler.trace.autograd_order import next_number, running_number, without_own_node
from profiler.trace.call_records import CallRecord, Ending, Execution, Opening
from profiler.trace.live_storage import NO_CHARGE, NOBODY, Charge, LiveStorage


def needs_gradient(tensors: Iterable[Tensor]) -> bool:
    """Return whether what is computed of the tensors now gets gradients for one of them."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class Ledger:
    """The record that the meter fills: first a forward, then, after `turn`, its backward."""

    def __init__(self) -> None:
        self.in_backward = self.is_running_again = False
        self.call = CallRecord(NOBODY, None)
        """The call that runs now; the first waits for its operator."""
        self.tally = self.call.forward
        self.index = 0
        self.calls = [self.call]
        self.executions: list[Execution] = []
        self.block: int | None = None
        """The block execution that runs now."""
        self.entered = dict[int, tuple[str, bool]]()
        """By operator: path of its module that began last, until a call of it does, and whether that was handed nothing
        that needs a gradient."""
        self.edges: set[tuple[int, int]] = set()
        self.live: dict[int, LiveStorage] = {}
        self.resident: dict[int, int] = {}
        """Owner (operator or NOBODY) of each storage that outlives the step."""
        self._starts = [next_number()]
        self._saves: list[tuple[LiveStorage, int, int | None]] = []
        self._pins: list[torch.UntypedStorage] = []
        self._held = set[int]()
        """Keys of the storages that earlier steps left."""
        self._charged: dict[int, tuple[LiveStorage, list[tuple[CallRecord, str, Charge]]]] = {}
        """By `id` of a storage: that, so that no other gets its `id`; to which calls it was charged, as what, and how
        much."""
        self._ended: tuple[int | None, Any] = (None, None)
        """The block execution that ended last, until the next call begins, and what recomputation holds of it."""
        self._tail: list[tuple[int, int]] = []
        """Numbers of the events after the last block, and the live bytes of each."""
        self._released: list[LiveStorage] = []
        """What has died after the last block."""
        self._opening: Opening | None = None
        """Of the block whose code before its first call runs now, forward or back."""
        self._sums: list[LiveStorage] = []
        """Of gradients that waited with those that the current call's backward has returned so far."""
        self._bytes = self._waste = self._marks = 0
        self.outlived: tuple[LiveStorage, ...] = ()
        self.left = NO_CHARGE
        """What outlives the step, in the model or in reference cycles, and is in no event; known when it is over."""

    # --- calls ------------------------------------------------------------------------------------

    def begin(self, operator: int, number: int) -> None:
        """Begin a call; its autograd nodes have numbers from `number` on (`first_number`)."""
        self._note_holders()
        module, late = self.entered.get(operator, ("", False))
        self.entered[operator] = "", late
        if self.call.operator == NOBODY:
            self.call.operator, self.call.block, self.call.module, self.call.late = operator, self.block, module, late
            if not self.tally.events:
                self.mark()
            self._open()
            return
        self.call = CallRecord(operator, self.block, module=module, late=late)
        self.tally = self.call.forward
        self.index = len(self.calls)
        self.calls.append(self.call)
        self._starts.append(max(number, self._starts[-1]))
        self.attribute_saves()
        self._open()
        self.mark()

    def _open(self) -> None:
        """Note what a block did before the call that begins, if that is its first."""
        opening, self._opening = self._opening, None
        if self.block is not None and opening is not None:
            execution = self.executions[self.block]
            execution.opening = (self.call.forward.events or [self._bytes])[0] - execution.entered
            opening.begins = execution.handover.begins
            self.call.opening = opening if self.index else None  # all that comes before the second call is the first's

    def end_block(self, held: Any) -> None:
        """Note that a block has ended, and what would be held for it to run again, as its input is offloaded."""
        self._ended = self.block, held

    def _note_holders(self) -> None:
        """Note whether anything holds the input of the block that has ended."""
        number, _ = self._ended
        if number is not None and number != self.block and (lone := self.executions[number].lone):
            lone.note_holders()
        self._ended = None, None

    def leave(self, *, module: bool = True) -> None:
        """Note that the forward of the current call's module, or of its block, has ended."""
        number, inside = next_number(), len(self.call.forward.events)
        self.call.block_end = Ending(number, inside)
        if module or self.call.module_end.number is None:
            self.call.module_end = Ending(number, inside)

    def enter_block(self, path: str, inputs: Sequence[Tensor]) -> Execution:
        """Begin an execution of a block."""
        self.block = len(self.executions)
        self._opening, late = Opening(), not needs_gradient(inputs)
        self.executions.append(Execution(path, self.storages_of(inputs), late=late, entered=self._bytes))
        for storage in self.executions[-1].inputs:
            storage.taken_by.append(self.block)
        return self.executions[-1]

    def turn(self, loss: Tensor) -> None:
        """Close the forward; what comes from now on is the backward of `loss`."""
        self.attribute_saves()
        self.call.output = loss.untyped_storage().nbytes()
        self._charge()
        self.in_backward = True
        self._starts.append(next_number())
        self.go_back_to(len(self.calls) - 1)

    def _charge(self) -> None:
        """Charge what is kept for backward to calls."""
        first = {call.block: index for index, call in reversed(list(enumerate(self.calls)))}
        # What only blocks hold that run again is dead by now.
        taken = [storage for execution in self.executions for storage in execution.inputs if storage() is None]
        for storage in (*self.live.values(), *{id(storage): storage for storage in taken}.values()):
            takers = [one for one in storage.taken_by if one in first and self.executions[one].saves]
            always = [storage.savers[None]] if None in storage.savers else []
            always += [first[one] for one in takers if one in storage.savers]
            kept = [min(always)] if always else [first[one] for one in takers][:1]
            if not always and len(takers) < 2:
                # What a block saves before its first call is its own.
                again, kept = kept, sorted(max(at, first.get(block, 0)) for block, at in storage.savers.items())[:1]
            else:
                again = kept
            for index in kept:
                if storage() is None:
                    self._charge_to(index, "shared", storage, storage.charge)
                    self.calls[index].sharers |= {*takers}
                else:
                    self._charge_to(index, "saved", storage, storage.charge)
                    if storage.is_product and self.calls[storage.producer].block == self.calls[index].block:
                        self._charge_to(index, "retaken", storage, storage.charge)
            is_held = not kept and storage.died_at in (None, self._marks)
            for index in again:
                held = replace(storage.charge, held=storage.bytes if is_held else 0)
                self._charge_to(index, "recomputed", storage, held)
            if storage.kept_by != NOBODY and None not in storage.savers and not storage.taken_by:
                index = max(storage.kept_by, first.get(storage.kept_in, 0))
                self._charge_to(index, "kept", storage, storage.charge)
        for number, execution in enumerate(self.executions):
            if execution.saves and number in first:
                self.calls[first[number]].recomputed += execution.changed
                if execution.lone is not None:
                    execution.lone.note_savers(number)
        _, peak = max(((size, mark) for mark, size in self._tail), default=(0, 0))
        for storage in self._released:
            call, died_at = self.calls[storage.producer], storage.died_at
            if died_at is not None and died_at >= peak and call.block is not None and not storage.taken_by:
                call.recomputed += Charge(held=storage.bytes)
                call.kept += Charge(held=-storage.bytes)

    def _charge_to(self, index: int, kind: str, storage: LiveStorage, charge: Charge) -> None:
        call = self.calls[index]
        setattr(call, kind, getattr(call, kind) + charge)
        self._charged.setdefault(id(storage), (storage, []))[1].append((call, kind, charge))

    def _counted_apart(self, storages: Iterable[LiveStorage]) -> Charge:
        """Return what storages take, and charge it to no call."""
        total = NO_CHARGE
        for storage in storages:
            total += storage.charge
            for call, kind, charge in self._charged.pop(id(storage), (storage, ()))[1]:
                setattr(call, kind, getattr(call, kind) - charge)
        return total

    def end(self) -> None:
        """Note that all backward is over, if there was any."""
        self._end()
        self.calls[0].ended = self._bytes if self.in_backward else None  # that of others may be over later
        for call, after in reversed([*pairwise(self.calls)]):
            if call.ended is None:  # it has no backward of its own: a module around others which begins with one
                call.ended = call.module_ended = after.ended

    def finish(
        self, recomputed: Sequence[Charge] | None = None, apart: Iterable[Tensor] = (), left: Charge | None = None
    ) -> None:
        """Take off every event what is charged to earlier calls: given what they keep if blocks are `recomputed`.

        Nor do events have what is counted `apart`, as it is there throughout every step, nor as much as outlives the
        step otherwise, or what is `left` of one that recomputes nothing: where the model has let go of that of the step
        before, an event is so much less.
        """
        elsewhere = self.storages_of([*apart])
        self.outlived = tuple(one for one in self.kept() if one not in elsewhere)
        lasting = self._counted_apart(elsewhere)
        for call in () if self.in_backward else self.calls:
            call.output -= lasting.bytes
        own = self._counted_apart(self.outlived)
        self.left = own if left is None else left
        lasting += self.left
        charges = [call.saved for call in self.calls]
        if recomputed is not None:
            charges = [one + call.kept for one, call in zip(recomputed, self.calls, strict=False)]
        before = [*accumulate(charges, initial=lasting)]
        first = {call.block: index for index, call in reversed(list(enumerate(self.calls)))}
        for base, call in zip(before, self.calls, strict=False):
            call.forward.rebase(base, in_forward=True)
            call.backward.rebase(base)
            for end in (call.module_end, call.block_end):
                end.arrived = None if end.arrived is None else end.arrived - base.bytes
            if call.opening is not None:
                call.opening.rebase(base)
            call.ended = None if call.ended is None else call.ended - base.bytes
            call.module_ended = None if call.module_ended is None else call.module_ended - base.bytes
        for number, execution in enumerate(self.executions):
            if number in first:
                execution.again.rebase(before[first[number]])

    def end_forward(self) -> None:
        """Close a forward that no backward follows: a call hands on all that is live as the next one begins."""
        self._note_holders()
        self.call.output = self._bytes
        for call, after in pairwise(self.calls):
            call.output = after.forward.events[0]

    def call_of(self, number: int) -> int | None:
        """Return the call in which the forward made an autograd node, None if it did not make it."""
        if number >= self._starts[-1]:
            return None
        if self._starts[self.index] <= number < self._starts[self.index + 1]:
            return self.index
        return max(bisect_right(self._starts, number) - 1, 0)

    def go_back_to(self, index: int) -> None:
        """Go on to the backward of a call."""
        self._end()
        self.index = index
        self.call = self.calls[index]
        self.tally = self.call.backward
        self.mark()

    def _end(self) -> None:
        """Note that the backward of the current call is over, for now."""
        self._open_back(None)
        if self.call.backward.events:
            self.call.ended = self._bytes
            self.call.module_ended = self._bytes + self._freed_by_sums()
        self._sums.clear()

    def _freed_by_sums(self) -> int:
        """Return by how many bytes what the current call's backward returned was more before it was added to others."""
        # A sum of gradients of a parameter is gone by now.
        sums = {id(storage): storage for storage in self._sums if self.live.get(storage.key) is storage}
        addends = {id(one): one for storage in sums.values() for one in storage.addends}  # or parts of one storage
        made = sum(sums[number].bytes for number in sums.keys() - addends.keys())
        return sum(one.bytes for one in addends.values() if one.died_at is not None) - made

    def add_gradients(self, addends: Sequence[Tensor], result: Tensor) -> None:
        """Note that the current call's backward has added what may be two gradients of one tensor.

        If one of them waited, which another call returned, the module's own backward may be over by then: FSDP2 takes
        it to be when all of its nodes have run.
        """
        operands = self.storages_of(addends)
        waited = any(one.producer != self.index or one.addends for one in operands)
        self.read(operands)
        for total in self.storages_of([result]) if waited else ():
            total.addends = operands
            self._sums.append(total)

    def read(self, storages: Sequence[LiveStorage]) -> None:
        """Note that an op of the current call's backward reads storages, which are no sums that it returns then."""
        for storage in storages:
            storage.addends = ()

    def _open_back(self, opening: Opening | None) -> None:
        """Note whether the backward is in an opening."""
        if self._opening not in (None, opening):
            self._opening.ended = self._bytes
        self._opening = opening

    def arrive(self, number: int) -> None:
        """Note where an autograd node whose backward runs now was made, if in the current call's forward."""
        after = self.calls[self.index + 1 :][:1]
        opening = after[0].opening if after else None
        is_in = opening is not None and number >= opening.begins and self.call_of(number) == self.index
        self._open_back(opening if is_in else None)
        for end in (self.call.module_end, self.call.block_end):
            if end.number is not None and number >= end.number and self.call_of(number) == self.index:
                end.reached = len(self.call.backward.events) + 1  # with the event that its op will be
            elif end.arrived is None:
                end.arrived = self._bytes
                if end is self.call.module_end:
                    self._sums.clear()  # what was added up so far is none of what the module's backward returns

    @contextmanager
    def running_again(self, execution: Execution) -> Iterator[None]:
        """Be in the backward of a block whose forward runs again."""
        number, ended = running_number(), self.call.module_end.number
        execution.again_in_tail = number is not None and ended is not None and number >= ended
        tally, self.tally, self.is_running_again = self.tally, execution.again, True
        self.mark()
        try:
            yield
        finally:
            self.tally, self.is_running_again = tally, False
            self.mark()

    def mark(self) -> None:
        """Take an event."""
        self._marks += 1
        if self.block is not None:
            self._tail.clear()
            self._released.clear()
        elif not self.in_backward:
            self._tail.append((self._marks, self._bytes))
        tallies = [self.tally]
        if self._opening is not None and not self.is_running_again:
            tallies.append(self._opening.backward if self.in_backward else self._opening.forward)
        for tally in tallies:
            tally.events.append(self._bytes)
            if self._waste > tally.waste:
                tally.waste = self._waste

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
            self._allocate(tensor.untyped_storage(), NOBODY)

    def hold(self, kept: Iterable[LiveStorage], *, of_this_size: bool = False) -> None:
        """Count what an earlier step left, as a cache does, as live until it dies; `of_this_size` for sure, or not."""
        for one in kept:
            storage = one()
            if storage is not None and storage._cdata not in self.resident and storage._cdata not in self.live:
                self._allocate(storage, NOBODY)
                self._held.add(storage._cdata)
                self.live[storage._cdata].is_read = of_this_size

    def use(self, storages: Sequence[LiveStorage]) -> None:
        """Note that the current call reads the storages."""
        for storage in storages:
            storage.is_read = True
            if storage.producer not in (self.index, NOBODY):
                self.edges.add((storage.producer, self.index))
                if self.block is not None and storage.taken_by[-1:] == [self.block]:
                    self.executions[self.block].used.add(id(storage))
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
                    storage.producer, storage.handed, storage.is_product = self.index, False, False
            elif key not in self.resident:
                self._allocate(tensor.untyped_storage(), self.index)
                fresh = True
        if fresh:
            self.mark()
        return fresh

    def keep(self, outputs: Sequence[Tensor], *, kept: bool) -> None:
        """Note that an op made what the block that runs keeps, if `kept`, or would keep, until it has run again."""
        for storage in self.storages_of(outputs):
            storage.is_product = True
            storage.kept_by, storage.kept_in = self.index if kept else NOBODY, self.block

    def storages_of(self, tensors: Sequence[Tensor]) -> tuple[LiveStorage, ...]:
        """Return the tensors' live storages, each once."""
        keys = dict.fromkeys(tensor.untyped_storage()._cdata for tensor in tensors)
        return tuple(self.live[key] for key in keys if key in self.live)

    def made(self) -> tuple[LiveStorage, ...]:
        """Return what the step made that is still alive."""
        return tuple(storage for storage in self.live.values() if storage.producer != NOBODY)

    def kept(self) -> tuple[LiveStorage, ...]:
        """Return what the model holds on to from step to step; it may hold more, of steps of other sizes.

        A step of another size finds nothing in a cache, and makes its own: then only what it read is as old.
        """
        made = self.made()
        held = [one for one in self.live.values() if one.producer == NOBODY]  # or fed
        return (*made, *(one for one in held if one.is_read or not made))

    def _allocate(self, untyped: torch.UntypedStorage, producer: int) -> None:
        storage = LiveStorage(untyped, self._release)
        storage.key = untyped._cdata
        storage.bytes = untyped.nbytes()
        storage.waste = -storage.bytes % ALLOCATION_BYTES
        storage.producer, storage.kept_by, storage.kept_in = producer, NOBODY, None
        storage.savers, storage.taken_by = {}, []
        storage.handed, storage.is_read, storage.is_product, storage.died_at = False, False, False, None
        storage.addends = ()
        self.live[storage.key] = storage
        self._bytes += storage.bytes
        self._waste += storage.waste

    def _release(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(storage, LiveStorage)
        storage.savers.clear()
        storage.died_at = self._marks
        if not self.in_backward and storage.producer != NOBODY:
            self._released.append(storage)
        del self.live[storage.key]
        self._bytes -= storage.bytes
        self._waste -= storage.waste

    # --- what autograd saves ----------------------------------------------------------------------

    def save(self, tensor: Tensor) -> Tensor:
        """Note that autograd keeps the tensor; a pack hook for `saved_tensors_hooks`."""
        with torch._C.DisableTorchFunction():  # autograd calls this below the modes of the model
            storage = None if self.in_backward else self.live.get(tensor.untyped_storage()._cdata)
            handed_on = without_own_node(tensor)
        if self.block is not None and not self.in_backward:
            self.executions[self.block].saves = True
        if storage is not None and self.block not in storage.savers:
            # The node that saves was made just before, and may precede the op that starts its call.
            self._saves.append((storage, next_number() - 1, self.block))
        return handed_on

    def attribute_saves(self) -> None:
        """Note the calls whose nodes saved what was saved since the last op."""
        for storage, number, block in self._saves:
            storage.savers.setdefault(block, max(bisect_right(self._starts, number) - 1, 0))
        self._saves.clear()
