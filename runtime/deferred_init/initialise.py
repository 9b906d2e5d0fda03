"""Values for a model that is sharded: rank 0's, or what its constructor would have given.

No rank holds more than a few whole tensors at a time.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.opaque_parameters import is_opaque, tensors_of
from runtime.deferred_init.deferred_init import Recording, reset
from runtime.sharded_model import ShardedModel
from runtime.state.state_dict import local_shards_by_name

BUCKET_BYTES = 25 << 20
"""So much of small tensors is sent at once, as DistributedDataParallel does."""


def share_rank_0(model: nn.Module, device: torch.device) -> None:
    """Give every rank's model the parameters and buffers of rank 0. A collective call."""
    with torch.no_grad():
        for bucket in _buckets(_values(model)):
            flat = [tensor.detach().to(device).flatten() for tensor in bucket]
            sent = flat[0] if len(flat) == 1 else torch.cat(flat)
            dist.broadcast(sent, src=0)
            if dist.get_rank() != 0:
                for tensor, part in zip(bucket, torch.split(sent, [one.numel() for one in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in order, together those of one dtype as long as they are small."""
    bucket: list[Tensor] = []
    held_bytes = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or held_bytes + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append(tensor)
        held_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _values(model: nn.Module) -> Iterator[Tensor]:
    """Yield what a model's parameters and buffers hold."""
    for name, parameter in model.named_parameters():
        yield from tensors_of(name, parameter) if is_opaque(parameter) else (parameter,)
    yield from model.buffers()


def fill(origin: nn.Module | Recording, shard: Callable[[nn.Module], ShardedModel]) -> ShardedModel:
    """Shard a model on the meta device and give it the values that its constructor gives.

    The values are made on the CPU from its default generator, one tensor after the other, on every
    rank alike, and each rank keeps its part.
    """
    if isinstance(origin, Recording):
        module, values = origin.module, origin.replay()
    else:
        module, values = origin, reset(origin)
    sharded = shard(module)
    shards = local_shards_by_name(sharded)
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in values:
            if name in buffers:
                buffers[name].copy_(value)
            for part in shards.get(name, ()):
                part.local(part.parameter).copy_(value[part.slices])
    return sharded
