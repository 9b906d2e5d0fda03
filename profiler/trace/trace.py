"""From a model to its `ModelGraph`: the pipeline of the tracer.

    build (dataless_device) -> operators (find_operators) -> a pass per micro-batch (passes, metered_pass, op_meter)
      -> lines, or parabolas, through the passes (affine_fit) -> ModelGraph (build_graph)

No tensor has data, nothing is computed, no device is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.jit import ScriptModule

from profiler.affine import Affine, Curve, growth
from profiler.alias_outputs import outputs_aliased, wrappable
from profiler.autocast import Autocast
from profiler.byte_sizes import format_bytes
from profiler.computed_attributes import computed_by_hooks, computed_forgotten, values_of
from profiler.errors import OsdpError
from profiler.garbage_collection import without_garbage_collection
from profiler.handed_containers import ContainersHanded
from profiler.linear_layers import whole_linears
from profiler.mixed_precision import COMPUTE_DTYPE, MASTER_WEIGHTS, computing_in, resting_dtypes
from profiler.model_graph import ModelGraph, Recompute
from profiler.model_source import ModelSource
from profiler.parameter_memory import shared_memory
from profiler.plain_attributes import unregistered_tensors
from profiler.reentrant_checkpoints import reentrant_as_others
from profiler.simulated_ranks import simulated_ranks
from profiler.trace.affine_fit import SIZES, StepsError
from profiler.trace.build_graph import assemble
from profiler.trace.dataless_device import DatalessDevice, FakeCpu, MetaDevice, adapt, making, training, without_logs
from profiler.trace.device_kernels import device_kernels
from profiler.trace.find_operators import Group, OtherDtypesError, find_blocks, find_groups, held_whole
from profiler.trace.functional_calls import replaced_are_read
from profiler.trace.graph_parameters import buffer_of
from profiler.trace.handed_parameters import handed_are_read
from profiler.trace.metered_pass import trains
from profiler.trace.passes import run_sizes
from profiler.trace.questions import AskedForeverError
from profiler.trace.registered_parameters import parameters_stay
from profiler.trace.trace_errors import ModelError, explained, more_telling
from profiler.trace.unregistered_reads import unregistered_reads

DEVICE_TYPES = ("cpu", "cuda")


def trace_model(
    source: ModelSource,
    precision: str = "fp32",
    device_type: str = "cpu",
    micro_batch: int | None = None,
    master_weights: str = "",
    expert_imbalance: float = 1.0,
    *,
    world_size: int | None = None,
) -> ModelGraph:
    """Measure a model's operators, calls and blocks without data and without a device.

    `precision` (`fp32`, `bf16`, `amp-bf16`, `amp-fp16`) is that of `profiler.mixed_precision`, as is
    `master_weights` (`fp32`, or empty).  `device_type` (`cpu`, `cuda`) is the type of the device whose attention and
    dropout kernels are assumed.  `micro_batch` is the only one that is of interest, if it is fixed: where costs step
    with it, they are measured there.  `expert_imbalance` is the largest load over the mean of what a router chooses
    from (`profiler.trace.data_dependent`).  `world_size` is the number of ranks that collectives of the model's own run
    over where there is no process group; None: none is made.  Raises OsdpError for a model that cannot be traced,
    naming module and op.
    """
    asked = (
        ("precision", precision, COMPUTE_DTYPE),
        ("device_type", device_type, DEVICE_TYPES),
        ("master_weights", master_weights, MASTER_WEIGHTS),
    )
    for what, got, choices in asked:
        if got not in choices:
            raise OsdpError(f"unknown {what}", got=got, expected=" or ".join(choice for choice in choices if choice))
    settings = _Settings(precision, master_weights, device_type)

    def traced(rank: int) -> ModelGraph:
        with simulated_ranks(world_size, rank):
            try:
                return _trace(source, settings, expert_imbalance, SIZES)
            except StepsError:
                if micro_batch is None:
                    raise
                return _trace(source, settings, expert_imbalance, (micro_batch,))

    graph = traced(0)
    if graph.world_size < 2 or dist.is_initialized():  # then each rank that wraps the model traces it: `osdp.prepare`
        return graph
    some = run_by_some([graph.running, traced(graph.world_size - 1).running])
    notes = (f"run on some ranks only; several ranks cannot run this model: {_listed(some)}",) if some else ()
    return replace(graph, left_out=(*graph.left_out, *some), notes=(*graph.notes, *notes))


def run_by_some(running: Sequence[Collection[str]]) -> tuple[str, ...]:
    """Return what runs on some ranks only, given the names of the operators that run on each."""
    counts = Counter(name for names in running for name in names)
    return tuple(name for name, count in counts.items() if count < len(running))


@dataclass(frozen=True)
class _Settings:
    """What a model is traced for."""

    precision: str
    master_weights: str
    device_type: str


def _trace(source: ModelSource, settings: _Settings, expert_imbalance: float, sizes: Sequence[int]) -> ModelGraph:
    # Freeing cycles at arbitrary times would make live memory irreproducible.
    with without_garbage_collection(), without_logs():
        try:
            return _traced_on(lambda: MetaDevice(expert_imbalance), source, settings, sizes)
        except ModelError as error:
            if isinstance(error.__cause__, AskedForeverError):  # it would ask another device as long
                raise
            try:
                return _traced_on(lambda: FakeCpu(expert_imbalance), source, settings, sizes)
            except ModelError as second:
                clearer = more_telling(error, second)
                raise clearer from clearer.__cause__
            except OsdpError:  # what the builder says of fake tensors; without them it had no complaint
                raise error from None


def _traced_on(
    device: Callable[[], DatalessDevice], source: ModelSource, settings: _Settings, sizes: Sequence[int]
) -> ModelGraph:
    """Trace on a new device; again, with more parameters in no operator, where operators that merge differ in dtype."""
    whole = frozenset[str]()
    while True:
        try:
            return _traced(source, settings, device(), sizes, whole)
        except OtherDtypesError as error:
            whole |= error.names


def _traced(
    source: ModelSource, settings: _Settings, device: DatalessDevice, sizes: Sequence[int], whole: frozenset[str]
) -> ModelGraph:
    """Build the model on the device, run a pass per micro-batch and return the graph; `whole` are in no operator."""
    precision, master_weights, device.stands_for = settings.precision, settings.master_weights, settings.device_type
    what, expected = f"cannot build {source.name} without data", "build() to return an nn.Module on the meta device"
    advice = (
        "if it computes with tensor values (x.item(), loading weights), do that in Python numbers "
        'or in `with torch.device("cpu")`, or after OSDP has wrapped the module'
    )
    with device_kernels(settings.device_type, device.torch_device.type), ExitStack() as until_traced:
        autocast = Autocast(settings.device_type, device.torch_device.type)
        until_traced.enter_context(autocast.standing_in())
        with explained(what, expected, advice):
            with making(device):
                module = source.build()
            _check_module(source.name, module)
            shared = shared_memory(module)
            until_traced.enter_context(computed_forgotten(module, device.torch_device))
            rested = resting_dtypes(module, precision, master_weights)
            found = find_groups(module, {name: one.rest for name, one in rested.items()}, whole)
            rested |= {name: rested[name].kept() for name in held_whole(module, found)}
            separate = {place for place, _ in unregistered_tensors(module).values()}  # a copy's views have their own
            module = adapt(module, device, {name: one.compute for name, one in rested.items()})
        whole_kinds = whole_linears(module)
        computed = computed_by_hooks(module)
        found_now = unregistered_tensors(module) if separate else {}
        made_with_it = {key: one for key, one in found_now.items() if one[0] in separate}
        mode = training(module) if trains(module) else nullcontext()  # what is only run is in the mode it is run in
        until_traced.enter_context(parameters_stay(source.name, module))
        _check_hooks(source.name, module, wrapped := wrappable(module))
        containers = ContainersHanded(wrapped if COMPUTE_DTYPE[precision] else ())
        alias_others = until_traced.enter_context(outputs_aliased(module))
        autocast.forget_before(partial(_units, module, found))
        for hooks in (computing_in(module, precision, settings.device_type), containers.surrounding()):
            until_traced.enter_context(hooks)
        with unregistered_reads(module) as read, mode, reentrant_as_others(), handed_are_read(), replaced_are_read():
            run = run_sizes(module, source, found, rested, device, sizes, computed, alias_others)
            # What a forward has put in their place is counted where it makes it.
            still_there = unregistered_tensors(module).keys() & made_with_it.keys() if made_with_it else set[int]()
            held = (*values_of(computed), *(one for key, one in made_with_it.items() if key in still_there))
            kept = tuple(buffer_of(name, tensor) for name, tensor in held)
    graph: ModelGraph = _per_sample(assemble(source, precision, module, rested, run), run.samples)
    if whole_kinds or autocast.asked:
        graph = _named(graph, whole_kinds, under_autocast=bool(autocast.asked))
    skipped = tuple(operator.name for operator in graph.operators if operator.name in run.left_out)
    notes, written = list(device.data.assumptions), tuple(run.written)
    elsewhere = (*shared, *(f"`{name}` is read through the attribute `{where}`" for name, where in read.items()))
    if elsewhere:
        notes.append(f"works only under *=replicate, given the module itself: {'; '.join(elsewhere)}")
    if written:
        notes.append(f"the model itself changes parameters, which works only under *=replicate: {', '.join(written)}")
    notes += _notes_on_layers(module, settings.device_type)
    notes += _notes_on_running(graph, run.rerun, autocast_is_off=autocast.is_off)
    for how, failure in run.failures.items():
        word = "recomputed" if how is Recompute.EVERYTHING else "recomputed selectively"
        notes.append(f"no block can be {word}: its forward, run again in the trace, failed with {failure}")
    notes += _notes_on_gradients(graph, run.beside)
    graph = _left_to_the_end(graph)
    if skipped:
        notes.append(
            f"left out of the forward of a rank on which nothing chooses them, or random numbers decide so; several "
            f"ranks cannot run this model: {_listed(skipped)}; run each on no rows there, or multiply what it adds by "
            "0, instead"
        )
    graph = replace(graph, buffers=(*graph.buffers, *kept), notes=(*graph.notes, *notes))
    graph = replace(graph, autocast=autocast.dtype_of(module))
    if device.data.runs_collectives and dist.is_initialized():
        ranks = dist.get_world_size()
        what = f"the model runs collectives itself: memory is as on {ranks} ranks, and their time is part of computing"
        graph = replace(graph, world_size=ranks, notes=(*graph.notes, what))
    return replace(graph, left_out=skipped, written=written, held_elsewhere=elsewhere, master_weights=master_weights)


def _notes_on_layers(module: nn.Module, device_type: str) -> Iterator[str]:
    """Yield what is not known of some kinds of layers."""
    parts = [*module.named_modules()]
    recurrent = [path for path, part in parts if isinstance(part, nn.RNNBase)]
    if recurrent and device_type == "cuda":
        yield (
            f"not known: what cuDNN keeps for the backward of recurrent layers and of their weights; the products of "
            f"every step are counted in its place, so memory may be too low: {', '.join(recurrent)}"
        )


def _notes_on_gradients(graph: ModelGraph, beside: Collection[str]) -> Iterator[str]:
    """Yield what is trained and not reached by the loss: modules of which nothing is, and parameters of others; and
    those `beside` it, which another output depends on."""
    if beside:
        yield (
            f"the loss that the model returns does not depend on {_listed(beside)}, and other outputs do: their "
            "gradients and optimizer states are counted, and no backward of those outputs"
        )
    missing = [(operator, one) for operator in graph.operators for one in operator.parameters if not one.used]
    if not missing:
        return
    whole = _unused(graph)
    names = _listed(operator.name if operator.name in whole else one.name for operator, one in missing)
    size_bytes = sum(one.numel * one.element_bytes for _, one in missing)
    yield (
        f"no gradient reaches {names}: none and no optimizer states are counted of these "
        f"{format_bytes(size_bytes)} of parameters, and a later step whose loss depends on them needs more; freeze "
        "what is never trained with requires_grad_(False)"
    )


def _unused(graph: ModelGraph) -> frozenset[str]:
    """Return the names of operators that run and have trained parameters, none of which the loss reaches."""
    missing = [operator for operator in graph.operators for one in operator.parameters if not one.used]
    used = {operator.name for operator in missing for one in operator.parameters if one.trainable and one.used}
    return frozenset([operator.name for operator in missing]) - used


def _left_to_the_end(graph: ModelGraph) -> ModelGraph:
    """Return a graph in which what no gradient reaches is late: FSDP2 hangs the end of a unit's backward on its first
    module, and where that is a pooler of which nothing reads, parameters and gradients of all that is wrapped with it
    stay.  In a block of which no gradient reaches what is trained, frozen layers are late too.
    """
    operators, unused = graph.operators, _unused(graph)
    if not unused:
        return graph
    trained = [any(parameter.trainable for parameter in operator.parameters) for operator in operators]
    ends = set[int]()
    for number, block in enumerate(graph.blocks):
        inside = graph.calls[block.first_call : block.last_call]
        names = {operators[call.operator].name for call in inside if trained[call.operator]}
        ends |= {number} if names and names <= unused else set()
    ranges = (range(graph.blocks[number].first_call, graph.blocks[number].last_call) for number in ends)
    of_ends = {index for indices in ranges for index in indices}
    calls = tuple(
        replace(call, late=call.late or index in of_ends or operators[call.operator].name in unused)
        for index, call in enumerate(graph.calls)
    )
    blocks = tuple(replace(one, late=one.late or number in ends) for number, one in enumerate(graph.blocks))
    return replace(graph, calls=calls, blocks=blocks)


def _notes_on_running(graph: ModelGraph, rerun: Collection[str], *, autocast_is_off: bool) -> Iterator[str]:
    """Yield what to know of blocks that the model itself runs again, and of autocast that may be off."""
    if rerun:
        count = len({block.name for block in graph.blocks})
        names = _listed(rerun) if len(rerun) == count else ", ".join(rerun)
        what = f"the model itself runs {len(rerun)} of {count} blocks again in its backward, which no plan recomputes"
        yield f"{what}: {names}"
    if autocast_is_off:
        yield (
            "a torch.autocast that was made before the trace is off, on purpose or as PyTorch finds no GPU here: if it "
            "is to be on, plan where there is a GPU, or make it in the forward, not as a decorator"
        )


def _named(graph: ModelGraph, kinds: Mapping[str, str], *, under_autocast: bool) -> ModelGraph:
    """Return a graph whose layers are of these kinds, by path, and in which those under autocast cannot be cut.

    Of the copies that autocast makes of a layer in slices nothing is known.
    """
    linear = {"Linear": "Linear under autocast"} if under_autocast else {}
    known = ((one, kinds.get(one.modules[0], linear.get(one.kind, one.kind))) for one in graph.operators)
    return replace(graph, operators=tuple(replace(one, kind=kind) for one, kind in known))


def _units(module: nn.Module, groups: Sequence[Group]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules that may be units of a plan, and of each whether it is one where blocks are whole."""
    blocks = find_blocks(module)
    inside = tuple(f"{block}." for block in blocks)
    for path in dict.fromkeys((*blocks, *(path for group in groups for path in group.modules))):
        yield module.get_submodule(path), path in blocks or not path.startswith(inside)


def _listed(names: Iterable[str]) -> str:
    """Return names with a star for each number, each once; the model, whose name is empty, in words."""
    return ", ".join(dict.fromkeys(re.sub(r"\b[0-9]+\b", "*", name) or "the model's own parameters" for name in names))


def _per_sample(part: Any, samples: int) -> Any:
    """Return a part of a graph whose lines count `samples` as one, with lines that count one."""
    if samples == 1:
        return part
    if isinstance(part, Curve):  # what a micro-batch of one sample has was not seen: the line is lifted
        scaled = part.per_sample / samples, part.per_pair / samples**2
        return growth(part.fixed + part.at_one, *scaled)
    if isinstance(part, Affine):
        return replace(part, per_sample=part.per_sample / samples)
    if isinstance(part, tuple):
        return tuple(_per_sample(item, samples) for item in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: _per_sample(getattr(part, field.name), samples) for field in fields(part)})
    return part


def _check_hooks(name: str, module: nn.Module, wrapped: Sequence[nn.Module]) -> None:
    """Raise OsdpError if one of the modules that a plan may wrap takes no hooks."""
    for inner in wrapped:
        if isinstance(inner, ScriptModule):
            path = next(path for path, one in module.named_modules() if one is inner)
            raise OsdpError(
                f"{name} has a module that TorchScript has compiled",
                got=f"`{path}`" if path else "the model itself",
                expected="layers that take forward hooks",
                advice="give OSDP the module as it was before torch.jit.script or torch.jit.trace",
            )


def _check_module(name: str, module: nn.Module) -> None:
    """Raise OsdpError for what is not a module, is lazy, or has no parameters."""
    if not isinstance(module, nn.Module):
        raise OsdpError(f"{name}: build() did not return a module", got=type(module).__name__, expected="an nn.Module")
    parameters = dict(module.named_parameters())
    for path, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            advice = "give the input sizes explicitly, as in nn.Linear instead of nn.LazyLinear"
            raise OsdpError(
                f"{name} is lazy: the shape of `{path}` is not known before its first forward", advice=advice
            )
    if not parameters:
        raise OsdpError(f"{name} has no parameters", expected="at least one: there is nothing to plan")
