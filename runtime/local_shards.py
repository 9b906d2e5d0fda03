"""Which part of each original parameter a rank holds, whatever the strategy.

Checkpoints, full state dicts, gradient norms and initialisation see a model through its local shards and
do not depend on strategies:

    strategy                            what a rank holds of a parameter           ranks with the same
    replicate                           all                                        N
    shard, shard_grad, hierarchical,
    secondary_shard                     rows [r c, (r + 1) c), c = ceil(rows / N)   1
    group_shard, odc over G             the same with r, N within the group        N / G
    owner                               all on one rank, nothing on the others     1
    split into slices                   columns of a slice, by the slice's strategy
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from runtime.torch_compat import uneven_dtensor


@dataclass(frozen=True)
class Origin:
    """A part of a parameter of the original model: that from which a registered parameter is made, before sharding."""

    name: str
    """Fully qualified name in the original model."""
    shape: tuple[int, ...]
    """Unsharded shape of the original parameter."""
    offsets: tuple[int, ...]
    """Where the part starts, one number per dimension."""
    sizes: tuple[int, ...]
    """Extent of the part; with a zero where there is nothing."""

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return prod(self.sizes, start=1)


@dataclass(frozen=True)
class LocalShard(Origin):
    """The part of a parameter that this rank holds."""

    replicas: int
    """Number of ranks that hold this very part."""
    parameter: nn.Parameter
    """As registered in the module: a DTensor, a plain tensor, or empty where this rank holds nothing."""
    is_first: bool = True
    """Whether this rank is the first of those that hold this very part."""
    is_uneven: bool = False
    """Whether ranks share the rows of its DTensor in another way than its placements say."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part within the original parameter."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's data of a tensor that is laid out as the parameter is.

        Such tensors are the parameter, its gradient and the moments of its optimizer. The result
        has the shape `sizes` and shares memory with `tensor`.
        """
        return local_data(tensor).detach().view(self.sizes)


def local_data(tensor: Tensor) -> Tensor:
    """Return this rank's data of a DTensor, or a plain tensor itself."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_gradient(parameter: nn.Parameter, flat: Tensor) -> None:
    """Add to the gradient of a DTensor this rank's part, with which `flat` begins; the rest of that is padding."""
    local = local_data(parameter)
    part = flat[: local.numel()].view(local.shape)
    if parameter.grad is None:
        assert isinstance(parameter, DTensor)
        # A copy, because `flat` is a part of a buffer that holds the other parameters' gradients too.
        own = part.to(local.device, local.dtype, copy=True)
        parameter.grad = uneven_dtensor(own, parameter.device_mesh, parameter.shape)
    else:
        local_data(parameter.grad).add_(part.to(local.device, local.dtype))


def whole(name: str, shape: Iterable[int]) -> Origin:
    """Return the origin of a parameter that was not split."""
    sizes = tuple(shape)
    return Origin(name, sizes, (0,) * len(sizes), sizes)


def local_shard(origin: Origin, parameter: nn.Parameter, replicas: int = 1) -> LocalShard:
    """Return this rank's part of a parameter: what the mesh of a DTensor says, all of a plain tensor.

    `replicas` is the number of ranks outside of the mesh, and this one, that have the same.
    """
    offsets, sizes = origin.offsets, origin.sizes
    is_first = replicas == 1 or dist.get_rank() < dist.get_world_size() // replicas
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                chunk = -(-sizes[0] // mesh.size(dim))
                start = min(mesh.get_local_rank(dim) * chunk, sizes[0])
                offsets, sizes = (offsets[0] + start, *offsets[1:]), (min(chunk, sizes[0] - start), *sizes[1:])
            else:
                replicas *= mesh.size(dim)
                is_first = is_first and mesh.get_local_rank(dim) == 0
    return LocalShard(origin.name, origin.shape, offsets, sizes, replicas, parameter, is_first)


def whole_or_nothing(origin: Origin, parameter: nn.Parameter, is_owner: bool) -> LocalShard:
    """Return this rank's part of a parameter that one rank keeps whole."""
    sizes = origin.sizes if is_owner else (0,) * len(origin.sizes)
    return LocalShard(origin.name, origin.shape, origin.offsets, sizes, 1, parameter, is_uneven=True)
