"""Frozen parameters of a class of their own, as quantised models have: what they hold is their library's concern.

    bitsandbytes    a subclass of `nn.Parameter`, packed codes as its data, scales among its attributes
    torchao         a tensor that holds other tensors, and computes by `__torch_dispatch__`

They are in no operator: every rank keeps them whole, and nothing casts, shards or copies them.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from profiler.errors import OsdpError

Swap = Callable[[Tensor], Tensor]


def is_opaque(parameter: Tensor) -> TypeGuard[nn.Parameter]:
    """Whether a parameter's class is neither PyTorch's own nor its data to be trained."""
    own = type(parameter).__module__.split(".")[0] == "torch"
    return isinstance(parameter, nn.Parameter) and not parameter.requires_grad and not own


def is_wrapper(parameter: Tensor) -> bool:
    """Whether a tensor holds others instead of data of its own."""
    return is_opaque(parameter) and is_traceable_wrapper_subclass(parameter)


def rebuilt(name: str, parameter: nn.Parameter, swap: Swap) -> nn.Parameter:
    """Return an opaque parameter of the same class with other tensors in it. Raises OsdpError if it cannot be made."""
    try:
        if is_wrapper(parameter):
            return nn.Parameter(_swapped(parameter, swap), requires_grad=False)
        return _with_attributes(parameter, swap)
    except Exception as error:
        what = f"`{name}` is of a class that cannot be made without data: {type(parameter).__name__}"
        expected = "a subclass of nn.Parameter, or of Tensor with __tensor_flatten__ and __tensor_unflatten__"
        advice = "dequantise it before OSDP(...), or keep it in a buffer that its module's forward reads"
        raise OsdpError(what, got=f"{type(error).__name__}: {error}", expected=expected, advice=advice) from error


def tensors_of(name: str, parameter: nn.Parameter) -> list[Tensor]:
    """Return the plain tensors that an opaque parameter holds."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    rebuilt(name, parameter, note)
    return found


def _swapped(tensor: Any, swap: Swap) -> Tensor:
    """Return a wrapper with other tensors in it, at any depth."""
    if not is_traceable_wrapper_subclass(tensor):
        return swap(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _swapped(getattr(tensor, name), swap) for name in names}
    made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def _with_attributes(parameter: nn.Parameter, swap: Swap) -> nn.Parameter:
    made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), swap(parameter.data), False)
    memo: dict[int, Any] = {id(parameter): made}
    with _SwapsCopied(swap):
        for key, value in vars(parameter).items():  # a module that it belongs to is not its own
            vars(made)[key] = value if isinstance(value, nn.Module) else copy.deepcopy(value, memo)
    return made


class _SwapsCopied(TorchFunctionMode):
    """Has `copy.deepcopy` take another tensor for every tensor that it comes across."""

    def __init__(self, swap: Swap) -> None:
        super().__init__()
        self.swap = swap

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return self.swap(args[0])
        return func(*args, **(kwargs or {}))
