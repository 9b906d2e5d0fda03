"""State dicts under the names and shapes of the original model, whatever the strategy."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from profiler.errors import OsdpError
from profiler.opaque_parameters import is_wrapper
from runtime.local_shards import LocalShard
from runtime.parameter_places import registered_parameters
from runtime.sharded_model import ShardedModel
from runtime.state.dcp_tensor import GlobalTensor
from runtime.state.model_state import persistent_buffers

T = TypeVar("T")
BUCKET_BYTES = 25 << 20
"""Most that parameters of a state dict take together in one message; a larger one has its own."""


def local_shards_by_name(sharded: ShardedModel) -> dict[str, list[LocalShard]]:
    """Return the shards of every original parameter, tied ones under each of their names, as the model lists them.

    Without those that have no data of their own (`wrappers`).  What a forward left gathered is freed: what rests is
    what counts, and may be about to change.
    """
    sharded.reshard()
    sharded.check_registered()
    of_parameter = {id(shard.parameter): shard for shard in sharded.local_shards}
    sliced = tuple(f"{split.module}.slices." for split in sharded.schedule.splits)
    found: dict[str, list[LocalShard]] = {}
    for registration in registered_parameters(sharded.module).values():
        shard = of_parameter.get(id(registration.tensor))
        if shard is None:
            continue
        for path in registration.names:
            found.setdefault(shard.name if path.startswith(sliced) else path, []).append(shard)
    return found


def wrappers(sharded: ShardedModel) -> dict[str, nn.Parameter]:
    """Return the parameters that hold other tensors, alike on every rank; tied ones by each name."""
    registered = registered_parameters(sharded.module).values()
    return {name: one.tensor for one in registered if is_wrapper(one.tensor) for name in one.names}


def _in_order(sharded: ShardedModel, state: dict[str, T]) -> dict[str, T]:
    """Return a state dict in the order in which the original model lists its parameters and buffers.

    What the model's own hooks rename or take out of its state dict comes last.  On every rank: they may communicate.
    """
    of_parameter = {id(shard.parameter): shard.name for shard in sharded.local_shards}
    ordered: dict[str, T] = {}
    for path, value in sharded.module.state_dict(keep_vars=True).items():
        name = path if path in state else of_parameter.get(id(value), path)  # a slice of a split layer
        if name in state:
            ordered[name] = state[name]
    return ordered | {name: value for name, value in state.items() if name not in ordered}


def full_state_dict(sharded: ShardedModel, rank0_only: bool = True) -> dict[str, Tensor]:
    """Return the state dict of the original model, on the CPU, tied parameters shared; buffers are those of rank 0.

    On rank 0, or the same on every rank; elsewhere it is empty. A collective call.
    """
    keeps = not rank0_only or dist.get_rank() == 0
    by_name = local_shards_by_name(sharded)
    whole: dict[int, Tensor] = {}
    for bucket in _buckets({id(shards[0].parameter): shards for shards in by_name.values()}.values()):
        sizes = [torch.Size(shards[0].shape).numel() for shards in bucket]
        flat = torch.zeros(sum(sizes), dtype=bucket[0][0].parameter.dtype, device=sharded.device)
        parts = [part.view(shards[0].shape) for part, shards in zip(torch.split(flat, sizes), bucket, strict=True)]
        for part, shards in zip(parts, bucket, strict=True):
            for shard in shards:
                if shard.is_first and shard.numel:
                    part[shard.slices] = shard.local(shard.parameter).to(sharded.device)
        dist.all_reduce(flat)  # every element comes from one rank, so the sum is exact
        for part, shards in zip(parts, bucket, strict=True):
            if keeps:
                whole[id(shards[0].parameter)] = part.to("cpu", copy=True)
    buffers = persistent_buffers(sharded.module)
    if not keeps:
        return _in_order(sharded, {})
    state = {name: whole[id(shards[0].parameter)] for name, shards in by_name.items()}
    for name, value in buffers.items():
        buffer = value.detach().to(sharded.device, copy=True)
        if not rank0_only:
            dist.broadcast(buffer, src=0)
        state[name] = buffer.cpu()
    state |= {name: value.detach().to("cpu", copy=True) for name, value in wrappers(sharded).items()}
    return _in_order(sharded, state)


def _buckets(parameters: Iterable[list[LocalShard]]) -> Iterator[list[list[LocalShard]]]:
    """Yield parameters, of one dtype at a time, as many as are sent in one message: one each would take longest."""
    bucket: list[list[LocalShard]] = []
    filled = 0
    for shards in parameters:
        dtype = shards[0].parameter.dtype
        size_bytes = torch.Size(shards[0].shape).numel() * dtype.itemsize
        if bucket and (filled + size_bytes > BUCKET_BYTES or dtype != bucket[0][0].parameter.dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(shards)
        filled += size_bytes
    if bucket:
        yield bucket


def sharded_state_dict(sharded: ShardedModel, keep_vars: bool = False) -> dict[str, Any]:
    """Return what this rank holds, by original names; with `keep_vars` the parameters themselves where they are whole.

    Values are DTensors; plain tensors of a model that is all replicated; GlobalTensors of operators
    that one rank owns or that are split.
    """
    state: dict[str, Any] = {}
    for name, shards in local_shards_by_name(sharded).items():
        parameter = shards[0].parameter
        if len(shards) == 1 and not shards[0].is_uneven:
            state[name] = parameter if keep_vars else parameter.detach()
        else:
            parts = tuple((shard.offsets, shard.local(shard.parameter)) for shard in shards if shard.numel)
            state[name] = GlobalTensor(shards[0].shape, parameter.dtype, parts)
    state |= {name: value.detach() for name, value in persistent_buffers(sharded.module).items()}
    state |= {name: value if keep_vars else value.detach() for name, value in wrappers(sharded).items()}
    return _in_order(sharded, state)


def load_state_dict(
    sharded: ShardedModel, state: Mapping[str, Any], strict: bool = True
) -> tuple[list[str], list[str]]:
    """Copy values into a model; return (missing, unexpected) names.

    Values are whole tensors, or what `sharded_state_dict` returns under the same plan.  Raises
    OsdpError for names that lack or are not known, if `strict`, and for other shapes.
    """
    by_name, buffers = local_shards_by_name(sharded), persistent_buffers(sharded.module) | wrappers(sharded)
    missing = [name for name in (*by_name, *buffers) if name not in state]
    # PyTorch's `set_model_state_dict` adds what it finds as it is: buffers, and the slices of split operators.
    own = {id(tensor) for tensor in (*sharded.module.buffers(), *sharded.resting.values())}
    unexpected = [name for name in state if name not in by_name and name not in buffers and id(state[name]) not in own]
    if strict and (missing or unexpected):
        got = f"unknown names {', '.join(unexpected[:5])}" if unexpected else f"{len(state)} names"
        expected = f"also {', '.join(missing[:5])}" if missing else "only names of the model"
        wrapped = unexpected and all(name.startswith("module.") for name in unexpected)
        advice = "load {name.removeprefix('module.'): value for name, value in state.items()}" if wrapped else ""
        raise OsdpError("the state dict is not of this model", got=got, expected=expected, advice=advice)
    shapes = {name: shards[0].shape for name, shards in by_name.items()}
    shapes |= {name: tuple(value.shape) for name, value in buffers.items()}
    for name, shape in shapes.items():
        if name in state and tuple(state[name].shape) != shape:
            got = str(tuple(state[name].shape))
            raise OsdpError(f"{name} in the state dict has another shape", got=got, expected=str(shape))
    # All sources first: nothing is changed before all is known to fit.
    sources = [
        (shard, _source(name, shard, state[name]))
        for name, shards in by_name.items()
        if name in state
        for shard in shards
        if shard.numel
    ]
    with torch.no_grad():
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name])
        for shard, source in sources:
            shard.local(shard.parameter).copy_(source)
    sharded.expire()
    return missing, unexpected


def _source(name: str, shard: LocalShard, value: Any) -> Tensor:
    """Return what a shard takes of a whole tensor, or of this rank's parts of one. Raises OsdpError."""
    if isinstance(value, GlobalTensor):
        source = dict(value.parts).get(shard.offsets)
    elif isinstance(value, DTensor):
        source = value.to_local()
    else:
        source = value[shard.slices]
    if source is None or tuple(source.shape) != shard.sizes:
        what = f"{name} in the state dict is sharded differently from the model"
        got = "nothing there" if source is None else str(tuple(source.shape))
        expected, advice = f"{shard.sizes} at {shard.offsets}", "use full_state_dict() or a checkpoint to change plans"
        raise OsdpError(what, got=got, expected=expected, advice=advice)
    return source
