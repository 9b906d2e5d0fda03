"""Losses whose result, a scalar, keeps memory for the loss of every element.

Their kernels make the result as large as what is reduced and shrink it afterwards, which gives no memory back
(PyTorch's aten/src/ATen/native/Loss.cpp, for CPUs and GPUs; binary_cross_entropy on GPUs: cuda/Loss.cu; found by
running all of PyTorch's sample inputs of operators with and without data, torch 2.13.0).  Tensors without data do not
show it: to them the result has the memory of a scalar.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.recurrent_kernels import with_workspace

aten = torch.ops.aten

_KEEPING = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
}


def keeps_storage(op: torch._ops.OpOverload) -> bool:
    """Return whether `with_kept_storage` may return anything but the output."""
    return op in _KEEPING or op is aten.mkldnn_rnn_layer.default


def with_kept_storage(op: torch._ops.OpOverload, args: Sequence[Any], out: Any) -> Any:
    """Return the output of `op(*args)` with the storage that the op's kernel leaves it, where it has no data.

    To be called below autograd, in a dispatch mode.
    """
    if op is aten.mkldnn_rnn_layer.default:
        return with_workspace(args, out)
    if op not in _KEEPING or out.dim():
        return out
    shape: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    elements = shape.numel()
    if elements * out.element_size() <= out.untyped_storage().nbytes():
        return out
    kept: Tensor = torch.empty(elements, dtype=out.dtype, device=out.device)
    return kept.as_strided((), ())
