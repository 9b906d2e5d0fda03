"""Meters one forward and backward: a dispatch mode below autograd that sees every aten op.

Each op is attributed to a call (`_place`), made or run (`_measure`), and recorded in the `Ledger`.  On the
meta device an op whose output layout is known is not run at all: its outputs are made directly.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from profiler.byte_sizes import ALLOCATION_BYTES
from profiler.kept_storage import with_kept_storage
from profiler.model_graph import Recompute
from profiler.nested_tensors import tensors_in
from profiler.rerun_arguments import handed_alike
from profiler.selective_recomputation import KeptOutputs, is_kept
from profiler.simulated_ranks import without_sending
from profiler.trace.activation_ledger import Ledger, needs_gradient
from profiler.trace.autograd_order import first_number, is_checkpointed, running_number
from profiler.trace.call_records import Execution
from profiler.trace.changed_buffers import NO_CHANGES, AsBefore, BufferSite, KnownChanges, buffer_states
from profiler.trace.dataless_device import DatalessDevice
from profiler.trace.elementwise import Layout
from profiler.trace.find_operators import Group, modules_around
from profiler.trace.handover import NO_STAND_INS, Replayed, StandIn, StandIns, UnlikeError
from profiler.trace.known_values import has_data
from profiler.trace.live_storage import NOBODY, Charge, LiveStorage
from profiler.trace.lone_input import lone_input, note_products, saving_nothing, version_of_offloaded, without_offloaded
from profiler.trace.op_cost import Cost, Op, cost
from profiler.trace.op_tensors import handed_tensors, output_layouts, output_tensors, read_argument
from profiler.trace.ops_that_import import OpRunner
from profiler.trace.own_collectives import own_collective
from profiler.trace.own_reruns import run_again
from profiler.trace.parameter_gradients import ParameterGradients
from profiler.trace.same_dtypes import check_dtypes
from profiler.trace.shapes import META, Layouts, make, predict
from profiler.trace.uncompiled_mode import UncompiledMode
from profiler.trace.written_parameters import WrittenParameters


class Known(NamedTuple):
    """What an op does with arguments of given shapes, types and values."""

    cost: Cost
    layouts: Layouts | None
    """How to make its outputs without running it, None if it has to be run."""


Memo = dict[tuple[Any, ...], Known]
"""By op and description of its arguments (`_read`)."""


_CALLING = vars(sys.modules[nn.Module.__module__])
"""The names of the file whose code calls forwards as modules are called."""
_NONE = frozenset[int]()


class Meter(UncompiledMode):
    """Meters what runs under it into `ledger`. Use once: a forward, `turn`, its backward, `finish`."""

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Group],
        blocks: Sequence[str],
        memo: Memo,
        device: DatalessDevice,
        *,
        recompute: Recompute = Recompute.NOTHING,
        stand_ins: StandIns = NO_STAND_INS,
        repeated: Container[str] = (),
        bounded: Sequence[Execution] = (),
        changed: KnownChanges = NO_CHANGES,
        told_apart: frozenset[int] = _NONE,
        rerun: Container[str] = (),
    ) -> None:
        """`memo` caches the results for ops across meters; tensors are on `device`.

        On the meta device outputs of known layout are made without running the op.
        Backward recomputes every block as `recompute` says.  Of some executions of blocks, only `stand_ins` run.
        Blocks in `repeated` run several times: they are no units and have no boundary, nor has any if their executions
        have been seen `bounded`.  Recomputed ones have again what they have `changed` as it was.  Calls say which
        parameters they read of those whose storages have the keys `told_apart`.  Blocks that the model itself runs
        again in its backward (`rerun`) are not recomputed.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.ops = OpRunner(self.ledger.live)
        self.ran: dict[str, None] = {}
        """Paths of the modules whose forward ran."""
        self.read_outside: dict[int, set[str]] = {}
        """By operator whose parameters were read while no module of theirs ran: paths of the modules that ran."""
        named = dict(module.named_parameters())
        parameters = [[named[name] for name in group.parameters] for group in groups]
        self.gradients = ParameterGradients(parameters)
        self._operators = {path: index for index, group in enumerate(groups) for path in group.modules}
        self._around = modules_around(self._operators)
        """Paths of the modules that have operators inside."""
        self._blocks, self._memo = blocks, memo
        self._data, self._synthesize, self._describe = device.data, device.synthesize, device.describe
        self._recompute = recompute
        self._kept: KeptOutputs | None = None
        """Of the block that runs, or runs again, if that is recomputed selectively."""
        self._stand_ins, self._repeated, self._bounded, self._rerun = stand_ins, repeated, bounded, rerun
        self._module, self._known_changes, self._told_apart = module, changed, told_apart
        self.rerun: dict[str, None] = {}
        """Paths of modules that the model ran again in its backward, and of blocks in a checkpoint of its own."""
        self.changed: dict[str, tuple[BufferSite, ...]] = {}
        """By block: its buffers that its forward changes, as seen where nothing is recomputed."""
        self.written = WrittenParameters(module, named)
        self._normalized = set[int]()
        """Keys of storages of running statistics that kernels have changed, which their schemas do not say."""
        self._ops, self._running = dict[OpOverload, Op](), Counter[int]()
        self._is_entering_checkpoint = False
        """Whether `checkpoint` runs and the block has not begun: torch 2.11 makes empty tensors then."""
        self._entered: tuple[int, int] | None = None
        for operator, tensors in enumerate(parameters):
            self.ledger.pin(tensors, operator)
        self.ledger.pin([*module.buffers(), *(one for one in named.values() if not one.dim())], NOBODY)

    # --- modules ----------------------------------------------------------------------------------

    def watched(self, path: str, inner: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return a forward of the module at `path` that tells the meter; None if it is not to run."""
        if self._stand_ins.are_around(path):
            return None
        operator, is_block, ledger = self._operators.get(path), path in self._blocks, self.ledger

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals is not _CALLING:
                return inner(*args, **kwargs)  # it is not the module that is called: none of its hooks run
            self.ran[path] = None
            outer, outside, run = ledger.block, self._data.module, inner
            self._data.module = path
            if operator is not None and path in self._around and not ledger.in_backward:
                run = functools.partial(self._run_around, operator, run)
            if ledger.in_backward:
                self.rerun[path] = None
                run = functools.partial(run_again, ledger, self._follow_backward, operator, inner)
            elif is_block:
                run = functools.partial(self._run_block, path, run)
            if operator is not None:
                self._running[operator] += 1
                if not ledger.in_backward:
                    with torch._C.DisableTorchFunction():
                        needed = needs_gradient(handed_tensors(args, kwargs))
                    ledger.entered[operator] = path, not needed
                    self._entered = (operator, first_number())  # the next op starts a call of it
            try:
                return run(*args, **kwargs)
            except BaseException as error:
                error.__dict__.setdefault("osdp_path", path)
                raise
            finally:
                ledger.block, self._data.module = outer, outside
                if operator is not None:
                    self._leave(operator)
                if is_block and not ledger.in_backward:
                    ledger.leave(module=False)  # of its last call, what follows is the code around blocks

        return forward

    def _run_block(self, path: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward, or a stand-in."""
        # Modes for functions are not for the meter's own questions of tensors.
        with torch._C.DisableTorchFunction():
            execution = self.ledger.enter_block(path, handed_tensors(args, kwargs))
            if not self._recompute and is_checkpointed():
                self.rerun[path] = None
            execution.lone = lone_input(args, kwargs, self.ledger.live)
        run = functools.partial(_WAYS.get(self._recomputed(path), Meter._checkpointed), self, inner, execution)
        if path in self._repeated:
            return run(*args, **kwargs)
        assert self.ledger.block is not None
        bounded = self._bounded[self.ledger.block].handover if self._bounded else None
        with torch._C.DisableTorchFunction():
            args, kwargs = execution.handover.hand(args, kwargs, bounded)
            if (replayed := self._stand_ins.executions.get(self.ledger.block)) is not None:
                out = self._stand_in(execution, replayed)
                if self._recompute is Recompute.OFFLOADED:
                    self.ledger.end_block(without_offloaded(args, kwargs))
                return out
        out = run(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            execution.made = self.ledger.storages_of(execution.handover.returned(out, self._is_made))
        return out

    def _recomputed(self, path: str) -> Recompute:
        """Return what of a block runs again, beside what the model runs again itself."""
        return Recompute.NOTHING if path in self._rerun else self._recompute

    def _run_around(self, operator: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of an operator that is around others, from a call of it to a call of it.

        The runtime gathers its parameters before that forward, and shards them after it, whoever reads them between.
        """
        ledger = self.ledger
        if self._entered is not None and not ledger.in_backward:  # else a copy of its buffers has begun it
            ledger.begin(operator, first_number())
            self._entered = None
        out = inner(*args, **kwargs)
        if not ledger.in_backward and ledger.call.operator != operator:
            ledger.begin(operator, first_number())
        return out

    def _is_made(self, tensor: Tensor) -> bool:
        """Return whether the step made a tensor, and nothing is known of its values."""
        return tensor.untyped_storage()._cdata in self.ledger.live and not self._data.values.knows(tensor)

    def _stand_in(self, execution: Execution, replayed: Replayed) -> Any:
        """Hand on what a block does that is not run: one call of what will be several."""
        ledger, self._entered = self.ledger, None
        like = ledger.executions[replayed.first]
        ledger.begin(replayed.operator, first_number())
        execution.saves = replayed.saves
        if len(execution.inputs) != len(like.inputs):
            raise UnlikeError
        ledger.use([own for own, other in zip(execution.inputs, like.inputs, strict=True) if id(other) in like.used])
        if self._recomputed(execution.path):
            holds = replayed.saves and self._recompute is not Recompute.OFFLOADED
            held, made = execution.inputs if holds else (), list[int]()
        else:
            pairs = zip(execution.inputs, like.inputs, strict=True)
            held = tuple(own for own, other in pairs if replayed.first in other.savers)
            made = [place for place, one in enumerate(like.made) if replayed.first in one.savers]
        kept = {storage.key: storage for storage in held}
        tensors = [one for one in tensors_in(execution.handover.leaves) if kept.pop(one.untyped_storage()._cdata, None)]
        last = functools.partial(ledger.executions.__getitem__, replayed.last)
        out = StandIn(like.handover, last, tensors, made, self._make_unknown).run(execution.handover)
        note_products(execution.inputs, ledger.storages_of(tensors_in(out)), like.made)
        return out

    def _make_unknown(self, layout: Layout) -> Tensor:
        """Make a tensor of which nothing is known, not even that it is empty."""
        device = META if self._synthesize else torch.device("cpu")
        made = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device)
        self._data.values.forget(made)
        return made

    def _checkpointed(self, inner: Callable[..., Any], execution: Execution, *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward, to be run again in backward as the runtime does."""
        kept = KeptOutputs() if self._recompute is Recompute.SELECTIVE else None
        places = self._known_changes, self._module, execution.path
        again = AsBefore(self._follow_backward, self._running_again(execution, kept), *places)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._is_entering_checkpoint = False
            return inner(*args, **kwargs)

        run, args, kwargs = handed_alike(forward, args, kwargs)
        self._is_entering_checkpoint = True
        try:
            with set_checkpoint_early_stop(execution.path not in self._repeated):  # the runtime stops units early
                return checkpoint(run, *args, **again.settings(self._keeping(kept)), **kwargs)
        finally:
            self._is_entering_checkpoint = False
            again.end_first()

    def _saving_nothing(self, inner: Callable[..., Any], execution: Execution, *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward that no backward will follow."""
        version, held = version_of_offloaded(args, kwargs), without_offloaded(args, kwargs)
        with saving_nothing():
            output = inner(*args, **kwargs)
        if version_of_offloaded(args, kwargs) != version:  # changed in place, it is not what the block was handed
            execution.lone = None
        self.ledger.end_block(held)
        return output

    def _watching_buffers(self, inner: Callable[..., Any], execution: Execution, *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward, and note which of its buffers it changes."""
        block = self._module.get_submodule(execution.path)
        before = buffer_states(block, self.written.last)
        output = inner(*args, **kwargs)
        now = buffer_states(block, self.written.last) if before else {}
        sites = [site for site in before if before[site] != now.get(site) or before[site][1] in self._normalized]
        for site in sites:
            size = before[site][3]
            execution.changed += Charge(size, -size % ALLOCATION_BYTES)
        self.changed[execution.path] = tuple(dict.fromkeys([*self.changed.get(execution.path, ()), *sites]))
        return output

    @contextmanager
    def _keeping(self, kept: KeptOutputs | None) -> Iterator[None]:
        """Be in the forward of a block that keeps, or takes up again, outputs of some operations."""
        before, self._kept = self._kept, kept
        try:
            yield
        finally:
            self._kept = before

    @contextmanager
    def _running_again(self, execution: Execution, kept: KeptOutputs | None) -> Iterator[None]:
        """Be in the backward of the first node that needs what the block did not keep."""
        self._follow_backward()
        with self.ledger.running_again(execution), self._keeping(kept):
            yield
        if kept is not None:
            kept.end()

    def _leave(self, operator: int) -> None:
        """Note that the forward of a module of `operator` has ended."""
        self._running[operator] -= 1
        if not self.ledger.in_backward and self.ledger.call.operator == operator:
            self.ledger.leave()
        if self._entered is not None and self._entered[0] == operator:
            self._entered = None

    def finish(self) -> None:
        """Drop the parameter gradients that are left."""
        self.gradients.drop_all()

    # --- ops --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (op := self._ops.get(func)) is None:
            op = self._ops[func] = self._describe(func)
        try:
            if types:  # subclasses, whose own code may call functions that modes see
                return self._see(func, op, args, kwargs or {})
            with torch._C.DisableTorchFunction():  # modes for functions are for what the model asks
                return self._see(func, op, args, kwargs or {})
        except BaseException as error:
            # Noted on the exception: holding it would hold its frames, and with them tensors.
            error.__dict__.setdefault("osdp_op", func)
            raise

    def _see(self, func: OpOverload, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what an op returns."""
        if op.passive or self._is_entering_checkpoint:
            return op.call(*args, **kwargs)
        if self._kept is not None:
            if op.product and is_kept(func, args, kwargs):
                return self._keep(self._kept, func, op, args, kwargs)
            if op.writes and not self.ledger.is_running_again:
                self._kept.note_changes(func, args, kwargs)
        first = op.statistics
        if first is not None and args[first] is not None and args[first + 2]:
            self._normalized.update(one.untyped_storage()._cdata for one in args[first : first + 2])
        return self._measure(func, op, args, kwargs)

    def _keep(self, kept: KeptOutputs, func: OpOverload, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an op whose output the block keeps, or return what it returned before."""
        again = self.ledger.is_running_again
        if again and (before := kept.take(func)) is not None:
            return before
        out = self._measure(func, op, args, kwargs)
        if not again:
            self.ledger.keep(output_tensors(out), kept=True)
            kept.add(func, out)
        return out

    def _measure(self, func: OpOverload, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        description: list[Any] = [op]
        tensors: list[Tensor] = []
        for arg in args:
            read_argument(arg, description, tensors)
        for name, arg in kwargs.items():
            description.append(name)
            read_argument(arg, description, tensors)
        foreign = self._place(op, tensors)
        if op.writes:
            self.written.note(func, args, kwargs)
        if op.data.is_collective and len(foreign) in (0, len(tensors)):
            self.ledger.tally.send(own_collective(func, args, kwargs))
        if self._synthesize:
            if foreign and len(foreign) == len(tensors):  # constants of the model, which have data
                out = without_sending(func, args, kwargs) if op.data.is_collective else func(*args, **kwargs)
                self._data.follow(func, op.data, args, kwargs, tensors, out)
                return out
            if foreign:  # constants that meet traced tensors
                args, kwargs = tree_map_only(Tensor, self._data.values.moved, (args, kwargs))
                return self.__torch_dispatch__(func, (), args, kwargs)
        if op.data.asks and (answer := self._answered(func, op, args, kwargs, tensors)) is not NotImplemented:
            return answer
        if self._synthesize and op.has_device and (not tensors or kwargs.get("device") is not None):
            kwargs = {**kwargs, "device": META}
        known = self._memo.get(key := tuple(description))
        if known is None:
            check_dtypes(func, tensors)
        layouts = known.layouts if known else predict(func, args, kwargs) if self._synthesize else None
        if layouts is not None:
            out = make(layouts)
        elif op.in_place and self._synthesize:
            out = args[0]
        else:
            out = self.ops.run(func, args, kwargs)
        if op.keeps_storage:
            out = with_kept_storage(func, args, out)
        self._data.follow(func, op.data, args, kwargs, tensors, out)
        outputs = output_tensors(out)
        fresh = self.ledger.produce(outputs)
        if op.adds and self.ledger.in_backward and not self.ledger.is_running_again:
            self.ledger.add_gradients(tensors, outputs[0])
        is_product = fresh and op.product and not self._recompute and self.ledger.block is not None
        if is_product and is_kept(func, args, kwargs):
            self.ledger.keep(outputs, kept=False)
        if known is None:
            if layouts is None and self._synthesize and fresh and not op.in_place:
                layouts = output_layouts(out)
            known = self._memo[key] = Known(cost(op, tensors, outputs, args, kwargs, out), layouts)
        if fresh or op.writes:
            self.ledger.tally.spend(known.cost)
        return out

    def _answered(
        self, func: OpOverload, op: Op, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        """Return what an op returns whose output depends on data, or NotImplemented if that one does not."""
        if func is torch.ops.aten.index.Tensor:
            indices = self._data.selected(args[1])
            if indices is None:
                return NotImplemented
            self.ledger.produce(output_tensors(indices))
            return self._measure(func, op, (args[0], indices), kwargs)
        out = self._data.answer(func, args, kwargs, tensors)
        if out is not NotImplemented:
            outputs = [tensor for tensor in output_tensors(out) if not has_data(tensor)]
            self.ledger.produce(outputs)
            self.ledger.tally.spend(cost(op, tensors, outputs, args, kwargs, out))
        return out

    # --- calls ------------------------------------------------------------------------------------

    def _place(self, op: Op, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Find the call that an op on `tensors` belongs to; return the tensors that are not of this trace."""
        live, resident = self.ledger.live, self.ledger.resident
        reads: list[int] = []
        keys = _NONE
        used: list[LiveStorage] = []
        foreign: list[Tensor] = []
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            storage = live.get(key)
            if storage is not None:
                used.append(storage)
            elif (owner := resident.get(key)) is not None:
                if owner != NOBODY:
                    reads.append(owner)
                    if key in self._told_apart and tensor.requires_grad and torch.is_grad_enabled():
                        keys |= {key}
            elif self._synthesize and not tensor.is_meta:
                foreign.append(tensor)
            else:
                self.ledger.pin((tensor,), NOBODY)
        if self.ledger.in_backward:
            if not self.ledger.is_running_again:
                self._follow_backward()
                if not op.adds:
                    self.ledger.read(used)
        else:
            self._follow_forward(reads, tensors)
            self.ledger.call.reads |= keys
            self.ledger.attribute_saves()
            self.ledger.use(used)
        return foreign

    def _follow_forward(self, reads: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Begin a call if an operator was entered, or if only others' parameters are read."""
        strange = bool(reads) and self.ledger.call.operator not in reads
        if self._entered is not None and (not strange or self._entered[0] in reads):
            self.ledger.begin(*self._entered)
            self._entered = None
        elif strange:
            # The op's node, if it has one, was made before the op reached us.
            made = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            self.ledger.begin(reads[0], first_number() - made)
            self._entered = None
        self.ledger.call.reads_parameters |= self.ledger.call.operator in reads
        for operator in reads:
            if not self._running[operator]:
                self.read_outside.setdefault(operator, set()).add(self._data.module)

    def _follow_backward(self) -> None:
        """Go to the call whose forward made the running node; parameter gradients of calls after it are done."""
        if (number := running_number()) is None:  # outside of any node: the gradient of the loss itself
            return
        if (index := self.ledger.call_of(number)) is not None and index != self.ledger.index:
            # Of calls between, too: of a sum with a parameter no op runs back.
            for call in self.ledger.calls[self.ledger.index : index : -1] or (self.ledger.call,):
                self.gradients.drop(call.operator)
            self.ledger.go_back_to(index)
        self.ledger.arrive(number)


_WAYS = {Recompute.NOTHING: Meter._watching_buffers, Recompute.OFFLOADED: Meter._saving_nothing}
"""How blocks run in passes in which they do not run again."""
