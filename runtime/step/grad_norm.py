"""Gradients under any mixture of strategies: their norm, and what is reduced once per step.

The norm of the whole gradient is of the shards: with g_r the shards that rank r holds and c the
number of ranks that hold the same shard,

    p < inf    ( sum_r sum_shards ||g||_p^p / c )^(1/p)        one all-reduce for the whole model
    p = inf    max_r max_shards ||g||_inf

`torch.nn.utils.clip_grad_norm_` fails on different meshes; `runtime.step.torch_clipping` makes it do the same.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.errors import OsdpError
from runtime.local_shards import LocalShard

EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""


def total_norm(shards: Sequence[LocalShard], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of the gradients of all ranks, a scalar on `device`. A collective call."""
    if norm_type <= 0:
        raise OsdpError("norm_type must be positive", got=str(norm_type), expected="2.0, 1.0 or inf")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shard in shards:
        if shard.parameter.grad is None or not shard.numel:
            continue
        local = shard.local(shard.parameter.grad)
        norm = torch.linalg.vector_norm(local, norm_type, dtype=torch.promote_types(local.dtype, torch.float32))
        norm = norm.to(device, torch.float64)
        total = torch.maximum(total, norm) if math.isinf(norm_type) else total + norm**norm_type / shard.replicas
    dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    dtype = reduce(torch.promote_types, (shard.parameter.dtype for shard in shards), torch.float32)
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


def scale_to(shards: Sequence[LocalShard], max_norm: float, norm: Tensor) -> None:
    """Scale gradients, whose norm over all ranks is given, so that it is at most `max_norm`."""
    # Always multiplied, even by 1, which needs no device-to-host copy.
    scale = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    for shard in shards:
        if shard.parameter.grad is not None:
            local = shard.local(shard.parameter.grad)
            local.mul_(scale.to(local.device, local.dtype))
