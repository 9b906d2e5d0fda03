"""An optimizer's state as `torch.optim` would have it over the whole model: in one process it loads as it is.

Frameworks that keep one checkpoint file save this; `runtime/state/checkpoint.py` never has a whole tensor of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from profiler.errors import OsdpError
from runtime.local_shards import LocalShard
from runtime.state.dcp_tensor import GlobalTensor
from runtime.state.optimizer_state import held_shards, optimizer_tensors, original_names, restore_group, scalar_home


@torch.no_grad()
def full_optimizer_state(optimizer: Optimizer, shards: Sequence[LocalShard], device: torch.device) -> dict[str, Any]:
    """Return what `state_dict()` is of this optimizer over the unsharded model: on rank 0, and nothing elsewhere.

    Whole tensors are gathered on a device, one at a time, and kept on the CPU.  A collective call.  Raises OsdpError
    for parameters that are not the model's, and for states that are neither laid out as the parameter nor scalars.
    """
    tensors, record = optimizer_tensors(optimizer, shards)
    described = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (described, record.values))  # a rank that owns nothing may have no states
    states: dict[str, dict[str, Any]] = {}
    for key, (shape, dtype) in {key: one for known, _ in by_rank for key, one in known.items()}.items():
        whole = tensors.get(key, GlobalTensor(shape, dtype, ())).gather(device)
        if dist.get_rank() == 0:
            name, _, state = key.removeprefix("optimizer.").rpartition(".")
            states.setdefault(name, {})[state] = whole.cpu()
    if dist.get_rank() != 0:
        return {}
    for _, values in by_rank:
        for name, others in values.items():
            states.setdefault(name, {}).update(others)
    names = [original_names(group, shards) for group in optimizer.param_groups]
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = [
        {**{option: value for option, value in group.items() if option != "params"}, "params": [*map(numbers.get, own)]}
        for group, own in zip(optimizer.param_groups, names, strict=True)
    ]
    return {"state": {numbers[name]: states[name] for name in numbers if name in states}, "param_groups": groups}


@torch.no_grad()
def load_full_optimizer_state(optimizer: Optimizer, shards: Sequence[LocalShard], state: Mapping[str, Any]) -> None:
    """Load what `full_optimizer_state` returned, or the optimizer of an unsharded model, whole on every rank.

    Each rank takes its parts.  Raises OsdpError for other parameter groups, or states of another shape.
    """
    groups, saved = optimizer.param_groups, state["param_groups"]
    names = [original_names(group, shards) for group in groups]
    sizes, saved_sizes = [len(own) for own in names], [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        what = "the optimizer's state is of other parameter groups"
        raise OsdpError(what, got=f"groups of {saved_sizes} parameters", expected=f"groups of {sizes}")
    numbers = {
        name: number
        for own, group in zip(names, saved, strict=True)
        for name, number in zip(own, group["params"], strict=True)
    }
    loaded = {}
    for shard, group in held_shards(optimizer, shards):
        found = state["state"].get(numbers[shard.name], {})
        loaded[shard.parameter] = {name: _part(name, value, shard, group) for name, value in found.items()}
    for parameter, own in loaded.items():
        optimizer.state.pop(parameter, None)
        if own:
            optimizer.state[parameter] = own
    for group, one in zip(groups, saved, strict=True):
        restore_group(group, one)


def _part(name: str, value: Any, shard: LocalShard, group: Mapping[str, Any]) -> Any:
    """Return what this rank keeps of a state of a parameter."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and (shard.shape or name == "step"):
        return value.to(scalar_home(shard.parameter, group), copy=True)
    if tuple(value.shape) != shard.shape:
        what = f"the optimizer's state `{name}` of {shard.name} has another shape"
        raise OsdpError(what, got=str(tuple(value.shape)), expected=str(shard.shape))
    part = torch.zeros_like(shard.parameter, dtype=value.dtype)
    if shard.numel:
        shard.local(part).copy_(value[shard.slices])
    return part
