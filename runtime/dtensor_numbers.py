"""Numbers of DTensors that are those of the whole, where torch's (2.13) are of parts, without a word.

    gradient.norm().item()                the norm of this rank's part
    torch.stack([p.norm(), ...]).sum()    added up before the ranks' parts are, as is p.norm(dim=0).sum()
    (gradient > 1).any().float()          the number of ranks where any is
    gradient.max(), p.norm(inf)           fail on a rank that holds nothing, for which the others wait
    weight.mean(0), weight.std()          wrong, or fail, where one rank owns the weight

Here norms, `any` and `all` are reduced at once, a collective call, and the others when they are read or computed with.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_map_only

from runtime.dtensor_rows import gathered, replicated, shared_dim
from runtime.torch_compat import held_tensor, placed

aten = torch.ops.aten
OF_WHOLE = (
    *(aten.var.correction, aten.std.correction, aten.prod.default, aten.median.default, aten.histc.default),
    *(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.topk.default, aten.kthvalue.default),
    aten.count_nonzero.default,
)
"""What is computed of a gathered tensor."""


def numbers() -> Mapping[Any, Any]:
    """Return what computes them, for each operation, in place of DTensor's rule."""
    found: dict[Any, Any] = dict.fromkeys(OF_WHOLE, _of_whole)
    found |= dict.fromkeys((aten.max.default, aten.min.default, aten.amax.default, aten.amin.default), _extreme)
    found |= dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _sum)
    found |= dict.fromkeys((aten.any.default, aten.all.default), _any)
    return found | {aten._local_scalar_dense.default: _item, aten.linalg_vector_norm.default: _norm}


def _item(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> object:
    """Reduce what is a part on each rank, such as a sum, before `item()`, `float()` and `bool()`."""
    return op(held_tensor(_added_up(args[0])))


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return the largest or the smallest elements, also where a rank has none."""
    is_max = op in (aten.max.default, aten.amax.default)
    neutral = _range_of(args[0].dtype)[0 if is_max else 1]
    return _reduced(op, args, kwargs, "max" if is_max else "min", neutral)


def _range_of(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    return (False, True) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _sum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return sums, of what is added up itself: torch adds up maxima and norms of parts. Or means, a part of each."""
    if op not in (aten.mean.default, aten.mean.dim):
        return _reduced(op, args, kwargs, "sum")
    total = aten.sum.default if op is aten.mean.default else aten.sum.dim_IntList
    found = _reduced(total, args, kwargs, "sum")
    count = args[0].numel() // max(found.numel(), 1)
    return placed(held_tensor(found) / count, found.device_mesh, found.placements, found.shape)


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return whether any or all elements are true: torch counts the ranks where they are."""
    kind = "max" if op is aten.any.default else "min"
    found = _added_up(_reduced(lambda local: op(local).to(torch.int32), args, kwargs, kind))
    return replicated(held_tensor(found).bool(), found)


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return norms of the whole, so that what is computed of them is: torch may add up norms of parts."""
    tensor, order = _added_up(args[0]), float(args[1]) if len(args) > 1 else 2.0
    if shared_dim(tensor) is None:
        return replicated(op(gathered(tensor), *args[1:], **kwargs), tensor)
    kind = {math.inf: "max", -math.inf: "min"}.get(order, "sum")
    power = order if kind == "sum" and order else 1.0

    def powers(local: Tensor, *others: Any, **named: Any) -> Tensor:
        found: Tensor = op(local, order, *others, **named).pow(power)
        return found

    neutral = {"max": 0.0, "min": math.inf}.get(kind)
    found = _added_up(_reduced(powers, (tensor, *args[2:]), kwargs, kind, neutral))
    return placed(held_tensor(found).pow(1 / power), found.device_mesh, found.placements, found.shape)


def _of_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what comes of the whole, on every rank."""
    found = op(gathered(_added_up(args[0])), *args[1:], **kwargs)
    return tree_map_only(Tensor, partial(replicated, like=args[0]), found)


def _reduced(
    op: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, neutral: Any = None
) -> DTensor:
    """Return what `op(tensor, dims, keeps dims)` reduces to, each rank its part, or of `neutral` if it has nothing."""
    tensor, dims = _added_up(args[0]), args[1] if len(args) > 1 else None
    shared, local = shared_dim(tensor), held_tensor(tensor)
    if shared is None:  # whole, or in parts along several dimensions
        return replicated(op(gathered(tensor), *args[1:], **kwargs), tensor)
    gone = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    keeps = len(args) > 2 and args[2]
    shape = [1 if dim in gone else size for dim, size in enumerate(tensor.shape) if keeps or dim not in gone]
    along, placements = tensor.placements[shared].dim, list(tensor.placements)  # type: ignore[attr-defined]
    if along in gone:
        placements[shared] = Partial(kind)
        if local.numel() == 0 and neutral is not None:
            sizes = [1 if dim == along else size for dim, size in enumerate(tensor.shape)]
            local = torch.full(sizes, neutral, dtype=tensor.dtype, device=local.device)
    else:
        placements[shared] = Shard(along if keeps else along - sum(dim < along for dim in gone))
    return placed(op(local, *args[1:], **kwargs), tensor.device_mesh, placements, torch.Size(shape))


def _added_up(tensor: DTensor) -> DTensor:
    """Return a tensor of which no rank has a summand."""
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor
