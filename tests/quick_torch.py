"""Has PyTorch leave out what it does at every hook of FSDP2 for its compiler and its profiler, where neither runs.

Under each hook of FSDP2 it makes a wrapper that dynamo does not look into, and throws it away; and at each hook and
step of an optimizer it enters and leaves a range of a profiler.  Small models spend a tenth of their time there.  And
the first time that a DTensor is changed in place it runs the operation on fake tensors, of a mode made for that, to
find the shape that the DTensor has: a quarter of a rank's time where an optimizer steps DTensors one by one.

A CPU without instructions for bf16 multiplies matrices of it 10 to 40 times slower than those of fp32, in plain loops.
There products in bf16 are those of fp32 rounded to bf16, as instructions for bf16 make them too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch.autograd.profiler import record_function
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_map_only

IN_PLACE = {"add_", "addcdiv_", "addcmul_", "copy_", "div_", "fill_", "lerp_", "mul_", "sub_", "zero_"}
"""Operations after which a tensor has the shape, the strides and the dtype that it had."""
LIKE = {"detach", "zeros_like"}
"""Those that return another such tensor, unless they are told otherwise."""
FLASH_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = "mm", "addmm", "bmm", "baddbmm", FLASH_FORWARD, f"{FLASH_FORWARD}_backward"
"""Operations whose kernels have no fast path for bf16 on such a CPU."""
_library = torch.library.Library("aten", "IMPL")
"""Its kernels are there as long as it is."""


def install() -> None:
    """Make each wrapper once, and enter no range where no profiler runs, in this process and its forks."""
    if getattr(torch._dynamo.disable, "keeps", False):
        return
    disable, enter, leave = torch._dynamo.disable, record_function.__enter__, record_function.__exit__
    kept: dict[Callable[..., Any], Any] = {}

    def disable_once(fn: Any = None, recursive: bool = True, *, reason: str | None = None, **others: Any) -> Any:
        if reason != "skipping FSDP hooks" or not isinstance(fn, MethodType):
            return disable(fn, recursive, reason=reason, **others)
        if fn.__func__ not in kept:  # which holds no model, as the method does
            kept[fn.__func__] = disable(fn.__func__, recursive, reason=reason, **others)
        return MethodType(kept[fn.__func__], fn.__self__)

    def enter_if_seen(record: record_function) -> record_function:
        return enter(record) if torch._C._autograd._profiler_enabled() else record

    def leave_if_entered(record: record_function, *error: Any) -> None:
        if record.record is not None:
            leave(record, *error)

    meta = "_propagate_tensor_meta_non_cached"
    propagate = getattr(_sharding_prop.ShardingPropagator, meta, None)

    def propagate_out_of_place(self: Any, op_schema: Any) -> Any:
        schema, given = op_schema.op._schema, op_schema.args_schema
        if not schema.returns:  # as fused optimizers
            return None
        name = schema.name.removeprefix("aten::")
        is_alike = name in IN_PLACE or (name in LIKE and "dtype" not in op_schema.kwargs_schema)
        if is_alike and given and isinstance(given[0], DTensorSpec) and given[0].tensor_meta is not None:
            return given[0].tensor_meta
        assert propagate is not None, "else it is not patched"
        return propagate(self, op_schema)

    disable_once.keeps = True  # type: ignore[attr-defined]
    mock.patch.object(torch._dynamo, "disable", disable_once).start()
    if propagate is not None:  # private: there in torch 2.13
        mock.patch.object(_sharding_prop.ShardingPropagator, meta, propagate_out_of_place).start()
    mock.patch.object(record_function, "__enter__", enter_if_seen).start()
    mock.patch.object(record_function, "__exit__", leave_if_entered).start()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        for name in PRODUCTS:
            _multiply_in_fp32(name)


def _multiply_in_fp32(name: str) -> None:
    """Have the CPU compute a product of bf16 tensors as one of fp32."""
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if args[1].dtype is not torch.bfloat16:  # nearly every product, and a factor of each
            return original.call_boxed(keys, *args, **kwargs)
        factors = [one for one in args[:3] if isinstance(one, torch.Tensor)]
        if any(one.dtype is not torch.bfloat16 for one in factors):  # others, and mixed ones, which are refused
            return original.call_boxed(keys, *args, **kwargs)
        wide_args, wide_kwargs = tree_map_only(torch.Tensor, _wide, (args, kwargs))
        found = original.call_boxed(keys, *wide_args, **wide_kwargs)
        if name == FLASH_FORWARD:
            output, logsumexp = found
            return output.bfloat16(), logsumexp
        return tree_map_only(torch.Tensor, torch.Tensor.bfloat16, found)

    with warnings.catch_warnings():  # that a kernel is replaced
        warnings.simplefilter("ignore")
        _library.impl(name, product, "CPU", with_keyset=True, allow_override=True)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor
