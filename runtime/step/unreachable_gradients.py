"""Refuses what autograd cannot give of sharded parameters: modules compute with gathered tensors in their place.

torch.autograd.grad(loss, parameters)    would say that they are not in the graph, or return None for each
parameter.register_hook(function)        would never be called
(loss + parameter.norm()).backward()     would fail, as the norm is a DTensor and so are all gradients

A backward of the model's own that computes with a sharded parameter is refused where it does (`ungathered_parameters`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.tensor import DTensor

from profiler.errors import OsdpError
from runtime.autograd_compat import around_backward, in_backward
from runtime.sharded_model import ShardedModel
from runtime.step.torch_clipping import ShardedGradients
from runtime.step.ungathered_parameters import naming_sharded_parameters

IN_BACKWARD = "_in_backward_optimizers"
"""What `torch.distributed.optim._apply_optimizer_in_backward` sets, whose hooks are those of autograd's nodes."""
_models: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
"""In the order in which they were made, which is that of all ranks."""


def watch_gradients(model: ShardedGradients) -> None:
    """Refuse `torch.autograd.grad` of a model's sharded parameters, until it is collected."""
    _models[model] = None
    _watch()


def check_hooks(model: ShardedModel) -> None:
    """Raise OsdpError if somebody waits for gradients that sharded parameters do not get from autograd."""
    stepped = [shard.name for shard in model.local_shards if hasattr(shard.parameter, IN_BACKWARD)]
    if stepped and not model.schedule.by_ddp:  # where a step in a backward is refused itself
        what = "optimizers in the backward of sharded parameters would never step"
        advice = "step in hooks by register_post_accumulate_grad_hook"
        raise OsdpError(what, got=", ".join(stepped[:3]), expected="steps after the backward", advice=advice)
    hooked = [shard for shard in model.local_shards if shard.parameter._backward_hooks]
    if hooked:
        computing = {id(parameter) for unit in model.units for parameter in unit.computing}
        hooked = [shard for shard in hooked if id(shard.parameter) not in computing]
    if hooked:
        what = "register_hook on a sharded parameter would never be called"
        advice = "use register_post_accumulate_grad_hook, which sees the reduced gradient of this rank's part in .grad"
        names = ", ".join(shard.name for shard in hooked[:3])
        raise OsdpError(what, got=names, expected="no hooks of gradients", advice=advice)


@cache
def _watch() -> None:
    around_backward(_watched)


@contextmanager
def _watched(losses: Sequence[Any], inputs: Sequence[Any]) -> Iterator[None]:
    _check(losses, inputs)
    with naming_sharded_parameters(in_backward=True):
        yield


def _check(losses: Sequence[Any], inputs: Sequence[Any]) -> None:
    sharded = [one for one in (*losses, *inputs) if isinstance(one, DTensor)]
    if not sharded:
        return
    wanted = set(map(id, sharded))
    shards = [shard for model in list(_models) for shard in model.local_shards if isinstance(shard.parameter, DTensor)]
    if names := [shard.name for shard in shards if id(shard.parameter) in wanted]:
        what = "autograd cannot give gradients of sharded parameters alone"
        advice = "call loss.backward() and read .grad, or plan with the pin *=replicate in fp32"
        if in_backward():
            advice = f"hand them to Function.apply if a backward of its own asks for them, and plan again; or {advice}"
        raise OsdpError(what, got=", ".join(names[:3]), expected="inputs or activations", advice=advice)
    meshes = [shard.parameter.device_mesh for shard in shards if isinstance(shard.parameter, DTensor)]
    if any(one.device_mesh in meshes for one in sharded):
        what = "the loss is a DTensor: it was computed from sharded parameters outside of the model"
        advice = "add a penalty on what this rank holds, parameter.to_local(), or use the optimizer's weight_decay"
        raise OsdpError(what, expected="a loss of what the model returned", advice=advice)
