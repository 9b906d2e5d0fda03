"""Which part of each original parameter a rank holds, whatever the strategy.

Checkpoints, full state dicts, gradient norms and initialisation see a model through its pieces and
need not know of strategies:

    strategy                            what a rank holds of a parameter           ranks with the same
    replicate                           all                                        N
    shard, shard_grad, hierarchical,
    secondary_shard                     rows [r c, (r + 1) c), c = ceil(rows / N)   1
    group_shard, odc over G             the same with r, N within the group        N / G
    owner                               all on one rank, nothing on the others     1
    split into slices                   columns of a slice, by the slice's strategy
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class LocalShard:
    """What this rank holds of one parameter of the original model."""

    name: str
    """Fully qualified name in the original model."""
    shape: tuple[int, ...]
    """Unsharded shape of the original parameter."""
    offsets: tuple[int, ...]
    """Where this rank's part starts, one number per dimension."""
    sizes: tuple[int, ...]
    """Extent of the part; with a zero where this rank holds nothing."""
    replicas: int
    """Number of ranks that hold this very part."""
    parameter: nn.Parameter
    """As registered in the module: a DTensor, plain, or empty where this rank holds nothing."""
    is_first: bool = True
    """Whether this rank is the first of those that hold this very part."""

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return prod(self.sizes, start=1)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part within the original parameter."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's data of a tensor that is laid out as the parameter is.

        Such tensors are the parameter, its gradient and the moments of its optimizer. The result
        has the shape `sizes` and shares memory with `tensor`.
        """
        data = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return data.detach().view(self.sizes)


@dataclass(frozen=True)
class Origin:
    """Which part of which original parameter a registered parameter is, before it is sharded."""

    name: str
    """Fully qualified name in the original model."""
    shape: tuple[int, ...]
    """Shape of the original parameter."""
    offsets: tuple[int, ...]
    """Where the part starts."""
    sizes: tuple[int, ...]
    """Extent of the part."""

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return prod(self.sizes, start=1)


def whole(name: str, shape: Iterable[int]) -> Origin:
    """Return the origin of a parameter that was not split."""
    sizes = tuple(shape)
    return Origin(name, sizes, (0,) * len(sizes), sizes)


def piece_of(origin: Origin, parameter: nn.Parameter, replicas: int = 1, holds: bool | None = None) -> LocalShard:
    """Return this rank's piece of a parameter.

    `holds` says of a parameter that one rank owns whether this rank does.  Else a DTensor tells by
    its mesh what this rank holds; of a plain parameter it holds all.  `replicas` is the number of ranks
    outside of the mesh, and this one, that have the same.
    """
    offsets, sizes = origin.offsets, origin.sizes
    if holds is not None:
        return LocalShard(origin.name, origin.shape, offsets, sizes if holds else (0,) * len(sizes), 1, parameter)
    is_first = replicas == 1 or dist.get_rank() < dist.get_world_size() // replicas
    if not isinstance(parameter, DTensor):
        return LocalShard(origin.name, origin.shape, offsets, sizes, replicas, parameter, is_first)
    mesh = parameter.device_mesh
    sharding = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
    copies = [dim for dim in range(mesh.ndim) if dim not in sharding]
    for dim in sharding:
        chunk = -(-sizes[0] // mesh.size(dim))
        start = min(mesh.get_local_rank(dim) * chunk, sizes[0])
        offsets, sizes = (offsets[0] + start, *offsets[1:]), (min(chunk, sizes[0] - start), *sizes[1:])
    replicas *= prod((mesh.size(dim) for dim in copies), start=1)
    is_first = is_first and all(mesh.get_local_rank(dim) == 0 for dim in copies)
    return LocalShard(origin.name, origin.shape, offsets, sizes, replicas, parameter, is_first)
