"""Numbers of DTensors that are those of the whole, where torch's (2.13) are of parts, without a word.

    gradient.norm().item()                the norm of this rank's part
    torch.stack([p.norm(), ...]).sum()    added up before the ranks' parts are, as is p.norm(dim=0).sum()
    (gradient > 1).any().float()          the number of ranks where any is
    gradient.max(), p.norm(inf)           fail on a rank that holds nothing, for which the others wait
    gradient.abs().max()                  a number where another rank has NaN
    weight.mean(0), weight.std()          wrong, or fail, where one rank owns the weight

Here all of them are reduced at once, a collective call: torch changes nothing in place that waits to be.  What is not
reduced along the rows that ranks share stays in parts.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_map_only

from runtime.dtensor_rows import replicated, shared_dim, whole_of
from runtime.torch_compat import held_tensor, placed

aten = torch.ops.aten
OF_WHOLE = (aten.prod.default, aten.median.default, aten.histc.default, aten.count_nonzero.default)
"""What is computed of a gathered tensor."""
ALONG = {
    **dict.fromkeys((aten.var.correction, aten.std.correction, aten.logsumexp.default), (1, None)),
    **dict.fromkeys((aten.var_mean.correction, aten.std_mean.correction), (1, None)),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), (1, None)),
    **dict.fromkeys((aten.topk.default, aten.kthvalue.default), (2, -1)),
}
"""What is computed so along the rows that ranks share, else of parts: the place of its dimensions, and by default."""


def numbers() -> Mapping[Any, Any]:
    """Return what computes them, for each operation, in place of DTensor's rule."""
    found: dict[Any, Any] = dict.fromkeys(OF_WHOLE, _of_whole) | dict.fromkeys(ALONG, _along)
    found |= dict.fromkeys((aten.max.default, aten.min.default, aten.amax.default, aten.amin.default), _extreme)
    found |= dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _sum)
    found |= dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), _any)
    found |= dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), _any)
    found |= {aten._foreach_norm.Scalar: _norms}
    return found | {aten._local_scalar_dense.default: _item, aten.linalg_vector_norm.default: _norm}


def _item(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> object:
    """Reduce or gather what is a part on each rank before `item()`, `float()` and `bool()`: a rank may have nothing."""
    return op(whole_of(added_up(args[0])))


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return the largest or the smallest elements, also where a rank has none, and NaN where any is."""
    is_max = op in (aten.max.default, aten.amax.default)
    neutral = _range_of(args[0].dtype)[0 if is_max else 1]
    return _extreme_of_ranks(_reduced(op, args, kwargs, "max" if is_max else "min", neutral), is_max)


def _extreme_of_ranks(found: DTensor, is_max: bool) -> DTensor:
    """Return the largest or the smallest of what each rank has found: backends of collectives may ignore NaN."""
    places = [place for place, one in enumerate(found.placements) if one.is_partial()]
    if not places:
        return found
    mesh, local, (place,) = found.device_mesh, held_tensor(found)[None], places
    side_by_side = [Shard(0) if one.is_partial() else one for one in found.placements]
    of_ranks = placed(local, mesh, side_by_side, torch.Size((mesh.size(place), *found.shape)))
    whole = of_ranks.redistribute(placements=[Replicate() if one.is_partial() else one for one in found.placements])
    every = held_tensor(whole)
    return placed(every.amax(0) if is_max else every.amin(0), mesh, whole.placements, found.shape)


def _range_of(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    return (False, True) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _sum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return sums, of what is added up itself: torch adds up maxima and norms of parts. Or means, a part of each."""
    if op not in (aten.mean.default, aten.mean.dim):
        return added_up(_reduced(op, args, kwargs, "sum"))
    dtype = kwargs.get("dtype") or args[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return op(held_tensor(args[0]), *args[1:], **kwargs)  # type: ignore[no-any-return]  # which torch refuses
    adds_up = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = aten.sum.default if op is aten.mean.default else aten.sum.dim_IntList
    found = added_up(_reduced(total, args, {"dtype": adds_up}, "sum"))
    count = args[0].numel() // max(found.numel(), 1)
    return placed((held_tensor(found) / count).to(dtype), found.device_mesh, found.placements, found.shape)


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return whether any or all elements are true: torch counts the ranks where they are."""
    is_any = op in (aten.any.default, aten.any.dim, aten.any.dims)
    found = _reduced(lambda *local: op(*local).to(torch.int32), args, kwargs, "max" if is_any else "min")
    reduced = added_up(found)
    return placed(held_tensor(reduced).bool(), reduced.device_mesh, reduced.placements, reduced.shape)


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return norms of the whole, so that what is computed of them is: torch may add up norms of parts."""
    tensor, order = added_up(args[0]), float(args[1]) if len(args) > 1 else 2.0
    if shared_dim(tensor) is None:
        return replicated(op(whole_of(tensor), *args[1:], **kwargs), tensor)
    kind = {math.inf: "max", -math.inf: "min"}.get(order, "sum")
    power = order if kind == "sum" and order else 1.0
    dtype = kwargs.get("dtype") or tensor.dtype
    adds_up = {"dtype": torch.float32} if dtype in (torch.float16, torch.bfloat16) else kwargs

    def powers(local: Tensor, *others: Any, **named: Any) -> Tensor:
        found: Tensor = op(local, order, *others, **named).pow(power)
        return found

    neutral = {"max": 0.0, "min": math.inf}.get(kind, math.inf if order < 0 else None)
    found = _reduced(powers, (tensor, *args[2:]), adds_up, kind, neutral)
    found = added_up(found) if kind == "sum" else _extreme_of_ranks(found, kind == "max")
    root = held_tensor(found).pow(1 / power)
    root = root.to(dtype) if adds_up is not kwargs else root
    return placed(root, found.device_mesh, found.placements, found.shape)


def _norms(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the norm of each tensor, those on one mesh reduced at once."""
    tensors, order = list(args[0]), float(args[1]) if len(args) > 1 else 2.0
    dtype = kwargs.get("dtype")
    together: dict[Any, list[int]] = {}
    for index, one in enumerate(tensors):
        shared = shared_dim(one) if isinstance(one, DTensor) else None
        is_sum = shared is not None and math.isfinite(order) and order > 0 and one.dtype.itemsize >= 4
        together.setdefault((one.device_mesh, shared, one.dtype) if is_sum else index, []).append(index)
    found = tensors[:]
    for key, indices in together.items():
        if not isinstance(key, tuple):
            found[key] = torch.linalg.vector_norm(tensors[key], order, dtype=dtype)
            continue
        mesh, shared, _ = key
        powers = [one.pow(order) for one in op([held_tensor(tensors[index]) for index in indices], order, **kwargs)]
        placements = [Partial() if dim == shared else Replicate() for dim in range(mesh.ndim)]
        summed = added_up(placed(torch.stack(powers), mesh, placements, torch.Size((len(indices),))))
        for index, one in zip(indices, held_tensor(summed).pow(1 / order).unbind(), strict=True):
            found[index] = replicated(one.clone(), tensors[index])
    return found


def _of_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what comes of the whole, on every rank."""
    found = op(whole_of(added_up(args[0])), *args[1:], **kwargs)
    return tree_map_only(Tensor, partial(replicated, like=args[0]), found)


def _along(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what comes of each row, in parts as the rows are, or of the whole where ranks share what it goes along."""
    tensor, (place, by_default) = added_up(args[0]), ALONG[op]
    gone = _dims(args[place] if len(args) > place else by_default, tensor.dim())
    shared = shared_dim(tensor)
    along: int = -1 if shared is None else tensor.placements[shared].dim  # type: ignore[attr-defined]
    if shared is None or along in gone:
        return _of_whole(op, (tensor, *args[1:]), kwargs)

    def in_parts(found: Tensor) -> DTensor:
        at = along if found.dim() == tensor.dim() else along - sum(dim < along for dim in gone)
        placements, shape = list(tensor.placements), list(found.shape)
        placements[shared], shape[at] = Shard(at), tensor.size(along)
        return placed(found, tensor.device_mesh, placements, torch.Size(shape))

    return tree_map_only(Tensor, in_parts, op(held_tensor(tensor), *args[1:], **kwargs))


def _dims(dims: Any, count: int) -> set[int]:
    """Return the dimensions, of so many, that an argument names: one, some, or all."""
    given = [dims] if isinstance(dims, int) else dims
    return {dim % count for dim in given or range(count)} if count else set()


def _reduced(
    op: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, neutral: Any = None
) -> DTensor:
    """Return what `op(tensor, dims, keeps dims)` reduces to, each rank its part, or of `neutral` if it has nothing."""
    tensor, dims = added_up(args[0]), args[1] if len(args) > 1 else None
    shared, local = shared_dim(tensor), held_tensor(tensor)
    if shared is None:  # whole, or in parts along several dimensions
        return replicated(op(whole_of(tensor), *args[1:], **kwargs), tensor)
    gone = _dims(dims, tensor.dim())
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


def added_up(tensor: DTensor) -> DTensor:
    """Return a tensor of which no rank has a summand."""
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor
