"""Numbers of DTensors that are those of the whole, where torch's (2.13) are of parts, without a word.

    gradient.norm().item()                the norm of this rank's part
    torch.stack([p.norm(), ...]).sum()    added up before the ranks' parts are, as is p.norm(dim=0).sum()
    (gradient > 1).any().float()          the number of ranks where any is
    gradient.max(), p.norm(inf)           fail on a rank that holds nothing, for which the others wait
    weight.mean()                         wrong where one rank owns the weight

Here norms, `any` and `all` are reduced at once, a collective call, and the others when they are read or computed with.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from runtime.dtensor_rows import gathered, replicated, shared_dim
from runtime.torch_compat import held_tensor, placed

aten = torch.ops.aten


def numbers() -> Mapping[Any, Any]:
    """Return what computes them, for each operation, in place of DTensor's rule."""
    return {
        aten._local_scalar_dense.default: _item,
        aten.max.default: _extreme,
        aten.min.default: _extreme,
        aten.mean.default: _mean,
        aten.sum.default: _sum,
        aten.any.default: _any,
        aten.all.default: _any,
        aten.linalg_vector_norm.default: _norm,
    }


def _item(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> object:
    """Reduce what is a part on each rank, such as a sum, before `item()`, `float()` and `bool()`."""
    return op(held_tensor(_added_up(args[0])))


def _extreme(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> DTensor:
    """Return the largest or the smallest element, also where a rank has none."""
    tensor, is_max = _added_up(args[0]), op is aten.max.default
    local = held_tensor(tensor)
    if local.numel() == 0 and tensor.numel():
        neutral = _range_of(tensor.dtype)[0 if is_max else 1]
        local = torch.full((1,), neutral, dtype=tensor.dtype, device=local.device)
    return _reduced(op(local), tensor, "max" if is_max else "min")


def _mean(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> DTensor:
    """Return the mean, also where ranks share rows in another way than placements say."""
    tensor = _added_up(args[0])
    return _reduced(held_tensor(tensor).sum(**kwargs) / tensor.numel(), tensor, "sum")


def _sum(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> DTensor:
    """Return the sum, of what is added up itself: torch adds up maxima and norms of parts."""
    tensor = _added_up(args[0])
    return _reduced(held_tensor(tensor).sum(**kwargs), tensor, "sum")


def _any(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> DTensor:
    """Return whether any or all elements are true: torch counts the ranks where they are."""
    tensor = _added_up(args[0])
    found = _reduced(op(held_tensor(tensor)).to(torch.int32), tensor, "max" if op is aten.any.default else "min")
    return replicated(held_tensor(_added_up(found)).bool(), tensor)


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return norms of the whole, so that what is computed of them is: torch may add up norms of parts."""
    tensor, order = _added_up(args[0]), float(args[1]) if len(args) > 1 else 2.0
    dims = args[2] if len(args) > 2 and args[2] else range(tensor.dim())
    dims, keeps = sorted(dim % tensor.dim() for dim in dims), len(args) > 3 and args[3]
    shared, local = shared_dim(tensor), held_tensor(tensor)
    if shared is None:  # whole, or in parts along several dimensions
        return replicated(op(gathered(tensor), *args[1:], **kwargs), tensor)
    along = tensor.placements[shared].dim  # type: ignore[attr-defined]
    shape = op(torch.empty(tensor.shape, device="meta"), *args[1:]).shape
    placements = list(tensor.placements)
    if along not in dims:
        placements[shared] = Shard(along if keeps else along - sum(dim < along for dim in dims))
        return placed(op(local, *args[1:], **kwargs), tensor.device_mesh, placements, shape)
    kind = {math.inf: "max", -math.inf: "min"}.get(order, "sum")
    power = order if kind == "sum" and order else 1.0
    if local.numel() == 0 and kind != "sum":  # neither has a maximum
        dtype = kwargs.get("dtype") or local.dtype.to_real()
        part = torch.full(shape, math.inf if kind == "min" else 0.0, dtype=dtype, device=local.device)
    else:
        part = op(local, *args[1:], **kwargs).pow(power)
    placements[shared] = Partial(kind)
    whole = _added_up(placed(part, tensor.device_mesh, placements, shape))
    return replicated(held_tensor(whole).pow(1 / power), tensor)


def _reduced(part: Tensor, tensor: DTensor, kind: str) -> DTensor:
    """Return the number that comes of a rank's part of a tensor."""
    placements = [one if one.is_replicate() else Partial(kind) for one in tensor.placements]
    return placed(part, tensor.device_mesh, placements, torch.Size())


def _added_up(tensor: DTensor) -> DTensor:
    """Return a tensor of which no rank has a summand."""
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor


def _range_of(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    return (False, True) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
