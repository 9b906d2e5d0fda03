"""Wrapping by `fully_shard`: all-gather before forward and backward, reduce-scatter after backward."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from profiler.errors import OsdpError
from runtime.followed_forwards import end_units_in_part, follow_forwards
from runtime.fully_shard_compat import containers_with_forward, managing_all, share_secondary_mesh
from runtime.registered_parameters import Place, refuse_others
from runtime.schedule import ScheduledUnit
from runtime.sharded_model import WrappedUnit
from runtime.strategies.ring_reduce_scatter import RingReduceScatter
from runtime.strategies.wrap_context import WrapContext
from runtime.torch_compat import (
    complete_reduction,
    forget_forward,
    free_in_every_backward,
    gather_for_every_backward,
    gathered,
    hook_nested_tensors,
    initialise,
    keep_after_forward,
    packed_parameters,
    reduce_all_or_none,
    reduce_when_rerun,
    reset_iteration,
    reshard_without,
    shard_parts_run_again,
    take_held,
)


class FullyShardedUnit(WrappedUnit):
    """Modules that `fully_shard` has wrapped together."""

    def __init__(self, unit: ScheduledUnit, module: FSDPModule, modules: Sequence[nn.Module]) -> None:
        self.module, self.modules = module, modules
        self.reduces_in_last_backward = unit.reduces_once_per_step

    def keep_after_forward(self) -> AbstractContextManager[None]:
        return keep_after_forward(self.module)

    def reshard(self) -> None:
        self.module.reshard()
        forget_forward(self.module)
        take_held(self.module)

    def complete_reduction(self) -> None:
        complete_reduction(self.module)

    def gathered(self, parameters: Mapping[int, nn.Parameter]) -> set[int]:
        return gathered(self.module, parameters)


class Root(WrappedUnit):
    """The model itself: FSDP2 keeps what belongs to a whole forward and backward with the outermost module."""

    def __init__(self, module: FSDPModule) -> None:
        self.module = module

    def set_requires_all_reduce(self, required: bool) -> None:
        self.module.set_requires_all_reduce(required)

    def reset(self) -> None:
        reset_iteration(self.module)


def wrap(unit: ScheduledUnit, context: WrapContext) -> FullyShardedUnit:
    """Shard a unit over its group, with replicas in the other groups."""
    wrapped = shard(unit, context, context.meshes.mesh(unit.strategy.group, unit.strategy.spec.stride))
    if unit.reduces_once_per_step:
        reduce_all_or_none(wrapped.module)
    if any(uses_ring(unit)):
        wrapped.module.set_custom_reduce_scatter(RingReduceScatter())
    return wrapped


def shard(unit: ScheduledUnit, context: WrapContext, mesh: DeviceMesh) -> FullyShardedUnit:
    """Call `fully_shard` on a unit's modules with this mesh."""
    strategy, modules = unit.strategy, context.modules(unit)
    own = context.materialise(unit)
    # A module may be registered at several places, and so in the modules of other units too.
    others = {parameter for module in modules for parameter in module.parameters()} - own.keys()
    secondary = context.meshes.mesh(strategy.secondary) if strategy.secondary else mesh
    pinned = CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
    try:
        with share_secondary_mesh(secondary), containers_with_forward(), managing_all(own.keys()):
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                reshard_after_forward=strategy.reshard_after_forward,
                mp_policy=context.mixed_precision(unit),
                offload_policy=pinned if strategy.offload else OffloadPolicy(),
                ignored_params=others,
            )
    except (ValueError, AssertionError, RuntimeError) as error:
        raise OsdpError(f"{unit.name} cannot be wrapped as scheduled", got=str(error).splitlines()[0]) from error
    first = modules[0]
    assert isinstance(first, FSDPModule)
    if len(packed_parameters(first)) != len(own):  # those left out would train apart on every rank
        what, expected = f"{unit.name} cannot be wrapped as scheduled", f"{len(own)} parameters"
        raise OsdpError(what, got=f"FSDP2 has taken {len(packed_parameters(first))}", expected=expected)
    support_repeated_calls(first, modules)
    refuse_others(modules, list(_places(first)))
    if len(modules) > 1:
        gather_for_every_backward(first, modules)
        reshard_without(first, modules, context.uncalled(unit))
    return FullyShardedUnit(unit, first, modules)


def _places(first: FSDPModule) -> Iterator[Place]:
    """Yield where a unit's parameters are registered."""
    for one in packed_parameters(first):
        info = one._module_info
        tied = zip(info.shared_modules, info.shared_param_names, strict=True)

        def is_known(now: nn.Parameter | None, one: Any = one) -> bool:
            rests_or_is_gathered = now is one.sharded_param or now is getattr(one, "_unsharded_param", None)
            return rests_or_is_gathered or (now is not None and id(now) in gathered(first, {id(now): now}))

        for module, name in ((info.module, info.param_name), *tied):
            yield module, name, is_known


def support_repeated_calls(first: FSDPModule, modules: Sequence[nn.Module]) -> None:
    """Let a unit's modules run several times in a step, and take one input twice, as they do without FSDP2."""
    hook_nested_tensors(first)
    reduce_when_rerun(first, modules)
    free_in_every_backward(first)
    follow_forwards(first)
    shard_parts_run_again(first, modules)


def uses_ring(unit: ScheduledUnit) -> list[bool]:
    """Return of each reduce-scatter that a unit sends whether it goes round a ring."""
    return [c.algorithm == "ring" for c in unit.collectives if c.operation == "reduce_scatter"]


def wrap_root(context: WrapContext) -> Root:
    """Make the model itself an FSDP2 module, if it is no unit, when all units are wrapped."""
    if not isinstance(context.model, FSDPModule):
        mesh = context.meshes.mesh(context.schedule.world_size)
        sharded = {one for one in context.model.parameters() if isinstance(one, DTensor)}
        fully_shard(context.model, mesh=mesh, reshard_after_forward=True, ignored_params=context.ignored | sharded)
    assert isinstance(context.model, FSDPModule)
    initialise(context.model)
    end_units_in_part(context.model)
    return Root(context.model)
