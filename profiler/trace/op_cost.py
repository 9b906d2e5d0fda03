"""What one aten op costs: floating-point operations, bytes moved, and how it treats its arguments.

FLOPs are counted as `torch.utils.flop_counter` does, from whose registry all formulas but the most
frequent come: 2 m n k for a matrix product; attention counts the full square, causal or not.  Bytes
are those of the elements read and written, each argument once (`extent`); of a table, a gather reads
what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from profiler.kept_storage import keeps_storage
from profiler.selective_recomputation import is_product
from profiler.trace.data_dependent import Dependence, dependence_of

aten = torch.ops.aten
Formula = Callable[..., int]

_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_ALLOCATE_ONLY = {f"aten::{name}" for name in _EMPTY}
_GATHER = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::take"}
# In-place ops that overwrite their first argument without reading it.
_OVERWRITE = {f"aten::{name}_" for name in ("zero", "fill", "copy", "bernoulli", "normal", "uniform")}
# Views by another name, of which torch has no fast meta kernel.
_SAME = {aten._unsafe_view.default: aten.view.default}
_RUNNING_STATISTICS = {
    aten.native_batch_norm.default: 3,
    aten.cudnn_batch_norm.default: 3,
    aten.miopen_batch_norm.default: 3,
}


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """How the meter treats one op overload.  There is one of each (`describe`), which is its own key."""

    passive: bool
    """A view or a query: allocates nothing, costs nothing."""
    call: torch._ops.OpOverload
    """What to run: the op, or a quicker one that does the same."""
    writes: bool
    """Changes an argument."""
    in_place: bool
    """Returns its first argument, changed; shape and strides stay."""
    has_device: bool
    """Takes a `device` keyword."""
    allocates_only: bool
    """Makes memory without writing it."""
    gathers: bool
    """Reads of its first argument only what it returns."""
    overwrites: bool
    """Does not read its first argument."""
    product: bool
    """Selective recomputation may keep what it returns (`is_kept` tells of each call)."""
    keeps_storage: bool
    """Its kernel may leave its output more memory than that has (`kept_storage`)."""
    statistics: int | None
    """Changes arguments of which its schema does not say so: the position of a running mean, which a running variance
    and whether they change follow."""
    adds: bool
    """May be how autograd adds two gradients of one value."""
    data: Dependence
    """How its output depends on data."""
    flops: Formula | None
    """Formula of a matrix-like op: (*args, out_val=outputs, **kwargs) -> FLOPs; None for all others."""


@cache
def describe(op: torch._ops.OpOverload) -> Op:
    """Return how the meter treats `op`, from its schema, which each pass asks for again."""
    schema = op._schema
    first = schema.arguments[0] if schema.arguments else None
    writes_first = first is not None and first.alias_info is not None and first.alias_info.is_write
    returns_first = len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    view_in_place = torch.Tag.inplace_view in op.tags
    return Op(
        passive=op.is_view or view_in_place or op.namespace == "prim" or op in _SAME,
        call=_SAME.get(op, op),
        writes=schema.is_mutable,
        in_place=writes_first and returns_first,
        has_device=any(argument.name == "device" for argument in schema.arguments),
        allocates_only=schema.name in _ALLOCATE_ONLY,
        gathers=schema.name in _GATHER,
        overwrites=schema.name in _OVERWRITE,
        product=is_product(op) and not schema.is_mutable,
        keeps_storage=keeps_storage(op),
        statistics=_RUNNING_STATISTICS.get(op),
        adds=op in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor),
        data=dependence_of(op),
        flops=_FORMULAS.get(op) or flop_registry.get(op.overloadpacket),
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """What one execution of an op makes the device do."""

    flops: int
    """Floating-point operations of a matrix-like op, 0 for others."""
    matmul_bytes: int
    """Bytes read and written, if the op is matrix-like."""
    other_bytes: int
    """Bytes read and written, if it is not."""


def cost(
    op: Op, tensors: Sequence[Tensor], outputs: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> Cost:
    """Return the cost of `out = op(*args, **kwargs)`, given the tensors in the arguments and in `out`."""
    if op.allocates_only or op.data.is_collective:  # those are priced by what they send
        return Cost(0, 0, 0)
    written = sum(extent(tensor) for tensor in outputs)
    read = 0
    for position, tensor in enumerate(tensors):
        if any(tensor is earlier for earlier in tensors[:position]) or (position == 0 and op.overwrites):
            continue
        size = extent(tensor)
        read += min(size, written) if position == 0 and op.gathers else size
    if op.flops is None:
        return Cost(0, 0, read + written)
    return Cost(int(op.flops(*args, out_val=out, **kwargs)), read + written, 0)


def extent(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements, those of expanded dimensions once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or length == 0:
            size *= length
    return size


def _product(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> int:
    """(..., m, k) times (..., k, n)."""
    return 2 * a.numel() * b.shape[-1]


def _added_product(bias: Tensor, a: Tensor, b: Tensor, **options: Any) -> int:
    return _product(a, b)


def _matrix_vector(matrix: Tensor, vector: Tensor, **options: Any) -> int:
    return 2 * matrix.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> int:
    """Scores, then their product with the values: 2 products; key heads serve several query heads."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[2] * (width + value.shape[3])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> int:
    """Scores again, then the gradients of the weights, the values, the queries and the keys: 5 products."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[2] * (3 * width + 2 * value.shape[3])


def _recurrent(x: Tensor, weight: Tensor, recurrent: Tensor, *rest: Any, **options: Any) -> int:
    """A step's input and state times the weights of all gates; (steps, samples, inputs)."""
    return 2 * x.shape[0] * x.shape[1] * (weight.numel() + recurrent.numel())


def _recurrent_backward(*args: Any, **options: Any) -> int:
    return 2 * _recurrent(*args)


# The most frequent, which torch's registry counts alike but slowly, and those that it lacks.
_FORMULAS: dict[torch._ops.OpOverload, Formula] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten._grouped_mm.default: _product,
    aten.addmm.default: _added_product,
    aten.baddbmm.default: _added_product,
    aten.mv.default: _matrix_vector,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.mkldnn_rnn_layer.default: _recurrent,
    aten.mkldnn_rnn_layer_backward.default: _recurrent_backward,
}
