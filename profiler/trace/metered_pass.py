"""One metered pass: forward, loss and backward of a module without data; of a frozen one, the forward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiler.computed_attributes import ComputedAttribute, values_of
from profiler.errors import OsdpError
from profiler.model_graph import Recompute
from profiler.model_source import Inputs, ModelSource
from profiler.nested_tensors import tensors_in
from profiler.trace.call_records import CallRecord, Execution
from profiler.trace.changed_buffers import NO_CHANGES, BufferSite, KnownChanges
from profiler.trace.compiler_import import without_compiler
from profiler.trace.dataless_device import DatalessDevice
from profiler.trace.find_operators import Group
from profiler.trace.handover import NO_STAND_INS, StandIns, UnlikeError, note_shared
from profiler.trace.live_storage import NO_CHARGE, Charge, LiveStorage
from profiler.trace.matching import matched_in_order
from profiler.trace.op_meter import Memo, Meter
from profiler.trace.questions import AskedForeverError
from profiler.trace.trace_errors import explain_trace


class NoGradientError(OsdpError):
    """The loss depends on nothing that is trained."""


class Live(NamedTuple):
    """How much is live in a pass."""

    peak_bytes: int
    all_bytes: int
    """The sum of what is live at all events."""

    def is_more_than(self, other: Live) -> bool:
        """Return whether it is more at the peak, or as much there and not less at all events together."""
        if abs(self.peak_bytes - other.peak_bytes) > 0.002 * other.peak_bytes:
            return self.peak_bytes > other.peak_bytes
        return self.all_bytes >= other.all_bytes


@dataclass(slots=True)
class Pass:
    """The record of one forward and backward."""

    calls: Sequence[CallRecord]
    edges: set[tuple[int, int]]
    executions: Sequence[Execution]
    ran: Mapping[str, None]
    """Paths of the modules whose forward ran."""
    read_outside: Mapping[int, set[str]]
    """By operator whose parameters were read while none of their modules ran: paths of the modules that ran."""
    kept: tuple[LiveStorage, ...]
    """What the model holds on to after the step and made or read in it."""
    left: Charge
    """What outlives the step otherwise than in buffers; no event has it."""
    in_cycles: Charge
    """The part of that which only reference cycles hold."""
    growth_bytes: int
    """How much more the model holds on to than before it, in whatever place."""
    changed: Mapping[str, Sequence[BufferSite]]
    """By path of a block: its buffers that its forward changes, where nothing is recomputed."""
    rerun: Mapping[str, None]
    """Paths of modules that the model itself ran again in its backward, and of blocks in a checkpoint of its own."""
    written: Mapping[str, None]
    """Names of the parameters that the forward changes."""
    got_gradients: Sequence[Sequence[bool]]
    """Of the parameters of every operator, whether they got a gradient; of blocks that stand-ins run for, False."""
    leaves_nothing: bool
    """Whether nothing of the step outlived it, be it kept or garbage in reference cycles.

    If not, a second pass is nearer to what every step does: caches are filled and modules that torch
    imports on first use are there (importing leaves cycles that hold the frames above them; those of ops go at once:
    `profiler.trace.ops_that_import`).
    """
    summed_outputs: bool
    """Whether the loss is the sum of all outputs, as none is a scalar."""
    in_outputs: Collection[str]
    """Names of the parameters that outputs depend on, of which a loop may make a loss; only known if some got no
    gradient."""

    @property
    def sums(self) -> list[int]:
        """For each call, the sum of all that is measured of it: on a line in the micro-batch if all of that is."""
        return [call.saved.bytes + call.output + call.forward.sum + call.backward.sum for call in self.calls]

    @property
    def live(self) -> Live:
        """What is live, which tells steps that take more from others."""
        before = [*accumulate((call.saved.bytes for call in self.calls), initial=self.left.bytes)]
        events = [
            base + event
            for base, call in zip(before, self.calls, strict=False)
            for event in (*call.forward.events, *call.backward.events)
        ]
        return Live(max(events, default=0), sum(events) + before[-1])


@contextmanager
def replaced_forwards(
    root: nn.Module, replacement: Callable[[str, Callable[..., Any]], Callable[..., Any] | None]
) -> Iterator[None]:
    """Give every module the forward `replacement(path, forward)`, unless None, and put the old ones back at the end."""
    before = list[tuple[nn.Module, Any]]()
    try:
        for path, module in root.named_modules():
            if (forward := replacement(path, module.forward)) is not None:
                before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = forward
        yield
    finally:
        for module, old in before:
            module.__dict__.pop("forward", None)
            if old is not None:
                module.__dict__["forward"] = old


def trains(module: nn.Module) -> bool:
    """Return whether the module has a parameter that is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


@dataclass(frozen=True)
class PassOptions:
    """How a pass runs, and what earlier passes of the module have found."""

    groups: Sequence[Group]
    """Operators that are metered."""
    blocks: Sequence[str]
    """Paths of the blocks."""
    memo: Memo
    """Results of ops, shared by the passes of a trace."""
    charges: Sequence[Charge] | None = None
    """If blocks are recomputed: what calls are charged whose blocks keep nothing but their inputs."""
    stand_ins: StandIns = NO_STAND_INS
    """For executions of blocks that do not run, which have one call each (`profiler.trace.replay`)."""
    recompute: Recompute = Recompute.NOTHING
    """What of every block is recomputed; where its input is to be offloaded, the pass is a forward alone."""
    repeated: Container[str] = ()
    """Blocks that run several times."""
    bounded: Sequence[Execution] = ()
    """Executions of the same pass with blocks bounded: then they have no boundary here, and gradients of what they are
    handed leave them one by one.
    """
    changed: KnownChanges = NO_CHANGES
    """What forwards change, of which blocks hold copies if they are recomputed."""
    left: Sequence[LiveStorage] = ()
    """What earlier steps have left, which is live until the model lets go of it."""
    follows: bool = False
    """Whether the last of them was of this micro-batch."""
    outlives: Charge | None = None
    """What outlives the step in the same pass of another kind (`Pass.left`)."""
    computed: Sequence[ComputedAttribute] = ()
    """Attributes that hooks compute, which hold as much from step to step."""
    told_apart: frozenset[int] = frozenset()
    """Keys of storages of parameters of which calls say whether they read them."""
    rerun: Container[str] = ()
    """Blocks that the model itself runs again, and that are not recomputed."""
    reads: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """In which a step runs."""


def run_pass(
    source: ModelSource, module: nn.Module, fed: list[Inputs], device: DatalessDevice, options: PassOptions
) -> Pass:
    """Run one forward and backward of a module of `source` under the meter.

    It takes the inputs out of `fed`, so that after the step only the model can hold them.

    Raises OsdpError; UnlikeError if executions that have stand-ins cannot be replaced by them.
    """
    meter = Meter(
        module,
        options.groups,
        options.blocks,
        options.memo,
        device,
        recompute=options.recompute,
        stand_ins=options.stand_ins,
        repeated=options.repeated,
        bounded=options.bounded,
        changed=options.changed,
        told_apart=options.told_apart,
        rerun=options.rerun,
    )
    for _ in map(meter.ledger.adopt, tensors_in(fed)):  # no name here holds one on
        pass
    meter.ledger.hold(options.left, of_this_size=options.follows)
    try:
        summed, in_outputs = _run_step(module, fed, device, meter, options)
    except (OsdpError, UnlikeError) as error:
        for note in ("osdp_op", "osdp_path"):  # an op cannot be sent to other ranks
            error.__dict__.pop(note, None)
        raise
    except (Exception, AskedForeverError) as error:
        raise explain_trace(source, _where(error, meter, options), error.__dict__.get("osdp_op"), error) from error
    finally:
        meter.finish()
    apart = [tensor for _, tensor in values_of(options.computed)]
    if meter.ledger.made():  # a buffer may be another tensor after each step, of as many bytes
        apart += module.buffers()
    meter.ledger.finish(options.charges, apart, options.outlives)
    return _record(meter, options.left, summed, in_outputs)


def _run_step(
    module: nn.Module, fed: list[Inputs], device: DatalessDevice, meter: Meter, options: PassOptions
) -> tuple[bool, Collection[str]]:
    """Run forward, loss and backward.  Return whether the loss is the sum of all outputs, and `Pass.in_outputs`.

    What a step makes is held by nothing else, and gone on return unless the model keeps it.
    """
    ledger, saves_all = meter.ledger, options.recompute < Recompute.EVERYTHING
    inputs, goes_back = fed.pop(), trains(module) and options.recompute is not Recompute.OFFLOADED
    with (
        device.running(),
        matched_in_order(device.data),
        options.reads,
        without_compiler(),
        meter,
        replaced_forwards(module, meter.watched),
    ):
        hooks = torch.autograd.graph.saved_tensors_hooks(ledger.save, lambda tensor: tensor)
        with torch.enable_grad(), hooks if saves_all else nullcontext():
            output = module(*inputs[0], **inputs[1])
            meter.written.end_forward()
            loss, summed = find_loss(output) if goes_back else (None, False)
        if loss is None:
            ledger.end_forward()
        else:
            if not options.recompute and not options.bounded:  # the others are run for what these say
                note_shared(loss)
            ledger.turn(loss)
            _run_backward(loss)
        meter.finish()
        ledger.end()
        is_whole = loss is not None and not options.recompute and options.stand_ins is NO_STAND_INS
    return summed, _named_in_graph(module, output) if is_whole and meter.gradients.are_missing else ()


def _named_in_graph(module: nn.Module, output: Any) -> Collection[str]:
    """Return the names of the parameters that the tensors in an output depend on."""
    leaves = _leaves(_tensors(output))
    return {name for name, one in module.named_parameters(remove_duplicate=False) if id(one) in leaves}


def _leaves(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of what has gradients added up that tensors depend on, as autograd's graph tells."""
    nodes = [one.grad_fn for one in tensors if one.grad_fn is not None]
    seen, leaves = set(nodes), set[int]()
    while nodes:
        node = nodes.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(id(variable))
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        nodes += following
    return leaves


def _run_backward(loss: Tensor) -> None:
    """Run a backward with the modes for functions that a forward has, as blocks and checkpoints run again in it.

    `loss.backward()` and `torch.autograd.backward` turn them off; the engine is private (torch 2.11, 2.13).
    """
    run = torch.autograd.Variable._execution_engine.run_backward
    run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _where(error: BaseException, meter: Meter, options: PassOptions) -> str:
    """Return in which part of the step an exception was raised."""
    if meter.ledger.in_backward:
        return f"the backward of `{options.groups[meter.ledger.call.operator].modules[0]}`"
    path = error.__dict__.get("osdp_path")
    return f"`{path}`" if path else "the model's own forward"


def _record(meter: Meter, left: Sequence[LiveStorage], summed_outputs: bool, in_outputs: Collection[str]) -> Pass:
    """Return what was metered of a step that has ended, and what it and earlier ones have `left`."""
    ledger = meter.ledger
    leaves_nothing = not (ledger.made() or meter.ops.freed_others)
    if not leaves_nothing:
        gc.collect()  # what only a reference cycle holds is not kept
    still, before = ledger.kept(), {one.key for one in left}
    fresh_bytes = sum(one.bytes for one in still if one.key not in before)
    return Pass(
        calls=ledger.calls,
        edges=ledger.edges,
        executions=ledger.executions,
        ran=meter.ran,
        read_outside=meter.read_outside,
        kept=still,
        left=ledger.left,
        in_cycles=sum((one.charge for one in ledger.outlived if one() is None), NO_CHARGE),
        growth_bytes=fresh_bytes - sum(one.bytes for one in left if one() is None),
        changed=meter.changed,
        rerun=meter.rerun,
        written=meter.written.names,
        got_gradients=meter.gradients.arrived,
        leaves_nothing=leaves_nothing,
        summed_outputs=summed_outputs,
        in_outputs=in_outputs,
    )


def find_loss(output: Any) -> tuple[Tensor, bool]:
    """Return the scalar to differentiate, and whether it had to be made by summing all outputs.

    In this order: the output itself, `.loss` or ["loss"], the first scalar among the outputs if it depends on each
    parameter that any output depends on (`return loss, logits`), the sum of all floating outputs, of which a loop makes
    its loss (`return features, scale`).
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    only = named if isinstance(named, Tensor) else output if isinstance(output, Tensor) else None
    candidates = list(_scalars(output if only is None else only))
    loss = next((one for one in candidates if one.requires_grad), candidates[0] if candidates else None)
    floating = [tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.is_floating_point()]
    if only is None and len(floating) > 1 and (loss is None or _leaves(floating) - _leaves([loss])):
        loss = None
    summed = loss is None
    if loss is None:
        loss = torch.stack([tensor.sum() for tensor in floating]).sum() if floating else None
    if loss is None or not loss.requires_grad:
        what = "the model's loss does not depend on any trainable parameter"
        got = type(output).__name__ if loss is None else "a scalar that requires no gradient"
        expected = "an output computed from trainable parameters with gradients enabled"
        advice = "return the loss itself, undetached, and compute it outside torch.no_grad()"
        raise NoGradientError(what, got=got, expected=expected, advice=advice)
    return loss, summed


def _scalars(output: Any) -> Iterator[Tensor]:
    return (tensor for tensor in _tensors(output) if tensor.dim() == 0 and tensor.is_floating_point())


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in an output: nested tuples, lists, mappings, or an object's fields."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
    elif is_dataclass(output):
        yield from _tensors({field.name: getattr(output, field.name, None) for field in fields(output)})
