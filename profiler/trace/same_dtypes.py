"""Ops that take tensors of one dtype: kernels check that, and what makes up shapes for tensors without data does not.

Under bf16 the runtime casts parameters and inputs of modules, and leaves buffers as they are, so that a buffer in fp32
may meet what was computed in bf16.  Without this check, such a model is planned and fails in its first step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

_OF_ONE_DTYPE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("mm", "mv", "addmm", "addmm_", "addmv", "addmv_", "addbmm", "addbmm_"),
        *("index_add", "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_"),
        *("index_put", "index_put_", "_index_put_impl_", "put", "put_"),
        *("grid_sampler_2d", "grid_sampler_3d", "nll_loss_forward", "nll_loss2d_forward", "_cdist_forward"),
        *("convolution", "bmm", "baddbmm", "baddbmm_"),
    )
)
"""Which torch refuses with data of two dtypes, on CPUs as on GPUs, and takes without (2.13; the last three 2.11)."""


class UnlikeDtypesError(RuntimeError):
    """An op was handed tensors of several floating-point dtypes and takes those of one."""


def check_dtypes(func: OpOverload, tensors: Sequence[Tensor]) -> None:
    """Raise UnlikeDtypesError for what an op would refuse with data."""
    if func.overloadpacket not in _OF_ONE_DTYPE:
        return
    dtypes = dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in tensors if one.is_floating_point())
    if len(dtypes) > 1:
        raise UnlikeDtypesError(f"it takes tensors of one dtype, got {' and '.join(dtypes)}")
