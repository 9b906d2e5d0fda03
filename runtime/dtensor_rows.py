"""Whole tensors and the rows of them that a DTensor holds on this rank, also where ranks share rows unevenly.

A parameter that one rank owns is a DTensor of which this rank holds all or nothing, whatever its placements say
(`torch_compat.uneven_dtensor`), so that torch's `full_tensor` and `redistribute` do not know which rows it has.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from runtime.dtensor_internals import placed_like
from runtime.torch_compat import held_tensor, placed


def shared_dim(tensor: DTensor) -> int | None:
    """Return the mesh dimension along which ranks share rows, if it is one and nothing else is shared."""
    others = [index for index, one in enumerate(tensor.placements) if not isinstance(one, Replicate)]
    return others[0] if len(others) == 1 and type(tensor.placements[others[0]]) is Shard else None


def is_whole(tensor: DTensor) -> bool:
    """Return whether every rank holds the whole."""
    return all(isinstance(one, Replicate) for one in tensor.placements)


def has_padding(tensor: DTensor) -> bool:
    """Return whether ranks cannot all have equally many rows."""
    dim = shared_dim(tensor)
    along = 0 if dim is None else tensor.placements[dim].dim  # type: ignore[attr-defined]
    return dim is not None and tensor.size(along) % tensor.device_mesh.size(dim) > 0


def is_uneven(tensor: DTensor) -> bool:
    """Return whether this rank has other rows than the placements say: of a parameter with one owner.

    Where they say that some ranks have none, those may see nothing of it: see `may_be_uneven`.
    """
    local, mesh, dim = held_tensor(tensor), tensor.device_mesh, shared_dim(tensor)
    if dim is None:
        return False
    along = tensor.placements[dim].dim  # type: ignore[attr-defined]
    each = -(-tensor.size(along) // mesh.size(dim))
    rows: int = min(each, max(0, tensor.size(along) - each * mesh.get_local_rank(dim)))
    return bool(local.size(along) != rows)


def may_be_uneven(tensor: DTensor) -> bool:
    """Return whether ranks share rows unevenly, or may: the same on all ranks, without asking."""
    return leaves_some_empty(tensor) or is_uneven(tensor)


def holds_other_rows(tensor: DTensor, other: DTensor) -> bool:
    """Return whether ranks share rows of one of two tensors that seem laid out alike, and one rank has the other.

    The same on all ranks, without asking; False where there are too few rows for that.
    """
    differ = held_tensor(tensor).shape != held_tensor(other).shape
    return differ and is_uneven(tensor) != is_uneven(other) and not leaves_some_empty(tensor)


def leaves_some_empty(tensor: DTensor) -> bool:
    """Return whether there are too few rows for all ranks, shared as the placements say or not."""
    mesh, dim = tensor.device_mesh, shared_dim(tensor)
    if dim is None:
        return False
    along: int = tensor.placements[dim].dim  # type: ignore[attr-defined]
    size = tensor.size(along)
    return -(-size // mesh.size(dim)) * (mesh.size(dim) - 1) >= size


def replicated(whole: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor on the mesh of another of which every rank has the whole."""
    return placed(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, whole.shape)


def laid_out_as(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of which this rank holds `local`, in the shape and layout of another."""
    if local.dtype == like.dtype:
        made = placed_like(local, like)
    else:
        made = placed(local, like.device_mesh, like.placements, like.shape)
    if is_spread(like):
        spread(made)
    return made


def spread(tensor: Tensor) -> None:
    """Note that ranks share rows as the placements say, for sure: see `is_spread`."""
    cast(Any, tensor)._is_spread = True
    _is_any_spread.add(True)


def is_spread(tensor: DTensor) -> bool:
    """Return whether that was noted: of what was laid out by `redistribute`, beside which one rank may own others."""
    return bool(_is_any_spread) and getattr(tensor, "_is_spread", False)


def is_any_spread() -> bool:
    """Return whether that was noted of any tensor in this process."""
    return bool(_is_any_spread)


_is_any_spread: set[bool] = set()
"""Not empty once any was."""


def own_rows(tensor: DTensor, whole: Tensor) -> Tensor:
    """Return what this rank holds of a whole tensor that is laid out as a DTensor is, a view where that can be."""
    local, mesh = held_tensor(tensor), tensor.device_mesh
    if is_whole(tensor):
        return whole
    dim = shared_dim(tensor)
    if dim is None:
        return replicated(whole, tensor).redistribute(placements=tensor.placements).to_local()
    along = tensor.placements[dim].dim  # type: ignore[attr-defined]
    count = whole.size(along)
    rows = local.size(along) if local.numel() else 0
    rank = mesh.get_local_rank(dim)
    start = 0 if rows == count else min(-(-count // mesh.size(dim)) * rank, count)
    return whole.narrow(along, min(start, count - rows), rows)


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, a copy, where its rows rest; a plain tensor itself. A collective call."""
    if not isinstance(tensor, DTensor):
        return tensor
    local, dim = held_tensor(tensor), shared_dim(tensor)
    if is_whole(tensor):
        return local.detach().clone()
    mesh = tensor.device_mesh
    if dim is None or (local.device.type == mesh.device_type and not may_be_uneven(tensor)):
        return tensor.full_tensor()
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=mesh.device_type)
    rows = own_rows(tensor, whole)
    if rows.numel():
        rows.copy_(local)
    # One rank has each byte, and the others zero.
    dist.all_reduce(whole.reshape(-1).view(torch.uint8), op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return whole.to(local.device)


def whole_of(tensor: DTensor) -> Tensor:
    """Return the whole of a DTensor, not to be written to: what this rank holds, if that is all. Else collective."""
    return held_tensor(tensor).detach() if is_whole(tensor) else gathered(tensor)


@torch.no_grad()
def write_whole(tensor: DTensor, whole: Tensor) -> None:
    """Let a DTensor have the values of a whole tensor."""
    local, rows = held_tensor(tensor), own_rows(tensor, whole)
    if rows.numel():
        local.copy_(rows.reshape(local.shape))
    torch.autograd.graph.increment_version(tensor)
