"""Applies a schedule to a model: the model that trains, and how it is sharded.

    split linear layers -> recompute blocks -> return no views -> wrap units, each by its file in `runtime.strategies`
    -> the root
    or, where all is replicated, DistributedDataParallel

Units are wrapped from the inside out, as `fully_shard` demands.  A file in `runtime.strategies` that wraps units has

    wrap(unit, context)            wraps one and returns it as a `WrappedUnit`
    finish(context, units)         returns what all its units share, after all units are wrapped      (optional)
    substitute(schedule, meshes)   returns the schedule with other units for those unsupported here  (optional)
"""

import weakref
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

import runtime.strategies
from profiler.alias_outputs import return_no_views, wrappable
from profiler.computed_attributes import forget_computed
from profiler.errors import OsdpError
from profiler.handed_containers import ContainersHanded
from profiler.mixed_precision import autocast_forwards, cast_inputs
from profiler.opaque_parameters import is_wrapper
from profiler.plain_attributes import Replaced, plain_attributes, replaced
from profiler.reentrant_checkpoints import run_reentrant_as_others
from runtime.changed_inputs import follow_changed_inputs
from runtime.dtensor_values import follow_values
from runtime.local_shards import LocalShard, Origin, whole
from runtime.meshes import Meshes
from runtime.module_outputs import refuse_double_backward_through
from runtime.own_gpu import own_gpu
from runtime.parameter_places import registered_buffers
from runtime.registered_parameters import RegisteredParameters
from runtime.replaced_parameters import check_gradient_hooks, refuse_assigning, refuse_reads, replace_references
from runtime.schedule import Schedule, ScheduledUnit
from runtime.sharded_model import ShardedModel, WrappedUnit
from runtime.strategies import ddp, unsharded
from runtime.strategies.activation_checkpointing import recompute
from runtime.strategies.fully_sharded import wrap_root
from runtime.strategies.split_linear import split_linear
from runtime.strategies.unsharded import UnshardedParameters
from runtime.strategies.wrap_context import WrapContext


def default_device() -> torch.device:
    """Return this rank's device: the GPU of its local rank, or the CPU where the backend is gloo."""
    # `get_backend` names no backend if init_process_group was called without one.
    backends = dist.get_backend_config() if dist.is_initialized() else ""
    if "nccl" in backends and torch.cuda.is_available():
        return own_gpu()
    return torch.device("cpu")


def apply_schedule(
    model: nn.Module,
    schedule: Schedule,
    device: torch.device | None = None,
    compile_backend: str | None = None,
    find_unused_parameters: bool = False,
) -> ShardedModel:
    """Shard a model in place, on the ranks of the default process group. A collective call.

    Parameters on the meta device become uninitialised memory: the caller fills the local shards.
    `compile_backend` compiles the blocks that are one unit each.  Raises OsdpError if there is no process
    group, or one of another size than the schedule's, or the model cannot be wrapped as scheduled.
    """
    device = device or default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # fully_shard takes the current one
    meshes = Meshes(device.type, schedule.nodes, schedule.ranks_per_node)
    for wrapping in dict.fromkeys(_wrapping(unit, schedule) for unit in schedule.units):
        if hasattr(wrapping, "substitute"):
            schedule = wrapping.substitute(schedule, meshes)
    check_gradient_hooks(model, replicated=schedule.by_ddp)
    sharded = ShardedModel(model, schedule, device)
    forget_computed(model, device)  # it holds whole parameters
    originals = [weakref.ref(parameter) for parameter in model.parameters()]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for split in schedule.splits:
        split_linear(model, split.module, split.count)
    recompute(sharded, compile_backend)
    run_reentrant_as_others()
    _move_buffers(model, device)
    units = [model.get_submodule(path) for unit in schedule.units for path in unit.modules]
    wrapped = dict.fromkeys([*wrappable(model), *units])
    containers = ContainersHanded(wrapped)
    return_no_views(wrapped)
    for module in () if schedule.by_ddp else dict.fromkeys(units):
        refuse_double_backward_through(module)
    context = WrapContext(
        model=model, schedule=schedule, meshes=meshes, device=device, find_unused_parameters=find_unused_parameters
    )
    _wrap(sharded, context)
    cast_inputs(model, schedule.precision)
    for split in schedule.splits:  # it owns no parameters itself: else each slice would cast its part
        cast_inputs(model.get_submodule(split.module), schedule.precision)
    autocast_forwards(model, schedule.precision, device.type)
    if not schedule.by_ddp:
        follow_changed_inputs(dict.fromkeys(units))
    sharded.autocast.follow(dict.fromkeys(units), device.type)
    containers.surround()
    kept = set(map(id, model.parameters()))
    replace_references(model, names)
    sharded.replaced = [reference for reference in originals if id(reference()) not in kept]
    refuse_reads(sharded.replaced)
    refuse_assigning(model)
    return sharded


def _wrapping(unit: ScheduledUnit, schedule: Schedule) -> ModuleType:
    """Return the file that wraps a unit. DistributedDataParallel runs a whole model, whatever its units are."""
    if schedule.by_ddp:
        return ddp
    return unsharded if unit.is_plain else import_module(f"{runtime.strategies.__name__}.{unit.strategy.spec.wrapping}")


def _wrap(sharded: ShardedModel, context: WrapContext) -> None:
    """Wrap all units, and list what this rank holds."""
    wrapped: dict[ModuleType, list[WrappedUnit]] = {}
    unit_of: dict[str, tuple[WrappedUnit, Origin]] = {}
    if found := context.outside_units():
        outside = UnshardedParameters(list(found.values()), context)
        unit_of |= {path: (outside, whole(path, parameter.shape)) for path, parameter in found.items()}
        sharded.units.append(outside)
    # What FSDP2 must leave alone comes first: units around it would take it.
    for unit in sorted(inside_out(context.schedule.units), key=lambda unit: not unit.is_plain):
        wrapping = _wrapping(unit, context.schedule)
        made = wrapping.wrap(unit, context)
        wrapped.setdefault(wrapping, []).append(made)
        unit_of |= {parameter.path: (made, parameter.origin) for parameter in unit.parameters}
        sharded.units.append(made)
    if not context.schedule.by_ddp:
        follow_values(context.meshes.device_type)
        sharded.units.append(wrap_root(context))
    for wrapping, units in wrapped.items():
        if hasattr(wrapping, "finish"):
            sharded.units += wrapping.finish(context, units)
    shards: list[LocalShard] = []
    for path, parameter in context.model.named_parameters():
        made, origin = unit_of[path]
        if not is_wrapper(parameter):  # it has no data of its own
            shards.append(made.local_shard(origin, parameter))
    sharded.local_shards = tuple(shards)
    sharded.resting = dict(context.model.named_parameters(remove_duplicate=False))
    sharded.registered = RegisteredParameters(context.model, sharded.resting)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device, also where plain attributes have them; those on meta get uninitialised memory."""
    moved, known = dict[int, torch.Tensor](), Replaced()
    for buffer in registered_buffers(model).values():
        old = buffer.tensor
        new = torch.empty_like(old, device=device) if old.is_meta else old.to(device)
        moved[id(old)] = new
        for module, name in buffer.places:
            setattr(module, name, new)
    for module in model.modules():
        for key, value in [*plain_attributes(module)]:
            vars(module)[key] = replaced(value, torch.Tensor, lambda one: moved.get(id(one), one), known)


def inside_out(units: Sequence[ScheduledUnit]) -> Iterator[ScheduledUnit]:
    """Yield units so that a module comes after all that lie in it, and else as scheduled.

    Raises OsdpError if two units lie in each other.
    """
    wrapped_by = {path: index for index, unit in enumerate(units) for path in unit.modules}
    sorter: TopologicalSorter[int] = TopologicalSorter({index: set() for index in range(len(units))})
    for path, index in wrapped_by.items():
        outer = path
        while outer:
            outer = outer.rpartition(".")[0]
            above = wrapped_by.get(outer)
            if above is not None and above != index:
                sorter.add(above, index)
    try:
        order = list(sorter.static_order())
    except CycleError as error:
        names = sorted({units[index].name for index in error.args[1]})
        what = "these units lie in each other, so neither can be wrapped first"
        raise OsdpError(what, got=", ".join(names), advice="give their operators one strategy") from None
    yield from (units[index] for index in order)
