"""Operations of which torch (2.13) lays out arguments anew, of tensors of which ranks have other rows than it believes.

    weight.copy_(torch.linalg.qr(weight)[0])       other numbers where one rank owns the weight, without a word
    weight.cumsum(0), weight.flip(0)               one rank fails, and the others wait for it
    weight / weight.norm(dim=0).expand_as(weight)  fails, as parts have other sizes

torch goes by placements, which do not tell that one rank has all (`dtensor_rows`).  Here these are computed as an
optimizer's step computes them (`dtensor_operations`).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from runtime.dtensor_operations import computed_whole
from runtime.dtensor_rows import is_whole, may_be_uneven, own_rows, shared_dim
from runtime.torch_compat import held_tensor


def compute_uneven(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], layout: Any) -> Any:
    """Return what this rank holds of what an operation returns, laid out so; NotImplemented where torch is right."""
    tensors = [one for one in tree_leaves(args) if isinstance(one, DTensor)]
    is_known = all(type(one) is DTensor for one in tensors)
    if op._schema.is_mutable or not is_known or any(isinstance(one, Tensor) for one in kwargs.values()):
        return NotImplemented
    uneven = [one for one in tensors if may_be_uneven(one)]
    found = computed_whole(op, args, dict(kwargs)) if uneven else NotImplemented
    if isinstance(found, DTensor):
        return _held(found, layout, uneven[0])
    if isinstance(found, (list, tuple)):
        return type(found)(_held(one, spec, uneven[0]) for one, spec in zip(found, layout, strict=True))
    return found


def _held(found: Any, layout: Any, like: DTensor) -> Any:
    """Return what this rank holds of a tensor as it is to be laid out: of rows of another, `like`, as many."""
    if not isinstance(found, DTensor):
        return found
    dim = shared_dim(like)
    along: int = -1 if dim is None else like.placements[dim].dim  # type: ignore[attr-defined]
    is_alike = is_whole(found) and layout.placements == like.placements and found.dim() > along
    if is_alike and found.size(along) == like.size(along):
        return own_rows(like, held_tensor(found)).contiguous()
    return held_tensor(found.redistribute(placements=layout.placements))
