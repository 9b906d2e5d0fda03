"""Operators whose result keeps more memory than it has elements.

Losses, whose result is a scalar, make it as large as what is reduced and shrink it afterwards, which gives no memory
back (PyTorch's aten/src/ATen/native/Loss.cpp, for CPUs and GPUs; binary_cross_entropy on GPUs: cuda/Loss.cu; found by
running all of PyTorch's sample inputs of operators with and without data, torch 2.13.0).  `F.fold` and `F.unfold`, each
the backward of the other, begin with a result as large as their input (Col2Im.cpp, Im2Col.cpp and those in cuda/).
Tensors without data do not show it: to them the result has the memory of its elements.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.recurrent_kernels import in_fp32, with_workspace

aten = torch.ops.aten

_LOSSES = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
}
_FOLDS = {aten.col2im.default, aten.im2col.default}
_LAYERS = {aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default}


def keeps_storage(op: torch._ops.OpOverload) -> bool:
    """Return whether `with_kept_storage` may return anything but the output."""
    return op in _LOSSES or op in _FOLDS or op in _LAYERS


def with_kept_storage(op: torch._ops.OpOverload, args: Sequence[Any], out: Any) -> Any:
    """Return the output of `op(*args)` with the storage that the op's kernel leaves it, where it has no data.

    To be called below autograd, in a dispatch mode.
    """
    if op is aten.mkldnn_rnn_layer.default:
        return with_workspace(args, out)
    if op is aten.mkldnn_rnn_layer_backward.default:
        return in_fp32(out)
    if op in _FOLDS:
        elements = args[0].numel()
    elif op in _LOSSES and not out.dim():
        shape: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        elements = shape.numel()
    else:
        return out
    if elements * out.element_size() <= out.untyped_storage().nbytes():
        return out
    kept: Tensor = torch.empty(elements, dtype=out.dtype, device=out.device)
    return kept.as_strided(out.shape, out.stride())
