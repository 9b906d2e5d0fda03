"""On-demand communication under FSDP1: the calls of the library ODC, on `FullyShardedDataParallel`.

No class or function of PyTorch is patched; what each unit of a model does in another way is set on that unit
alone (`osdp.odc.fsdp.flat_unit`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._flat_param import FlatParamHandle

from osdp.odc.fsdp.flat_unit import FlatUnit
from osdp.odc.fsdp.session import Session, Wrapped, check_neighbours, finish, session_of, stop
from osdp.odc.options import options
from profiler.errors import OsdpError

__all__ = ["patch_fsdp1", "pre_minibatch_start", "pre_optimizer_step", "stop"]

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


def patch_fsdp1() -> None:
    """Check that this PyTorch has what is needed. May be left out: FSDP1 stays as it is.

    Raises OsdpError if FSDP1 gathers in another way than on-demand communication knows.
    """
    if not hasattr(FlatParamHandle, "_all_gather_flat_param"):
        raise OsdpError("this PyTorch gathers FSDP1's parameters in another way", expected="torch 2.11 to 2.13")


def pre_minibatch_start(model: nn.Module) -> None:
    """Publish the parameters of a model; as `osdp.odc.fsdp.fsdp2.pre_minibatch_start`. A collective call."""
    session = session_of(model) or Session(_wrapped(model), options())
    session.start()


def pre_optimizer_step(model: nn.Module, micro_batches: int | None = None) -> None:
    """Complete the gradients; as `osdp.odc.fsdp.fsdp2.pre_optimizer_step`. A collective call.

    `model` may also be the module that FSDP1 wraps.
    """
    finish("fsdp1", model, micro_batches)


def _wrapped(model: nn.Module) -> Wrapped:
    if not isinstance(model, FullyShardedDataParallel):
        raise OsdpError("this model is not wrapped", got=type(model).__name__, expected="FullyShardedDataParallel(...)")
    wrapped = ((name, part) for name, part in model.named_modules() if isinstance(part, FullyShardedDataParallel))
    modules = {name: part for name, part in wrapped if part._handle is not None}
    _check(modules)
    if not model.check_is_root():  # which initialises the model, if its first forward has not
        raise OsdpError("this is a part of a model", expected="the outermost FullyShardedDataParallel")
    first = next(iter(modules.values()))
    ranks = dist.get_process_group_ranks(first.process_group)
    check_neighbours(ranks, len(ranks))
    units = [FlatUnit(name or "root", part) for name, part in modules.items() if len(ranks) > 1]

    def each(method: Callable[[FlatUnit], None]) -> None:
        for unit in units:
            method(unit)

    device = torch.device(first.compute_device or "cpu")
    reshard, restore = partial(each, FlatUnit.reshard), partial(each, FlatUnit.restore)
    return Wrapped("fsdp1", model, units, device, len(ranks), reshard, restore, check=lambda: None)


def _check(modules: Mapping[str, FullyShardedDataParallel]) -> None:
    """Raise OsdpError for what on-demand communication cannot serve."""
    if not modules:
        raise OsdpError("this model has no parameters that FSDP1 manages")
    for name, part in modules.items():
        is_known = part.sharding_strategy in STRATEGIES
        is_alone = dist.get_world_size(part.process_group) == 1  # where FSDP1 makes it NO_SHARD
        _refuse(not (is_known or is_alone), name, str(part.sharding_strategy), ", ".join(map(str, STRATEGIES)))
        _refuse(part.cpu_offload.offload_params, name, "CPUOffload(offload_params=True)", "no offload")
        _refuse(cast(Any, part)._comm_hook is not None, name, "a communication hook", "no hook of your own")
    if len({tuple(dist.get_process_group_ranks(part.process_group)) for part in modules.values()}) > 1:
        raise OsdpError("all modules of a model must have the same process group")


def _refuse(is_so: bool, name: str, got: str, expected: str) -> None:
    if is_so:
        what = f"on-demand communication cannot serve {f'module {name}' if name else 'the root'} as it is wrapped"
        raise OsdpError(what, got=got, expected=expected)
