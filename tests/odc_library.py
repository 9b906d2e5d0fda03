"""Models wrapped by FSDP1 and FSDP2 in every way that on-demand communication takes, for its tests."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from toys import Block, Blocks, batch_of, loss_of, seeded

from osdp.odc.fsdp import fsdp1, fsdp2

CPU = torch.device("cpu")
build = partial(Blocks, frozen=False)
"""Two blocks and a head; no size divides by a number of ranks above 1."""

FSDP2: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2, kept": {"reshard_after_forward": False},
    "fsdp2, bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}
FSDP1: dict[str, dict[str, Any]] = {
    "fsdp1": {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "fsdp1, kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "fsdp1, original": {"sharding_strategy": ShardingStrategy.FULL_SHARD, "use_orig_params": True},
    "fsdp1, kept, original": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
    "fsdp1, bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)},
}
WAYS = (*FSDP2, *FSDP1)


def face_of(way: str) -> ModuleType:
    """Return the calls for models that are wrapped in a way."""
    return fsdp1 if way in FSDP1 else fsdp2


def wrapped(way: str, frozen: bool = False) -> Any:
    """Return the model, its blocks and itself wrapped, without on-demand communication."""
    model: Any = seeded(partial(Blocks, frozen=frozen))
    if way in FSDP1:
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, device_id=CPU, auto_wrap_policy=policy, **FSDP1[way])
    options: dict[str, Any] = FSDP2["fsdp2"] if way == "hsdp" else FSDP2[way]
    if way == "hsdp":
        shape = (2, 2) if dist.get_world_size() == 4 else (1, 1)
        options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def patched(way: str, frozen: bool = False) -> Any:
    """Return the model wrapped, for on-demand communication."""
    model = wrapped(way, frozen)
    if way not in FSDP1:
        fsdp2.patch_lazy_init(model)
    return model


def parameters_of(model: Any) -> dict[str, Tensor]:
    """Return whole parameters under the names of the model. A collective call."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            named = dict(model.named_parameters())
            return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in named.items()}
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def clip(model: Any, max_norm: float) -> float:
    """Clip the gradients; return their norm. A collective call."""
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(max_norm))
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a memory."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def micro_batch(model: nn.Module, rank: int, number: int, divisor: float = 1.0) -> float:
    """Run forward and backward on inputs of their own; return the loss."""
    args, kwargs = batch_of(build(), rank, number)
    loss = loss_of(model(*args, **kwargs))
    (loss / divisor).backward()  # type: ignore[no-untyped-call]
    return loss.item()


def step_of_all(
    reference: nn.Module, optimizer: torch.optim.Optimizer, counts: list[int], number: int, divisor: float
) -> None:
    """Run a step of the losses of so many micro-batches of each rank, divided and summed up, in one process."""
    for rank, count in enumerate(counts):
        for k in range(count):
            micro_batch(reference, rank, 10 * number + k, divisor)
    step(optimizer)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Step and clear gradients."""
    optimizer.step()
    optimizer.zero_grad()
