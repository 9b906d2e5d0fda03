"""`torch.autocast` for tensors that have no data, or that stand for those of another device.

Autocast is a layer of the dispatcher with a key for each type of device, which tensors on the meta device do not reach
and which does nothing for GPUs where PyTorch finds none.  Here the key of a backend of which PyTorch has no
kernels does what that of the device does which is stood for; its kernels stay for the process, and act only within:

    lower precision    products cast their arguments to the dtype of the context
    by their dtype     sums, softmax and norms on GPUs compute in fp32, which an argument of that name asks for
    widest             what may mix dtypes casts to the widest
    fp32               all others that have a kernel for autocast cast their arguments to fp32

Copies of leaves that require gradients are kept until the outermost context is left or the cache is cleared.  Which ops
have kernels the dispatcher says; which of them are of the first three kinds is as in `ATen/autocast_mode.h` and
`ATen/autocast_mode.cpp` of PyTorch 2.13, and of 2.11, which has dimensions with names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What graphs and plans call the dtypes that it computes in."""

_STAND_INS = {"cpu": "ipu", "cuda": "hpu"}
"""By type of device: the one whose autocast is used for it, of which PyTorch itself has no kernels."""
_KEYS = {kind: getattr(torch._C.DispatchKey, f"Autocast{name.upper()}") for kind, name in _STAND_INS.items()}
_KERNELS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
"""Under which an op has a kernel where autocast treats it on a type of device."""


def _ops(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


_PRODUCTS = """
_convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm scaled_dot_product_attention
"""
_LOWER = {
    "cuda": _ops(
        f"{_PRODUCTS} _convolution convolution cudnn_convolution cudnn_convolution_transpose addmv addr einsum mv "
        "chain_matmul linalg_multi_dot _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell "
        "rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention"
    ),
    "cpu": _ops(
        f"{_PRODUCTS} conv1d.padding conv2d.padding conv3d.padding _addmm_activation mkldnn_rnn_layer "
        "_native_multi_head_attention"
    ),
}
_BY_DTYPE = {
    "cuda": _ops(
        "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord sum sum.dim_IntList "
        "prod.dim_Dimname softmax.Dimname log_softmax.Dimname cumprod.dimname cumsum.dimname sum.dim_DimnameList"
    ),
    "cpu": _ops(""),
}
_WIDEST = {
    "cuda": _ops("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"),
    "cpu": _ops("stack cat index_copy"),
}
_OTHER_OVERLOADS = {
    "aten::norm.Scalar": "ScalarOpt_dtype",
    "aten::norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "aten::norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}
"""On GPUs: those that take the dtype to compute in, where an op itself does not."""


class Autocast:
    """Autocast of a type of device, for tensors that stand for those of the device."""

    def __init__(self, device_type: str, stand_in_type: str) -> None:
        self.device_type = device_type
        self._is_there = device_type == "cpu" or torch.cuda.is_available()
        self._types, self._name = (device_type, stand_in_type), _STAND_INS[device_type]
        self.asked = dict[torch.dtype, None]()
        """Dtypes of contexts that have been entered, in order."""
        self.cast = dict[int, int]()
        """By identity of a parameter that was cast to one of them: its elements."""
        self.is_off = False
        """Whether a context was entered that is off, and may be so as it was made where PyTorch has found no GPU."""
        self._made = weakref.WeakSet[torch.autocast]()
        self._copies = dict[int, tuple[Tensor, Tensor]]()
        """By identity of a leaf: the leaf and its copy."""
        self._units: Callable[[], Iterable[tuple[nn.Module, bool]]] = tuple
        self._hooks = list[RemovableHandle]()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Have contexts for either type of device treat tensors of the second, and questions answered for them."""
        global _current
        before, clear = _current, torch.clear_autocast_cache
        kind: Any = torch.autocast
        make, enter, leave = kind.__init__, kind.__enter__, kind.__exit__

        @wraps(make)
        def made(
            context: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
        ) -> None:
            if device_type not in self._types:
                make(context, device_type, dtype, enabled, *args, **kwargs)
            else:
                make(context, self.device_type, dtype, False, *args, **kwargs)  # else it asks for the device
                context._enabled = enabled and context.fast_dtype in NAMES
                self._made.add(context)

        @wraps(enter)
        def entered(context: Any) -> Any:
            if context.device == self.device_type:
                context.device = self._name
                self.is_off |= not context._enabled and context not in self._made and not self._is_there
                if context._enabled:
                    _register(self.device_type)
                    self.asked[context.fast_dtype] = None
                    self._hook()
            return enter(context)

        @wraps(leave)
        def left(context: Any, *error: Any) -> Any:
            found = leave(context, *error)
            if context.device == self._name:
                context.device = self.device_type
            return found

        def cleared() -> None:
            self._copies.clear()
            clear()

        state = torch.is_autocast_enabled(self._name), torch.get_autocast_dtype(self._name)
        with ExitStack() as stack:
            stack.callback(self._copies.clear)
            stack.callback(self._unhook)
            torch.set_autocast_dtype(self._name, torch.get_autocast_dtype(self.device_type))
            stack.callback(torch.set_autocast_dtype, self._name, state[1])
            stack.callback(torch.set_autocast_enabled, self._name, state[0])
            for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
                stack.enter_context(patch.object(torch, name, self._of_stand_in(getattr(torch, name))))
            available = self._of_stand_in(torch.amp.is_autocast_available)
            stack.enter_context(patch.object(torch.amp, "is_autocast_available", available))
            for name, method in (("__init__", made), ("__enter__", entered), ("__exit__", left)):
                stack.enter_context(patch.object(torch.autocast, name, method))
            stack.enter_context(patch.object(torch, "clear_autocast_cache", cleared))
            stack.enter_context(torch._C._IncludeDispatchKeyGuard(_KEYS[self.device_type]))
            _current = self
            try:
                yield
            finally:
                _current = before

    def dtype_of(self, root: nn.Module) -> str:
        """Return what graphs call the dtype in which most weights are multiplied; empty if that is their own.

        As with parameters of few bits, products are priced at the rate at which most are computed.
        """
        elements = sum(parameter.numel() for parameter in root.parameters()) if self.cast else 0
        return NAMES[next(iter(self.asked))] if 2 * sum(self.cast.values()) > elements else ""

    def forget_before(self, units: Callable[[], Iterable[tuple[nn.Module, bool]]]) -> None:
        """Have copies of weights forgotten as a module is called, as units of a plan have them forgotten.

        Where it is a unit in every plan, as the second of each pair says, all of them; else those of its own weights,
        as it may be one that is called again.  They are asked for when a context is entered.
        """
        self._units = units

    def _hook(self) -> None:
        for module, is_unit in self._units() if not self._hooks else ():
            forget = self._forget_all if is_unit else self._forget_own
            self._hooks.append(module.register_forward_pre_hook(forget, prepend=True))

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _forget_all(self, module: nn.Module, args: Any) -> None:
        torch.clear_autocast_cache()

    def _forget_own(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters() if self._copies else ():
            self._copies.pop(id(parameter), None)

    def _of_stand_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose first argument, a type of device that is CUDA by default, may be one of these."""

        @wraps(function)
        def found(device_type: str = "cuda", *args: Any) -> Any:
            return function(self._name if device_type in self._types else device_type, *args)

        return found

    def treat(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run an op as it runs where autocast is on."""
        kind, name, other = self.device_type, op._name, _OTHER_OVERLOADS.get(op._name)
        if name in _LOWER[kind]:
            dtype = torch.get_autocast_dtype(self._name)
        elif name in _WIDEST[kind]:
            dtype = self._widest((args, kwargs))
        elif other or name in _BY_DTYPE[kind]:
            return self._in_fp32(getattr(op.overloadpacket, other) if other else op, op, args, kwargs)
        else:
            dtype = torch.float32
        args, kwargs = tree_map_only(Tensor, lambda one: self._cast(one, dtype), (args, kwargs))
        return op(*args, **kwargs)

    def _in_fp32(self, op: OpOverload, given: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op with fp32 for its dtype, unless it has got one; `given` where it is not for an autocast tensor."""
        if not self._is_treated(args[0]):
            return given(*args, **kwargs)
        if op is not given:  # there is no default where another argument follows
            rest = given._schema.arguments[len(args) :]
            kwargs = {one.name: one.default_value for one in rest if one.has_default_value()} | dict(kwargs)
        place = [argument.name for argument in op._schema.arguments].index("dtype")
        if len(args) > place and args[place] is None:
            args = (*args[:place], torch.float32, *args[place + 1 :])
        elif len(args) <= place and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)

    def _is_treated(self, value: Any) -> bool:
        is_tensor = isinstance(value, Tensor) and value.device.type == self._types[1]
        return is_tensor and value.is_floating_point() and value.dtype != torch.float64

    def _widest(self, arguments: Any) -> torch.dtype:
        """Return the dtype of the context, or fp32 if an argument is of that."""
        treated = [one for one in tree_leaves(arguments) if self._is_treated(one)]
        is_wide = any(one.dtype == torch.float32 for one in treated)
        return torch.float32 if is_wide else torch.get_autocast_dtype(self._name)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._is_treated(tensor) or tensor.dtype == dtype:
            return tensor
        if dtype != torch.float32 and isinstance(tensor, nn.Parameter):
            self.cast[id(tensor)] = tensor.numel()
        is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not (is_weight and dtype == torch.get_autocast_dtype(self._name) and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        known = self._copies.get(id(tensor))
        if known is None or known[1].dtype != dtype:
            known = self._copies[id(tensor)] = tensor, tensor.to(dtype)
        return known[1]


_current: Autocast | None = None
"""What stands in now."""


@cache
def _register(device_type: str) -> tuple[torch.library.Library, ...]:
    """Give the key of a stand-in kernels for all ops of PyTorch's that autocast treats on a type of device."""
    key = _KEYS[device_type].name
    make = torch.library.Library
    others, own = make("_", "IMPL", key), make("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
    for name in treated(device_type):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernel = _kernel_of(op, torch._C.DispatchKeySet(_KEYS[device_type]))
        own.impl(op, kernel, key)  # type: ignore[no-untyped-call]
    return others, own  # what they have registered is gone with them


def treated(device_type: str) -> frozenset[str]:
    """Return the names of PyTorch's own ops that autocast treats on a type of device."""
    has_kernel, key = torch._C._dispatch_has_kernel_for_dispatch_key, _KERNELS[device_type]
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return frozenset(name for name in names if has_kernel(name, key))


def _kernel_of(op: OpOverload, key: torch._C.DispatchKeySet) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*args, **kwargs) if _current is None else _current.treat(op, *args, **kwargs)

    return kernel
