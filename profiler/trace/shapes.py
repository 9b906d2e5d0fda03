"""Shape, strides and dtype of an op's outputs, without running it.

Torch's own meta kernels answer the same question for every op, but the Python ones take up to 2 ms
a call and import sympy and dynamo at first use (1.5 s).  The rules here cover what transformers
spend their time in and give up, by returning None, on whatever is not plainly inside them; the
tracer then asks torch.  What kernels refuse and torch's meta kernels do not is refused here.  The
unit tests hold every rule against torch's CPU kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.trace.elementwise import Layout, broadcast, contiguous, elementwise, permuted_strides, predict_elementwise

aten = torch.ops.aten
META = torch.device("meta")

Layouts = Layout | list[Layout | None]
"""One output, or several of which some are not computed."""
Rule = Callable[..., Layouts | None]
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def predict(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Layouts | None:
    """Return the layouts of the outputs of `op(*args, **kwargs)`, or None where no rule is sure."""
    rule = _RULES.get(op)
    if rule is not None:
        return rule(*args, **kwargs)
    return predict_elementwise(op, args, kwargs)


def make(layouts: Layouts) -> Any:
    """Make outputs of these layouts on the meta device."""
    if isinstance(layouts, Layout):
        return torch.empty_strided(layouts.shape, layouts.strides, dtype=layouts.dtype, device=META)
    return tuple(None if layout is None else make(layout) for layout in layouts)


def channels_last_format(tensor: Tensor) -> torch.memory_format:
    """Return in which format kernels take the memory of images: their channels may be the last dimension there.

    As `suggest_memory_format` of torch, for tensors of 4 and 5 dimensions.
    """
    if tensor.dim() not in _CHANNELS_LAST or not tensor.stride(1):
        return torch.contiguous_format
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        step = tensor.stride(dim)
        if step < least or (not dim and least == tensor.stride(1)):  # one channel, or one pixel
            return torch.contiguous_format
        least = step * max(1, tensor.shape[dim])
    return _CHANNELS_LAST[tensor.dim()]


def _is_row_major(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _may_be_channels_last(tensor: Tensor) -> bool:
    """Return whether its memory is that of an image with its channels last; if it has one pixel, of one in rows too."""
    wanted = _CHANNELS_LAST.get(tensor.dim())
    return wanted is not None and tensor.is_contiguous(memory_format=wanted)


# --- matrix products ------------------------------------------------------------------------------


def _mm(a: Tensor, b: Tensor) -> Layout | None:
    if a.dtype != b.dtype or a.shape[1] != b.shape[0]:
        return None
    return contiguous((a.shape[0], b.shape[1]), a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Layout | None:
    return _mm(a, b) if bias.dtype == a.dtype and bias.shape[-1:] in (b.shape[1:], (1,)) else None


def _bmm(a: Tensor, b: Tensor) -> Layout | None:
    if a.dtype != b.dtype or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return None
    return contiguous((a.shape[0], a.shape[1], b.shape[2]), a.dtype)


# --- convolutions ---------------------------------------------------------------------------------


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Layout | None:
    """As CPUs and cuDNN lay it out; torch's meta kernel, which knows no device, lays out all in rows."""
    spatial = range(x.dim() - 2)
    if x.dim() != weight.dim():
        return None
    if x.dtype != weight.dtype or any(len(one) != len(spatial) for one in (stride, padding, dilation, output_padding)):
        return None
    shape = [x.shape[0], weight.shape[1] * groups if transposed else weight.shape[0]]
    for i in spatial:
        size, reach = x.shape[2 + i], dilation[i] * (weight.shape[2 + i] - 1) - 2 * padding[i]
        last = (size - 1) * stride[i] + reach + output_padding[i] if transposed else (size - 1 - reach) // stride[i]
        shape.append(last + 1)
    _check_channels(x.shape, weight.shape, bias, shape, transposed, groups)
    if {channels_last_format(x), channels_last_format(weight)} == {torch.contiguous_format}:
        return contiguous(shape, x.dtype)
    first, *others, channels = contiguous((shape[0], *shape[2:], shape[1]), x.dtype).strides
    return Layout(tuple(shape), (first, channels, *others), x.dtype)


def _check_channels(
    x: Sequence[int], weight: Sequence[int], bias: Tensor | None, out: Sequence[int], transposed: bool, groups: int
) -> None:
    """Raise RuntimeError for what kernels of convolutions refuse, and not all of torch's meta kernels do."""
    taken = weight[0] if transposed else weight[1] * groups
    if x[1] != taken or weight[0] % groups:
        raise RuntimeError(f"weights of shape {(*weight,)} in {groups} groups take {taken} channels, got {x[1]}")
    if bias is not None and (*bias.shape,) != (out[1],):
        raise RuntimeError(f"weights of shape {(*weight,)} take a bias of {out[1]} elements, got {(*bias.shape,)}")
    if min(out[2:]) < 1:
        raise RuntimeError(f"weights of shape {(*weight,)} are larger than an input of shape {(*x,)} with its padding")


# --- normalisation, softmax, loss -----------------------------------------------------------------


def _like(x: Tensor) -> Layout | None:
    return contiguous(x.shape, x.dtype) if _is_row_major(x) else None


def _as_laid_out(x: Tensor) -> Layout | None:
    """Return the layout of a tensor in rows, its strides of dimensions of size 1 among it, which kernels go by."""
    return Layout(tuple(x.shape), x.stride(), x.dtype) if _is_row_major(x) else None


def _ones_like(x: Tensor, **options: Any) -> Layout | None:
    wanted = {key for key, value in options.items() if value not in (None, False, torch.preserve_format)}
    return None if wanted else _as_laid_out(x)


def _clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Layout | None:
    if memory_format == torch.contiguous_format:
        return contiguous(x.shape, x.dtype)
    return _as_laid_out(x) if memory_format in (None, torch.preserve_format) else None


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Layout | None:
    return None if half_to_float else _like(x)


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Layout | None:
    return _like(grad) if _is_row_major(output) and grad.dtype == input_dtype else None


def _nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Layouts | None:
    if reduction == 0 or x.dim() != 2:
        return None
    return [contiguous((), x.dtype), contiguous((), x.dtype)]


def _nll_loss_backward(grad: Tensor, x: Tensor, *rest: Any) -> Layout | None:
    return _like(x)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Layouts | None:
    first = x.dim() - len(shape)
    if not _is_row_major(x) or x.shape[first:] != tuple(shape):
        return None
    if any(p is not None and (p.dtype != x.dtype or p.shape != x.shape[first:]) for p in (weight, bias)):
        return None
    rows = (*x.shape[:first], *(1 for _ in shape))
    return [contiguous(x.shape, x.dtype), contiguous(rows, x.dtype), contiguous(rows, x.dtype)]


def _layer_norm_backward(grad: Tensor, x: Tensor, shape: Sequence[int], *rest: Any) -> Layouts | None:
    _, _, weight, bias, mask = rest  # after mean and rstd
    if not _is_row_major(x) or (weight is None and mask[1]) or (bias is None and mask[2]):
        return None
    wanted = zip((x.shape, shape, shape), mask, strict=True)
    return [contiguous(sizes, x.dtype) if needed else None for sizes, needed in wanted]


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, train: bool, *_: Any
) -> Layouts | None:
    dtypes = {one.dtype for one in (weight, bias, mean, var) if one is not None} or {x.dtype}
    alike = dtypes == {x.dtype} and x.dtype in (torch.float32, torch.float64)
    mixed = dtypes == {torch.float32} and x.dtype == torch.bfloat16
    if not train or not _is_row_major(x) or _may_be_channels_last(x) or not (alike or mixed):
        return None
    statistics = contiguous(x.shape[1:2], *dtypes)
    return [contiguous(x.shape, x.dtype), statistics, statistics]


def _batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> Layouts | None:
    *_, train, _, (needed, *of_parameters) = rest
    is_plain = train and needed and _is_row_major(x) and grad.dtype == x.dtype
    if not is_plain or (weight is None and any(of_parameters)):
        return None
    channels = None if weight is None else contiguous(x.shape[1:2], weight.dtype)
    return [contiguous(x.shape, x.dtype), *(channels if needed else None for needed in of_parameters)]


# --- attention ------------------------------------------------------------------------------------


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Layouts | None:
    batch, heads, length, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    strides = permuted_strides(query.shape, [query])
    # The statistics are stored (batch, length, heads), handed out (batch, heads, length).
    rows = Layout((batch, heads, length), (length * heads, 1, heads), wide)
    return [Layout(tuple(query.shape), strides, query.dtype), rows]


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Layouts:
    layouts: list[Layout | None] = []
    for tensor in (query, key, value):
        batch, heads, length, width = tensor.shape
        strides = (length * heads * width, width, heads * width, 1)
        layouts.append(Layout((batch, heads, length, width), strides, tensor.dtype))
    return layouts


# --- reductions, tables, copies -------------------------------------------------------------------


def _reduce(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Layout | None:
    if not x.dtype.is_floating_point or dtype not in (None, x.dtype):
        return None
    gone = {d % x.dim() for d in dim} if dim else set(range(x.dim()))
    shape = [1 if d in gone else size for d, size in enumerate(x.shape) if keepdim or d not in gone]
    return contiguous(shape, x.dtype)


def _embedding(table: Tensor, index: Tensor, *rest: Any) -> Layout | None:
    if index.dtype not in (torch.int64, torch.int32):
        return None
    return contiguous((*index.shape, table.shape[1]), table.dtype)


def _embedding_backward(grad: Tensor, index: Tensor, rows: int, *rest: Any) -> Layout | None:
    return contiguous((rows, grad.shape[-1]), grad.dtype)


def _filled(size: Sequence[int], *, dtype: torch.dtype | None = None, **rest: Any) -> Layout:
    return contiguous(size, dtype or torch.get_default_dtype())


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **rest: Any) -> Layout | None:
    inferred = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    dtype = dtype or inferred.get(type(value))
    return None if dtype is None else contiguous(size, dtype)


def _scalar(value: Any, *, dtype: torch.dtype | None = None, **rest: Any) -> Layout:
    return contiguous((), dtype or torch.get_default_dtype())


def _randint(high: int, size: Sequence[int], *, dtype: torch.dtype = torch.int64, **rest: Any) -> Layout:
    return contiguous(size, dtype)


def _randint_low(low: int, high: int, size: Sequence[int], **options: Any) -> Layout:
    return _randint(high, size, **options)


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **rest: Any) -> Layout | None:
    if not all(isinstance(bound, int) for bound in (start, end, step)):
        return None
    return contiguous((len(range(start, end, step)),), dtype or torch.int64)


def _arange_from_zero(end: Any, **options: Any) -> Layout | None:
    return _arange(0, end, **options)


def _scalar_power(base: Any, exponent: Tensor) -> Layout | None:
    return contiguous(exponent.shape, exponent.dtype) if exponent.is_floating_point() else None


def _triangle(x: Tensor, diagonal: int = 0) -> Layout | None:
    return _like(x)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Layout | None:
    return elementwise([condition, x, y], x.dtype) if x.dtype == y.dtype else None


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Layout | None:
    shape = broadcast([x.shape, mask.shape])
    return None if shape is None else contiguous(shape, x.dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Layout | None:
    first = tensors[0]
    if any(t.dtype != first.dtype or t.dim() != first.dim() or _may_be_channels_last(t) for t in tensors):
        return None
    if not -first.dim() <= dim < first.dim():
        return None
    shape = list(first.shape)
    rest, dim = (*shape[:dim], *shape[dim:][1:]), dim % first.dim()
    if any((*t.shape[:dim], *t.shape[dim + 1 :]) != rest for t in tensors):
        return None
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return contiguous(shape, first.dtype)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Layout | None:
    first = tensors[0]
    if any(t.shape != first.shape or t.dtype != first.dtype or _may_be_channels_last(t) for t in tensors):
        return None
    shape = list(first.shape)
    shape.insert(dim % (first.dim() + 1), len(tensors))
    return contiguous(shape, first.dtype)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> Layouts | None:
    if not _is_row_major(x) or not train:
        return None
    return [contiguous(x.shape, x.dtype), Layout(tuple(x.shape), x.stride(), torch.bool)]


def _sized(grad: Tensor, sizes: Sequence[int], *rest: Any) -> Layout | None:
    return contiguous(sizes, grad.dtype)


_RULES: dict[torch._ops.OpOverload, Rule] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.convolution.default: _convolution,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.sum.default: _reduce,
    aten.sum.dim_IntList: _reduce,
    aten.mean.default: _reduce,
    aten.mean.dim: _reduce,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.zeros.default: _filled,
    aten.ones.default: _filled,
    aten.rand.default: _filled,
    aten.randn.default: _filled,
    aten.full.default: _full,
    aten.scalar_tensor.default: _scalar,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.arange.default: _arange_from_zero,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.pow.Scalar: _scalar_power,
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.clone.default: _clone,
    aten.ones_like.default: _ones_like,
    aten.zeros_like.default: _ones_like,
    aten.empty_like.default: _ones_like,
    aten.native_dropout.default: _native_dropout,
    aten.select_backward.default: _sized,
    aten.slice_backward.default: _sized,
}
