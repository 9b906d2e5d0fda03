"""Mixed precision: which parameters compute in another dtype than they rest in, and what is cast for them.

    precision    parameters compute in       floating-point inputs
    fp32         the dtype that they have    as they are
    bf16         bf16, but for those below   of the model, and of each module that owns parameters, cast to bf16
    amp-bf16     as `torch.autocast` in bf16 has each operation of the model's forward compute
    amp-fp16     the same in fp16

Under bf16 these compute in the dtype that they have:

    batch norm, instance norm    their statistics are sums over many steps; the kernels take inputs of another dtype
    parametrized modules         the parametrization may have no kernel in bf16 (orthogonal, spectral norm); inputs
                                 are cast to its dtype, and outputs to bf16
    complex and integer tensors
    what every rank holds whole  parameters without dimensions, or of another dtype than the others of their module:
                                 nothing gathers them, so nothing casts them
    buffers                      as under FSDP2: tables of positions and statistics need their bits

Trained parameters of fewer bits than 32 rest in fp32 where the user asks for `master_weights: fp32`.

The tracer and the runtime cast by the same hooks, so that what is priced is what runs, and does not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from profiler.opaque_parameters import is_opaque

COMPUTE_DTYPE = {"fp32": None, "bf16": torch.bfloat16, "amp-bf16": None, "amp-fp16": None}
"""What parameters are cast to before they compute; None: to nothing."""
AUTOCAST_DTYPE = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
"""What `torch.autocast` around the model's forward has products compute in."""
MASTER_WEIGHTS = {"": None, "fp32": torch.float32}
"""What trained parameters of fewer bits rest in; None: the dtype that they have."""
_STATISTICS = (nn.modules.batchnorm._NormBase,)
_LEAVES = (Tensor, type(None), bool, int, float, str)
"""What modules are mostly called with."""


@dataclass(frozen=True)
class RestingDtype:
    """The dtypes of one parameter."""

    rest: torch.dtype
    """Of what each rank keeps, and of optimizer states."""
    compute: torch.dtype
    """Of what its module computes with."""
    keeps: bool
    """Whether mixed precision leaves it as it is."""

    def kept(self) -> RestingDtype:
        """Return those of a parameter that computes in what it rests in."""
        return RestingDtype(self.rest, self.rest, self.keeps or self.compute != self.rest)


def master_dtype(parameter: nn.Parameter, master_weights: str) -> torch.dtype:
    """Return what a parameter rests in."""
    wanted, dtype = MASTER_WEIGHTS[master_weights], parameter.dtype
    raised = wanted is not None and parameter.requires_grad and dtype.is_floating_point
    return wanted if wanted and raised and dtype.itemsize < wanted.itemsize else dtype


def resting_dtypes(root: nn.Module, precision: str, master_weights: str = "") -> dict[str, RestingDtype]:
    """Return the dtypes of every parameter, by name."""
    kept, compute = keeps_dtype(root), COMPUTE_DTYPE[precision]
    found = {}
    for name, parameter in root.named_parameters():
        rest, keeps = master_dtype(parameter, master_weights), compute is not None and name in kept
        found[name] = RestingDtype(rest, rest if compute is None or keeps else compute, keeps)
    return found


def keeps_dtype(root: nn.Module) -> set[str]:
    """Return the names of parameters that mixed precision does not cast, by all names that they have."""
    kept = set[int]()
    for path, module in root.named_modules():
        whole = is_parametrized(module)
        if whole or isinstance(module, _STATISTICS):
            named = module.named_parameters(path, recurse=whole, remove_duplicate=False)
            kept.update(id(parameter) for _, parameter in named)
    named = root.named_parameters(remove_duplicate=False)
    return {name for name, one in named if id(one) in kept or not one.is_floating_point() or is_opaque(one)}


def cast_inputs(root: nn.Module, precision: str) -> list[RemovableHandle]:
    """Register the hooks that cast inputs under a precision, before those of what has wrapped the modules.

    So the backward of a unit has ended when there is the gradient of the cast input.
    """
    dtype, handles, inside = COMPUTE_DTYPE[precision], list[RemovableHandle](), list[str]()
    if dtype is None:
        return []
    for path, module in root.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in inside):
            continue
        if is_parametrized(module):
            inside.append(path)
            own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
            handles.append(module.register_forward_pre_hook(_cast_to(own), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(lambda module, args, output: cast(output, dtype)))
        elif not isinstance(module, _STATISTICS) and (module is root or any(True for _ in module.parameters(False))):
            handles.append(module.register_forward_pre_hook(_cast_to(dtype), prepend=True, with_kwargs=True))
    return handles


def autocast_forwards(root: nn.Module, precision: str, device_type: str) -> Callable[[], None]:
    """Have a model's forward run under autocast, where a precision asks for that; return what undoes it.

    Not by hooks: an exception that is no `Exception` would leave the context on.
    """
    dtype = AUTOCAST_DTYPE.get(precision)
    if dtype is None:
        return lambda: None
    own, inner = vars(root).get("forward"), root.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            return inner(*args, **kwargs)

    def undo() -> None:
        del vars(root)["forward"]
        if own is not None:
            vars(root)["forward"] = own

    vars(root)["forward"] = forward
    return undo


@contextmanager
def computing_in(root: nn.Module, precision: str, device_type: str) -> Iterator[None]:
    """Have a model compute in a precision within, on a type of device."""
    handles, undo = cast_inputs(root, precision), autocast_forwards(root, precision, device_type)
    try:
        yield
    finally:
        undo()
        for handle in handles:
            handle.remove()


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return nested values with floating-point tensors cast."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _cast_to(dtype: torch.dtype) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Inputs | None]:
    def needs_cast(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype != dtype and value.is_floating_point()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        # Every module with parameters runs it in every forward, and PyTorch's functions for nested values take longer.
        values = (*args, *kwargs.values())
        leaves = values if all(isinstance(value, _LEAVES) for value in values) else tree_leaves(values)
        if not any(needs_cast(leaf) for leaf in leaves):
            return None
        made: Inputs = cast((args, kwargs), dtype)
        return made

    return hook
