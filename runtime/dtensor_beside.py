"""Operations on several tensors, of which some are plain or are laid out otherwise, outside of optimizers' steps.

    parameter + noise, average.lerp_(parameter, 0.1)    torch (2.13) refuses plain tensors and DTensors together
    torch.mm(a, b, out=parameter.data)                  finds no mesh
    owned * sharded                                     fails, or repeats the one row of a part, without a word
    torch.stack([one.norm() for one in gradients])      is refused where these are on several meshes

Here they are computed as an optimizer's step computes them (`dtensor_operations`): a plain tensor is a whole one, equal
on all ranks.  But a model's forward hands plain tensors, other ones on each rank, to a parameter that is not gathered:
that is refused, as is what would have a gradient that is no DTensor.  There the model's own plain parameters alone are
known to be whole, as those of a frozen teacher that it moves towards a sharded student.  Where parameters are whole on
this rank too, and nothing is written to them, what is computed is this rank's, as under data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from runtime.dtensor_internals import ShardedOperationError, by_torch
from runtime.dtensor_operations import computed, written_in
from runtime.dtensor_rows import may_be_uneven

aten = torch.ops.aten
ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "div", "pow", "lerp", "addcmul", "addcdiv", "where", "copy", "masked_fill"),
    *("maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max", "remainder", "fmod", "floor_divide"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or"),
    *("bitwise_xor", "atan2", "hypot", "copysign", "xlogy", "logaddexp"),
)
"""Names of operations on several tensors that go element by element, with their forms in place, for lists and out=."""
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "equal", "allclose")
"""What has no gradients."""
OTHERS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "cat", "stack", "mse_loss", "l1_loss", "dist")
"""Others, which torch's rules compute where no tensor is plain, no rank owns one and all are on one mesh."""


def operations() -> Iterator[Any]:
    """Yield the operations that `compute` is to see."""
    for name in ELEMENTWISE:
        for form in (name, f"{name}_", f"_foreach_{name}", f"_foreach_{name}_"):
            yield from _overloads(form)
    for name in (*OTHERS, *COMPARED[-2:]):
        yield from _overloads(name)


def _overloads(name: str) -> Iterator[Any]:
    packet = getattr(aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        if sum("Tensor" in str(one.type) for one in op._schema.arguments) > 1 or name in ("cat", "stack"):
            yield op


_by_rule = frozenset(op for name in OTHERS for op in _overloads(name) if not op._schema.is_mutable)


def compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation. Raises ShardedOperationError where plain tensors are not whole ones, or have gradients."""
    tensors: list[Any] = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    plain = [one for one in tensors if not isinstance(one, DTensor)]
    if torch.compiler.is_compiling() or not all(_is_known(one) for one in tensors if isinstance(one, DTensor)):
        return by_torch(op, args, kwargs)
    if any(one.numel() != 1 for one in plain):
        if _are_of_this_rank(op, plain, tensors, args, kwargs):
            args, kwargs = tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
            return op(*args, **kwargs)
        _check(op, plain, tensors, written_in(op, args, kwargs))
    elif op in _by_rule and _are_alike([one for one in tensors if isinstance(one, DTensor)]):
        return by_torch(op, args, kwargs)
    return computed(op, args, kwargs)


def _are_of_this_rank(op: Any, plain: list[Tensor], tensors: list[Any], args: Any, kwargs: Any) -> bool:
    """Return whether plain tensors, which may be this rank's own, meet whole parameters alone and give plain ones.

    So a model's method computes under data parallelism, as a teacher's `t.data = 0.9 * t.data + 0.1 * s.data`.
    """
    if not _forwards or _forwards[-1].has(plain) or torch.is_grad_enabled() or written_in(op, args, kwargs):
        return False
    return all(_is_whole_here(one) for one in tensors if isinstance(one, DTensor))


def _is_whole_here(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return all(type(one) is Replicate or mesh.size(dim) == 1 for dim, one in enumerate(tensor.placements))


def _are_alike(tensors: list[DTensor]) -> bool:
    """Return whether tensors are on one mesh, and ranks share the rows of each."""
    return len({one.device_mesh for one in tensors}) == 1 and not any(map(may_be_uneven, tensors))


def _is_known(tensor: DTensor) -> bool:
    """Return whether ranks have the whole of a tensor, rows or summands."""
    is_one = type(tensor) is DTensor
    return is_one and all(type(one) in (Replicate, Shard) or one.is_partial() for one in tensor.placements)


def _check(op: Any, plain: list[Tensor], tensors: list[Any], written: list[Any]) -> None:
    """Raise ShardedOperationError unless plain tensors may be taken for whole ones."""
    is_compared = op.overloadpacket.__name__ in COMPARED
    is_recorded = torch.is_grad_enabled() and not is_compared and any(one.requires_grad for one in tensors)
    has_gradient = any(one.requires_grad for one in plain) or any(one is other for one in plain for other in written)
    if (_forwards and not _forwards[-1].has(plain)) or (is_recorded and has_gradient):
        raise ShardedOperationError(
            "a plain tensor and a sharded parameter, gradient or state are computed with together",
            got=f"{op}: mixed torch.Tensor and DTensor, of {tuple(plain[0].shape)}",
            expected="whole tensors, equal on all ranks, and no gradients through them",
            advice="compute under torch.no_grad(), or with parameter.full_tensor(), a collective call on all ranks",
        )


class _Running:
    """A model that runs forward or backward, or None, where it is not known which."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._known: frozenset[int] = frozenset()  # torch.compile of 2.11 knows no `frozenset[int]()`

    def has(self, tensors: list[Tensor]) -> bool:
        """Return whether tensors are in the memory of its plain parameters, as looked up when one first was not."""
        wanted = {one.untyped_storage()._cdata for one in tensors if one.numel() != 1}
        if not wanted <= self._known and self._module is not None:
            plain = (one for one in self._module.parameters() if not isinstance(one, DTensor))
            self._known = frozenset(one.untyped_storage()._cdata for one in plain)
        return wanted <= self._known


_forwards: list[_Running] = []
"""What runs, the innermost last."""


@contextmanager
def in_model(module: nn.Module | None) -> Iterator[None]:
    """Let plain tensors be taken for those of a model, which has other ones on each rank."""
    _forwards.append(_Running(module))
    try:
        yield
    finally:
        _forwards.pop()
