"""Wrapping by DistributedDataParallel, which runs a whole model that is replicated."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist

from runtime.schedule import ScheduledUnit
from runtime.sharded_model import WrappedUnit
from runtime.strategies.wrap_context import WrapContext
from runtime.torch_compat import data_parallel

_models: WeakSet[ReplicatedModel] = WeakSet()
_groups_in_use: list[object] = []
"""Process groups that must outlive the reducers of DistributedDataParallel."""


@atexit.register
def _release_reducers() -> None:
    """Free reducers while Python still runs, and before the process groups that they use.

    A reducer is C++ that waits for gloo's thread, which may wait for Python's lock: on torch 2.13
    ranks were seen to hang at exit, or to be aborted.
    """
    for replicated in list(_models):
        replicated.runner = None
    gc.collect()
    _groups_in_use.clear()


class ReplicatedModel(WrappedUnit):
    """The model in DistributedDataParallel."""

    def __init__(self, context: WrapContext) -> None:
        self.model, self.device = context.model, context.device
        idle = any(unit.idle for unit in context.schedule.units)
        self.find_unused_parameters = context.find_unused_parameters or idle
        _models.add(self)
        if dist.group.WORLD not in _groups_in_use:
            _groups_in_use.append(dist.group.WORLD)
        self.reset()

    def reset(self) -> None:
        self.runner = None  # the old reducer goes before the new one comes
        self.runner = data_parallel(self.model, self.device, self.find_unused_parameters)

    def complete_reduction(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        has_gradient = torch.tensor([parameter.grad is not None for parameter in trained], device=self.device).int()
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)  # a rank may have left out layers
        for parameter, is_trained in zip(trained, has_gradient.tolist(), strict=True):
            if is_trained:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())


class ReplicatedUnit(WrappedUnit):
    """Parameters of which every rank holds all."""

    def __init__(self, unit: ScheduledUnit, replicas: int) -> None:
        self.replicas, self.reduces_in_last_backward = replicas, unit.reduces_once_per_step


def wrap(unit: ScheduledUnit, context: WrapContext) -> ReplicatedUnit:
    """Move a unit's parameters to the device."""
    for parameter in context.materialise(unit):
        parameter.data = parameter.to(context.device)
    return ReplicatedUnit(unit, context.schedule.world_size)


def finish(context: WrapContext, units: Sequence[WrappedUnit]) -> list[WrappedUnit]:
    """Wrap the model."""
    return [ReplicatedModel(context)]
