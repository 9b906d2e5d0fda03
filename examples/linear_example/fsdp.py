"""FSDP2 as the flags say. They are those of FSDP1; what each means there, and how FSDP2 is told.

module_wrap            a unit for each linear layer
size_based             layers join until their unit has min_num_params; what remains belongs to the root
none                   one unit, the root

forward_prefetch       gather(i+1) is sent before layer i computes: `set_modules_to_forward_prefetch`
BACKWARD_PRE           gather(i-1), gradients of i, reduce(i): what FSDP2 does by itself
BACKWARD_POST          gradients of i, gather(i-1), reduce(i): `unshard` from a hook on the gradient of
                       what layer i took, which comes right before FSDP2 reduces
NONE                   gradients of i, reduce(i), gather(i-1): a unit that prefetches itself, which is
                       gathered by then, prefetches nothing

cpu_offload            `CPUOffloadPolicy`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from linear_example.flags import Options
from linear_example.model import LinearStack


def shard(model: LinearStack, options: Options, device: torch.device) -> nn.Module:
    """Shard a model over all ranks, in place, and return it."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if options.cpu_offload else OffloadPolicy()
    units = group_layers(model, options.auto_wrap_policy, options.min_num_params)
    for unit in units:
        fully_shard(list(unit), mesh=mesh, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload)
    _prefetch([unit[0] for unit in units], options.forward_prefetch, options.backward_prefetch)
    return model


def group_layers(model: LinearStack, policy: str, min_num_params: int) -> list[list[nn.Module]]:
    """Return the layers of each unit but the root's, in the order of forward."""
    if policy == "none":
        return []
    units: list[list[nn.Module]] = []
    unit: list[nn.Module] = []
    for layer in model.layers:
        unit.append(layer)
        size = sum(parameter.numel() for member in unit for parameter in member.parameters())
        if policy == "module_wrap" or size >= min_num_params:
            units.append(unit)
            unit = []
    return units


def _prefetch(units: Sequence[nn.Module], forward: bool, backward: str) -> None:
    """Say when each unit is gathered; a unit is given by its first module."""
    for before, after in pairwise(units):
        assert isinstance(before, FSDPModule)
        assert isinstance(after, FSDPModule)
        if forward:
            before.set_modules_to_forward_prefetch([after])
        if backward == "BACKWARD_POST":
            _gather_after_gradients(after, before)
    if backward != "BACKWARD_PRE":
        for unit in units:
            assert isinstance(unit, FSDPModule)
            unit.set_modules_to_backward_prefetch([unit])


def _gather_after_gradients(unit: nn.Module, before: FSDPModule) -> None:
    """Gather `before` once `unit` has its gradients."""

    def gather(_: Tensor) -> None:
        before.unshard(async_op=True)  # FSDP2 waits for it where it needs it

    def on_forward(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(gather)

    unit.register_forward_pre_hook(on_forward)
