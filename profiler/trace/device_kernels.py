"""Which kernels a device would run, where torch decides by device.

Traces run on the meta device (or on CPU fakes), dry runs on CPU fakes, for which torch picks attention and dropout as
it sees fit.  `device_kernels` registers, for as long as it is open, the choice of the device that they stand for:

- attention: fused (nothing of size length^2 is kept) where that device has such a kernel, else the
  plain products and softmax.  The fused CPU op stands in for the CUDA ones: same inputs, same
  outputs, same things saved.  CPUs have no fused attention with dropout.
- LSTM: a CPU runs a layer as one operation, which keeps a workspace (`profiler.recurrent_kernels`).
  What cuDNN keeps is not known: for CUDA the trace has the plain products of every step.
- GRU, RNN and what is left of LSTM: a CPU multiplies the inputs of all steps at once (`profiler.recurrent_layers`).
- packed sequences: plain products of every step (`profiler.trace.packed_sequences`), but of a CPU's LSTM.
- dropout: CUDA keeps a mask of one byte an element, a CPU a factor of the activation's type.
- batch norm over ranks (`SyncBatchNorm`), which takes GPUs only: batch norm, which keeps as much, beside the
  collectives of the statistics.
- collectives of the model's own that take lists: what backends allocate beside them (`profiler.simulated_ranks`).
- batch norm: CPUs take an image of one pixel to be in rows, others go by its strides, so that what is made of the
  result may have its channels last.  Of what is neither in rows nor has its channels last, as sequences (batch, length,
  channels) whose last dimensions are swapped for it, CPUs return rows, without data torch keeps the order.
- group norm: CPUs take images with their channels last as they are, others make a copy that is laid out in rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.recurrent_kernels import lstm, runs_on_onednn
from profiler.recurrent_layers import CELLS, recurrent
from profiler.simulated_ranks import alike_ranks, in_one_piece
from profiler.trace.packed_sequences import as_padded, pad, recurrent_packed
from profiler.trace.shapes import channels_last_format

aten = torch.ops.aten


@contextmanager
def device_kernels(device_type: str, run_on: str) -> Iterator[None]:
    """Make tensors on `run_on` (`meta` or `cpu`) choose kernels as a `device_type` device would.

    The registration is process-wide and ends with the context.
    """
    key = {"meta": "AutogradMeta", "cpu": "AutogradCPU"}[run_on]
    chosen: dict[str, Callable[..., Any]] = {"_pad_packed_sequence": pad}
    chosen |= {f"{name}.data": partial(recurrent_packed, name, device_type == "cpu") for name in CELLS}
    if device_type == "cpu":
        chosen["lstm.data"] = _packed_lstm
    if device_type == "cuda" or run_on == "meta":
        chosen["scaled_dot_product_attention"] = partial(_attention, fused_dropout=device_type == "cuda")
    if (device_type == "cpu") == (run_on == "meta"):  # else torch chooses so itself
        chosen |= {f"{name}.input": partial(recurrent, name, device_type == "cpu") for name in CELLS}
        chosen["group_norm"] = partial(_group_norm, device_type == "cpu")
    if device_type == "cpu" and run_on == "meta":
        chosen["lstm.input"] = _lstm
    if device_type == "cpu":
        chosen["batch_norm"] = _batch_norm
    if device_type == "cuda":
        chosen["dropout"] = _masked_dropout
    synchronized = patch.object(nn.SyncBatchNorm, "forward", _synchronized)
    scoped = torch.library._scoped_library
    with scoped("aten", "IMPL") as library, scoped("c10d", "IMPL") as collectives, synchronized, alike_ranks():
        for name, kernel in chosen.items():
            library.impl(name, kernel, key)
        for name, kernel in in_one_piece().items():
            collectives.impl(name, kernel, key)
        yield


def _synchronized(module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """`SyncBatchNorm.forward`: the statistics of as many ranks as there are, and batch norm with those of this one."""
    if module.training and dist.is_initialized() and dist.get_world_size(module.process_group) > 1:
        x = _Statistics.apply(x, module.num_features, module.process_group)  # type: ignore[no-untyped-call]
    return nn.BatchNorm1d.forward(module, x)


class _Statistics(torch.autograd.Function):
    """What `torch.nn.modules._functions.SyncBatchNorm` exchanges; returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.channels, ctx.group = channels, group
        own = x.new_empty(2 * channels + 1, dtype=_accumulated(x))  # mean, deviation, and how many samples
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
        gather(own.new_empty(dist.get_world_size(group) * len(own)), own, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.all_reduce(gradient.new_empty(2 * ctx.channels, dtype=_accumulated(gradient)), group=ctx.group)
        return gradient, None, None


def _accumulated(x: Tensor) -> torch.dtype:
    """Return the dtype in which CUDA's batch norm sums up."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    fused_dropout: bool,
) -> Tensor:
    """`F.scaled_dot_product_attention`: query (batch, heads, length, width), key and value alike."""
    if not query.dtype == key.dtype == value.dtype:
        dtypes = ", ".join(str(tensor.dtype) for tensor in (query, key, value))
        raise RuntimeError(f"attention needs query, key and value of one dtype, got {dtypes}")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
        never = torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, never)
    out: Tensor
    four = query.dim() == key.dim() == value.dim() == 4
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    plain_mask = attn_mask is None or not (attn_mask.requires_grad or is_causal)
    # Fused kernels broadcast no heads (`check_batch_size_and_num_heads_dense` of torch); groups need to be asked for.
    same_heads = enable_gqa or query.shape[:2] == key.shape[:2] == value.shape[:2]
    # Nor do they read rows with gaps (`check_last_dim_stride_equals_1_dense`).
    in_rows = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    if four and same_width and same_heads and plain_mask and in_rows and (dropout_p == 0.0 or fused_dropout):
        fused = aten._scaled_dot_product_flash_attention_for_cpu
        out = fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return out
    plain, options = aten._scaled_dot_product_attention_math, {"scale": scale, "enable_gqa": enable_gqa}
    out = plain(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]
    return out


def _lstm(x: Tensor, states: Any, parameters: Any, *shape: Any) -> Any:
    """`torch.lstm` on a CPU."""
    if _runs_on_onednn(x, states, parameters):
        return lstm(x, states, parameters, *shape)
    return recurrent("lstm", True, x, states, parameters, *shape)


def _packed_lstm(x: Tensor, left: Tensor, states: Any, parameters: Any, *shape: Any) -> Any:
    """`torch.lstm` of packed samples on a CPU, of one length: oneDNN's kernel keeps more than others' products."""
    if _runs_on_onednn(x, states, parameters):
        return as_padded(lstm, x, left, states, parameters, *shape)
    return recurrent_packed("lstm", True, x, left, states, parameters, *shape)


def _runs_on_onednn(x: Tensor, states: Any, parameters: Any) -> bool:
    """Return whether oneDNN's kernel of an LSTM takes these; projections have none."""
    plain = all(one.dtype == x.dtype for one in parameters) and states[0].shape[2] == states[1].shape[2]
    return plain and runs_on_onednn(x.dtype) and x.numel() > 0


def _masked_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if train and p > 0.0 else x


class _BatchNormInRows(torch.autograd.Function):
    """Batch norm without data whose result, and the gradient of its input, are laid out as kernels of CPUs do it."""

    @staticmethod
    def forward(ctx: Any, form: torch.memory_format, x: Tensor, *others: Any) -> Tensor:
        """`others`: the arguments of `native_batch_norm` after the input."""
        out, *own = aten.native_batch_norm(x, *others)
        weight, _, mean, variance, training, _, eps = others
        ctx.save_for_backward(x, weight, mean, variance, *own)
        ctx.form, ctx.training, ctx.eps = form, training, eps
        return _laid_out(out, form)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, variance, *own = ctx.saved_tensors
        needed = [ctx.needs_input_grad[place] for place in (1, 2, 3)]
        statistics = mean, variance, *own, ctx.training, ctx.eps
        found = aten.native_batch_norm_backward(gradients[0], x, weight, *statistics, needed)
        of_x = None if found[0] is None else _laid_out(found[0], ctx.form)
        return None, of_x, *found[1:], *[None] * 5


def _laid_out(tensor: Tensor, form: torch.memory_format) -> Tensor:
    """Return a tensor without data in the same memory, with the strides of a format."""
    return tensor.as_strided(tensor.shape, torch.empty_like(tensor, device="meta", memory_format=form).stride())


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if x.is_contiguous() and channels_last_format(x) is not torch.contiguous_format:
        x = x.view(-1).view(x.shape)
    form = channels_last_format(x)
    if not x.is_contiguous(memory_format=form):
        apply: Callable[..., Tensor] = _BatchNormInRows.apply
        return apply(form, x, weight, bias, mean, variance, training, momentum, eps)
    checked = aten._batch_norm_impl_index
    out: Tensor = checked(x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled)[0]
    return out


def _group_norm(
    keeps_channels_last: bool,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    x = x.contiguous(memory_format=channels_last_format(x) if keeps_channels_last else torch.contiguous_format)
    batch, channels, *spatial = x.shape
    out: Tensor = aten.native_group_norm(x, weight, bias, batch, channels, prod(spatial), groups, eps)[0]
    return out
