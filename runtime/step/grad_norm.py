"""Gradients under any mixture of strategies: their norm, and what is reduced once per step.

The norm of the whole gradient is of the shards: with g_r the shards that rank r holds and c the
number of ranks that hold the same shard,

    p < inf    ( sum_r sum_shards ||g||_p^p / c )^(1/p)        one all-reduce for the whole model
    p = inf    max_r max_shards ||g||_inf

Shards of one device, dtype and c are taken at once, by PyTorch's operations on lists (`torch._foreach_norm`), so that
the host runs a few operations for a model and not a few for each of its tensors.

`torch.nn.utils.clip_grad_norm_` fails on different meshes; `runtime.step.torch_clipping` makes it do the same.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.errors import OsdpError
from runtime.host_copies import on_device
from runtime.local_shards import LocalShard, local_data

EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""


@torch.no_grad()
def total_norm(shards: Sequence[LocalShard], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of the gradients of all ranks, a scalar on `device`. A collective call."""
    if norm_type <= 0:
        raise OsdpError("norm_type must be positive", got=str(norm_type), expected="2.0, 1.0 or inf")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (_, dtype, replicas), gradients in _alike(shards).items():
        found = torch._foreach_norm(gradients, norm_type, torch.promote_types(dtype, torch.float32))
        norms = on_device(torch.stack(found).to(torch.float64), device)
        if math.isinf(norm_type):
            total = torch.maximum(total, norms.max())
        else:
            total = total + (norms**norm_type).sum() / replicas
    dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    dtype = reduce(torch.promote_types, {shard.parameter.dtype for shard in shards}, torch.float32)
    return (total if math.isinf(norm_type) else total ** (1 / norm_type)).to(dtype)


def clip(
    shards: Sequence[LocalShard],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before. A collective call."""
    norm = total_norm(shards, norm_type, device)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise OsdpError("the gradient norm is not finite", got=str(norm.item()), advice="lower the learning rate")
    scale_to(shards, max_norm, norm)
    return norm


@torch.no_grad()
def scale_to(shards: Sequence[LocalShard], max_norm: float, norm: Tensor) -> None:
    """Scale gradients, whose norm over all ranks is given, so that it is at most `max_norm`."""
    # Always multiplied, even by 1, which needs no device-to-host copy.
    scale = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    for (device, dtype, _), gradients in _alike(shards).items():
        torch._foreach_mul_(gradients, scale.to(device, dtype))


def _alike(shards: Sequence[LocalShard]) -> dict[tuple[torch.device, torch.dtype, int], list[Tensor]]:
    """Return this rank's data of all gradients, by device, dtype and number of ranks that hold the same."""
    found: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
    for shard in shards:
        if shard.parameter.grad is not None and shard.numel:
            local = local_data(shard.parameter.grad)
            found.setdefault((local.device, local.dtype, shard.replicas), []).append(local)
    return found
