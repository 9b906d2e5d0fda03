"""Applies a schedule to a model: the model that trains, and the handle on how it is sharded.

    split linear layers -> recompute blocks -> units (fully_shard, or owner) -> the root
    or, where all is replicated, DistributedDataParallel

Units are wrapped from the inside out, as `fully_shard` demands.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from planner.strategies.spec import Strategy
from profiler.errors import OsdpError
from runtime.meshes import Meshes
from runtime.odc.collective_fallback import with_windows_or_without
from runtime.odc.step_protocol import Exchange
from runtime.parameter_places import ParameterSite, Registration, registered_buffers, registered_parameters
from runtime.schedule import Schedule, ScheduledUnit
from runtime.state.local_shards import LocalShard, piece_of
from runtime.strategies.activation_checkpointing import recompute
from runtime.strategies.alias_outputs import return_no_views
from runtime.strategies.hierarchical import communicate_in_two_phases
from runtime.strategies.one_sided import OneSidedUnit
from runtime.strategies.owner import OwnedUnit
from runtime.strategies.ring_reduce_scatter import RingReduceScatter
from runtime.strategies.split_linear import split_linear
from runtime.torch_compat import data_parallel, reset_iteration, share_secondary_mesh

COMPUTE_DTYPE = {"fp32": None, "bf16": torch.bfloat16}
"""What parameters and floating-point inputs are cast to; None: left as they are."""


_replicated: WeakSet[ShardedModel] = WeakSet()
"""Those that DistributedDataParallel runs."""
_groups_in_use: list[object] = []
"""Process groups that must outlive the reducers of DistributedDataParallel."""


@atexit.register
def _release_reducers() -> None:
    """Free reducers while Python still runs, and before the process groups that they use.

    A reducer is C++ that waits for gloo's thread, which may wait for Python's lock: on torch 2.13
    ranks were seen to hang at exit, or to be aborted.
    """
    for sharded in list(_replicated):
        sharded.runner = None
    gc.collect()
    _groups_in_use.clear()


@dataclass(eq=False)
class ShardedModel:
    """A model to which a schedule was applied."""

    module: nn.Module
    """The model itself, its parameters sharded."""
    schedule: Schedule
    """What was applied: without one-sided units where ranks cannot have windows."""
    device: torch.device
    """Where it computes."""
    pieces: tuple[LocalShard, ...] = ()
    """What this rank holds, in the order of `module.named_parameters()`."""
    runner: DistributedDataParallel | None = None
    """What to call instead of `module`: DistributedDataParallel around it."""
    find_unused_parameters: bool = False
    """Of the runner."""
    owned: list[OwnedUnit] = field(default_factory=list)
    exchange: Exchange | None = None
    """Where ranks meet that pull and push; None if no unit does."""

    @property
    def root(self) -> FSDPModule | None:
        """The root of fully_shard; None under DistributedDataParallel."""
        return self.module if isinstance(self.module, FSDPModule) else None

    def reshard(self) -> None:
        """Free what a forward left gathered; a backward that is still to come gathers it again."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for unit in self.owned:
            unit.release()

    def replicate(self) -> None:
        """Have DistributedDataParallel run the model; anew, after a backward failed. A collective call."""
        self.runner = None
        _replicated.add(self)
        if dist.group.WORLD not in _groups_in_use:
            _groups_in_use.append(dist.group.WORLD)
        self.runner = data_parallel(self.module, self.device, self.find_unused_parameters)

    def recover(self) -> None:
        """Drop what a failed backward has left, and what waits for the rest of a step that is given up.

        A collective call: what fails on one rank only cannot be mended.
        """
        if self.runner is not None:
            self.replicate()
        if self.root is not None:
            reset_iteration(self.root)
        for unit in self.owned:
            unit.reset()
        if self.exchange is not None:
            self.exchange.drop()

    def changed(self) -> None:
        """Take note that parameters were given values by other means than an optimizer."""
        if self.exchange is not None:
            self.exchange.expire()


def default_device() -> torch.device:
    """Return this rank's device: the GPU of its local rank, or the CPU where the backend is gloo."""
    # `get_backend` says nothing of a group that was made without naming one.
    backends = dist.get_backend_config() if dist.is_initialized() else ""
    if "nccl" in backends and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def apply_schedule(
    model: nn.Module,
    schedule: Schedule,
    device: torch.device | None = None,
    compile_backend: str | None = None,
    find_unused_parameters: bool = False,
) -> ShardedModel:
    """Shard a model in place, on the ranks of the default process group. A collective call.

    Parameters on the meta device become uninitialised: fill the pieces.  `compile_backend` compiles
    the blocks that are one unit each.  Raises OsdpError if there is no process group, or one of
    another size than the schedule's, or the model cannot be wrapped as scheduled.  Where ranks cannot have
    the windows of `odc`, units are sharded without, with a warning (`runtime.odc.collective_fallback`).
    """
    device = device or default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # fully_shard takes the current one
    return _Application(model, schedule, device).apply(compile_backend, find_unused_parameters)


class _Application:
    """One application of a schedule."""

    def __init__(self, model: nn.Module, schedule: Schedule, device: torch.device) -> None:
        self.model, self.device = model, device
        self.meshes = Meshes(device.type, schedule.nodes, schedule.ranks_per_node)
        self.schedule = schedule = with_windows_or_without(schedule, self.meshes)
        self.sharded = ShardedModel(model, schedule, device)
        self.one_sided: list[tuple[Strategy, OneSidedUnit]] = []
        """Units that pull and push."""
        self.dtype = COMPUTE_DTYPE[schedule.precision]
        self.policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32 if self.dtype else None)

    def apply(self, compile_backend: str | None, find_unused_parameters: bool) -> ShardedModel:
        """Do it all."""
        for split in self.schedule.splits:
            split_linear(self.model, split.module, split.count)
        recompute(self.model, self.schedule, self.sharded, compile_backend)
        self._place_buffers()
        if self.schedule.by_ddp:
            self._replicate(find_unused_parameters)
        else:
            self._wrap()
        origins = {p.path: p.origin for unit in self.schedule.units for p in unit.parameters}
        owned = {id(parameter.resting): unit for unit in self.sharded.owned for parameter in unit.parameters}
        copies = {p.path: self._copies(unit) for unit in self.schedule.units for p in unit.parameters}
        pieces = []
        for name, parameter in self.model.named_parameters():
            replicas = copies[name]
            unit = owned.get(id(parameter))
            holds = None if unit is None else unit.is_owner
            pieces.append(piece_of(origins[name], parameter, replicas, holds))
        self.sharded.pieces = tuple(pieces)
        return self.sharded

    def _copies(self, unit: ScheduledUnit) -> int:
        """Return how many ranks hold the same of a unit, where meshes do not tell."""
        if unit.strategy.spec.one_sided:
            return self.schedule.world_size // unit.strategy.group
        return self.schedule.world_size if self.schedule.by_ddp else 1

    def _place_buffers(self) -> None:
        """Move buffers to where they are used; from meta they get memory, not values."""
        for buffer in registered_buffers(self.model).values():
            old = buffer.tensor
            new = torch.empty_like(old, device=self.device) if old.is_meta else old.to(self.device)
            for module, name in buffer.places:
                setattr(module, name, new)

    def _replicate(self, may_skip: bool) -> None:
        """Run by DistributedDataParallel."""
        whole = registered_parameters(self.model)
        for unit in self.schedule.units:
            for parameter in self._materialise(unit, whole):
                parameter.data = parameter.to(self.device)
        self.sharded.find_unused_parameters = may_skip or any(unit.idle for unit in self.schedule.units)
        self.sharded.replicate()

    def _wrap(self) -> None:
        """Run by fully_shard, and by owners."""
        whole = registered_parameters(self.model)
        for unit in inside_out(self.schedule.units):
            made = self._materialise(unit, whole)
            for path in unit.modules:
                return_no_views(self.model.get_submodule(path))
            if unit.strategy.spec.wrapping == "owner":
                self._own(unit, made)
            else:
                made.clear()
                self._shard(unit)
        if not isinstance(self.model, FSDPModule):
            fully_shard(
                self.model,
                mesh=self.meshes.mesh(self.schedule.world_size),
                mp_policy=self.policy,
                reshard_after_forward=True,
                ignored_params=self._ignored(),
            )
        if self.one_sided:
            self.sharded.exchange = Exchange(self.one_sided, self.meshes, self.schedule.accumulation)

    def _ignored(self) -> set[nn.Parameter]:
        return {parameter.resting for unit in self.sharded.owned for parameter in unit.parameters}

    def _materialise(
        self, unit: ScheduledUnit, whole: dict[str, Registration[nn.Parameter]]
    ) -> dict[nn.Parameter, list[ParameterSite]]:
        """Return the unit's parameters and their places; from meta they get memory, not values.

        They leave `whole`: nothing else may hold what is about to be sharded.
        """
        home = torch.device("cpu") if unit.strategy.offload else self.device
        found = {}
        for scheduled in unit.parameters:
            registration = whole.pop(scheduled.path)
            parameter = registration.tensor
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty_like(parameter, device=home), parameter.requires_grad)
                for module, name in registration.places:
                    module.register_parameter(name, parameter)
            found[parameter] = registration.places
        return found

    def _own(self, unit: ScheduledUnit, places: Mapping[nn.Parameter, Sequence[ParameterSite]]) -> None:
        assert unit.owner is not None
        modules = [self.model.get_submodule(path) for path in unit.modules]
        mesh = self.meshes.mesh(self.schedule.world_size)
        owned = OwnedUnit(modules, places, unit.owner, mesh, self.device, self.dtype, unit.strategy.offload)
        self.sharded.owned.append(owned)

    def _shard(self, unit: ScheduledUnit) -> None:
        strategy = unit.strategy
        modules = [self.model.get_submodule(path) for path in unit.modules]
        pinned = self.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if strategy.offload else OffloadPolicy()
        # The groups of one-sided units are none of FSDP2's business: it would reduce across them in every backward.
        make_mesh = self.meshes.group_mesh if strategy.spec.one_sided else self.meshes.mesh
        mesh = make_mesh(strategy.group)
        secondary = self.meshes.mesh(strategy.secondary) if strategy.secondary else mesh
        try:
            with share_secondary_mesh(secondary):
                fully_shard(
                    modules if len(modules) > 1 else modules[0],
                    mesh=mesh,
                    reshard_after_forward=strategy.reshard_after_forward,
                    mp_policy=self.policy,
                    offload_policy=offload,
                    ignored_params=self._ignored(),
                )
        except (ValueError, AssertionError, RuntimeError) as error:
            raise OsdpError(f"{unit.name} cannot be wrapped as scheduled", got=str(error).splitlines()[0]) from error
        first = modules[0]
        assert isinstance(first, FSDPModule)
        rings = [c.algorithm == "ring" for c in unit.collectives if c.operation == "reduce_scatter"]
        if strategy.spec.wrapping == "hierarchical":
            inside, across = rings or (False, False)  # Nothing is reduced where nothing is trained.
            schedule = self.schedule
            communicate_in_two_phases(first, self.meshes, schedule.nodes, schedule.ranks_per_node, (inside, across))
        elif strategy.spec.one_sided:
            self.one_sided.append((strategy, OneSidedUnit(unit.name, first, self.dtype)))
        elif any(rings):
            first.set_custom_reduce_scatter(RingReduceScatter())


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
        raise OsdpError(
            "these units lie in each other, so neither can be wrapped first",
            got=", ".join(names),
            advice="give their operators one strategy",
        ) from None
    yield from (units[index] for index in order)
