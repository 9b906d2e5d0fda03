"""Layouts of tensors (shape, strides, dtype), and that of the output of an elementwise op.

Torch's TensorIterator keeps the layout that all operands share, if there is one; otherwise it makes
the output dense, with dimensions ordered as the operands' strides order them, the first operand
that has an opinion deciding each pair (`permuted_strides`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Layout(NamedTuple):
    """What `torch.empty_strided` needs to make a tensor."""

    shape: tuple[int, ...]
    """Sizes."""
    strides: tuple[int, ...]
    """Strides, in elements."""
    dtype: torch.dtype
    """Element type."""


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """Return the row-major layout of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Layout(tuple(shape), tuple(reversed(strides)), dtype)


_TO_BOOL = {
    getattr(packet, overload)
    for packet in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
    for overload in ("Scalar", "Tensor")
}
_TO_BOOL |= {getattr(aten, f"is{name}").default for name in ("finite", "inf", "nan", "neginf", "posinf")}
_TO_BOOL |= {getattr(aten, f"logical_{name}").default for name in ("and", "not", "or", "xor")}
_TO_BOOL |= {aten.signbit.default}
# Elementwise ops whose output has the type of their operands also where that is no float.
_CLOSED = {aten.add, aten.sub, aten.mul, aten.neg, aten.abs, aten.remainder, aten.fmod, aten.floor_divide} | {
    getattr(aten, name)
    for name in ("clamp", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")
}
# Elementwise ops that do not always keep the layout or the type of their operands.
_IRREGULAR = {aten.mvlgamma, aten.rrelu, aten.float_power}
# Elementwise ops that ask their operands for a layout in another order than that of the arguments.
_REORDERED = {aten.threshold_backward, aten.native_dropout_backward, aten.logit_backward} | {
    getattr(aten, name) for name in ("xlogy", "special_xlog1py", "copysign")
}


def predict_elementwise(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Layout | None:
    """Return the layout of the output of an elementwise op, None for other ops and unsure cases."""
    if torch.Tag.pointwise not in op.tags or op.overloadpacket in _IRREGULAR or op._schema.is_mutable:
        return None
    if [str(value.type) for value in op._schema.returns] != ["Tensor"]:
        return None
    if any(isinstance(value, (Tensor, torch.dtype, torch.memory_format)) for value in kwargs.values()):
        return None
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors or any(isinstance(arg, (list, tuple, complex)) for arg in args):
        return None
    if op.overloadpacket in _REORDERED and len({tensor.stride() for tensor in tensors}) > 1:
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    if op in _TO_BOOL:
        dtype = torch.bool
    elif len(dtypes) != 1:
        return None
    else:
        dtype = tensors[0].dtype
        wider = float if dtype != torch.bool else (float, int)
        closed = op.overloadpacket in _CLOSED and not any(isinstance(arg, wider) for arg in args)
        if not dtype.is_floating_point and not closed:
            return None
    return elementwise(tensors, dtype)


def elementwise(tensors: Sequence[Tensor], dtype: torch.dtype) -> Layout | None:
    """Return the layout of an elementwise op on `tensors` (broadcast against each other)."""
    first = tensors[0]
    if all(tensor.shape == first.shape for tensor in tensors):
        if all(tensor.is_contiguous() for tensor in tensors):
            return contiguous(first.shape, dtype)
        if first.dim() == 4 and any(t.is_contiguous(memory_format=torch.channels_last) for t in tensors):
            return None
        strides = first.stride()
        if all(tensor.stride() == strides for tensor in tensors) and _is_dense(first):
            return Layout(tuple(first.shape), strides, dtype)
    shape = broadcast([tensor.shape for tensor in tensors])
    return None if shape is None else Layout(shape, permuted_strides(shape, tensors), dtype)


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the common shape, or None; torch's own `broadcast_shapes` imports sympy."""
    common = [1] * max(len(shape) for shape in shapes)
    for shape in shapes:
        for dim, size in enumerate(shape, start=len(common) - len(shape)):
            if common[dim] == 1:
                common[dim] = size
            elif size not in (1, common[dim]):
                return None
    return tuple(common)


def permuted_strides(shape: Sequence[int], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return dense strides whose order of dimensions is the one that the operands prefer."""
    operands = [_broadcast_strides(shape, tensor) for tensor in tensors]
    order = list(reversed(range(len(shape))))  # fastest dimension first
    for position in range(1, len(order)):
        moving = position
        for other in reversed(range(position)):
            verdict = _compare(shape, operands, order[other], order[moving])
            if verdict > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif verdict < 0:
                break
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _broadcast_strides(shape: Sequence[int], tensor: Tensor) -> tuple[int, ...]:
    missing = len(shape) - tensor.dim()
    own = (
        0 if size == 1 and shape[missing + dim] != 1 else tensor.stride(dim) for dim, size in enumerate(tensor.shape)
    )
    return (0,) * missing + tuple(own)


def _compare(shape: Sequence[int], operands: Sequence[tuple[int, ...]], inner: int, outer: int) -> int:
    """Return 1 if `inner` should be the slower dimension of the two, -1 if not, 0 if undecided."""
    for strides in operands:
        if strides[inner] == 0 or strides[outer] == 0:
            continue
        if strides[inner] != strides[outer]:
            return 1 if strides[inner] > strides[outer] else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements fill a stretch of memory, each cell once."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
