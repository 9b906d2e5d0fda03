"""Plain attributes of modules that hold what was computed of parameters, and that a forward computes anew.

So `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` keep a weight, neither as a parameter nor as a buffer: a
hook computes it before each forward.  What is there when a model is built holds whole parameters, by its history or as
it shares their memory, and follows nothing that is sharded.  So a stand-in takes its place until a forward computes it;
a forward that reads it before is refused.  Such attributes are known by what they hold, not by who computes them:

    a tensor with a history (`grad_fn`), or that has elements in common with a parameter; what hooks of
    `torch.nn.utils` compute, also if it has none

Between steps the last forward's tensors are there, whole on every rank: those of hooks are counted as buffers are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from profiler.errors import OsdpError
from profiler.parameter_memory import has_strides, overlap
from profiler.plain_attributes import Replaced, plain_attributes, reads_values, replaced


class NotComputed(Tensor):
    """Stands for a tensor that is not computed yet: it has a shape, a dtype and a device, and no data."""

    place: str

    @staticmethod
    def of(tensor: Tensor, place: str, device: torch.device) -> NotComputed:
        """Return a stand-in for the tensor at a place in a model."""
        strides = tensor.stride() if tensor.layout is torch.strided else None
        made: NotComputed = torch.Tensor._make_wrapper_subclass(
            NotComputed, tensor.shape, strides=strides, dtype=tensor.dtype, device=device
        )
        vars(made)["place"] = place
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if reads_values(func):
            raise _refusal((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _refusal((args, kwargs))  # whatever reached it past its functions

    def __deepcopy__(self, memo: dict[int, Any]) -> NotComputed:
        return self

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"NotComputed({vars(self)['place']!r}, {tuple(self.shape)}, {self.dtype})"


def _refusal(arguments: Any) -> OsdpError:
    place = next(vars(leaf)["place"] for leaf in tree_leaves(arguments) if isinstance(leaf, NotComputed))
    return OsdpError(
        f"`{place}` is read before a forward has computed it: what it was follows no sharded parameter",
        got="a plain attribute of a module, with a tensor that was made of parameters before OSDP had the model",
        expected="one that is computed before it is read, in each forward or in a hook before it",
        advice="compute it in the forward; set a state that an earlier forward has left to None before OSDP(...); keep "
        "values that do not follow parameters as a buffer: self.register_buffer(name, value.detach().clone())",
    )


def _hooked(module: nn.Module) -> set[str]:
    """Return the attributes that hooks of `torch.nn.utils` compute."""
    prune = sys.modules.get("torch.nn.utils.prune")  # nobody has pruned what has not imported it
    names = set[str]()
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            names.add(hook.name)
        elif prune is not None and isinstance(hook, prune.BasePruningMethod):
            names.add(hook._tensor_name)
    return names


def stand_ins(root: nn.Module, device: torch.device) -> dict[int, NotComputed]:
    """Return, by identity of a tensor that was computed of parameters, what stands for it on a device."""
    parameters: dict[int, list[nn.Parameter]] = {}
    for parameter in root.parameters():
        if has_strides(parameter):
            parameters.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)

    def is_computed(tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter):
            return False
        if isinstance(tensor, NotComputed) or tensor.grad_fn is not None:
            return True
        if not (parameters and has_strides(tensor) and tensor.numel()):
            return False
        return any(overlap(tensor, one) for one in parameters.get(tensor.untyped_storage()._cdata, ()))

    found: dict[int, NotComputed] = {}
    for path, module in root.named_modules():
        hooked = _hooked(module)
        for key, value in plain_attributes(module):
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and id(leaf) not in found and (key in hooked or is_computed(leaf)):
                    found[id(leaf)] = NotComputed.of(leaf, f"{path}.{key}" if path else key, device)
    return found


def forget_computed(root: nn.Module, device: torch.device) -> list[tuple[nn.Module, str, Any]]:
    """Put stand-ins in place of what was computed of parameters; return where it was, and what."""
    made = stand_ins(root, device)
    before, containers = list[tuple[nn.Module, str, Any]](), Replaced()
    for module in root.modules() if made else ():
        for key, value in list(plain_attributes(module)):
            if any(id(leaf) in made for leaf in tree_leaves(value)):
                before.append((module, key, value))
                vars(module)[key] = replaced(value, Tensor, lambda tensor: made.get(id(tensor), tensor), containers)
    return before


@contextmanager
def computed_forgotten(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Have stand-ins in place of what was computed of parameters within, and put it back at the end."""
    before = forget_computed(root, device)
    try:
        yield
    finally:
        for module, key, value in before:
            vars(module)[key] = value


@dataclass(frozen=True)
class ComputedAttribute:
    """A plain attribute of which a stand-in was found, on a module with hooks before its forward."""

    name: str
    module: nn.Module
    key: str
    shapes: tuple[torch.Size, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds now."""
        return [leaf for leaf in tree_leaves(vars(self.module).get(self.key)) if isinstance(leaf, Tensor)]


def computed_by_hooks(root: nn.Module) -> list[ComputedAttribute]:
    """Return the attributes in which there are stand-ins, and which hooks may be to compute."""
    found = list[ComputedAttribute]()
    for path, module in root.named_modules():
        for key, value in plain_attributes(module) if module._forward_pre_hooks else ():
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if any(isinstance(leaf, NotComputed) for leaf in leaves):
                name = f"{path}.{key}" if path else key
                found.append(ComputedAttribute(name, module, key, tuple(leaf.shape for leaf in leaves)))
    return found


def values_of(computed: Sequence[ComputedAttribute]) -> list[tuple[str, Tensor]]:
    """Return what a forward has put into attributes, each storage once, with the attribute's name.

    Left out are views of parameters, and what has got another shape: that may be an output that a module keeps.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for one in computed:
        tensors = one.tensors
        if tuple(tensor.shape for tensor in tensors) == one.shapes:
            own = {parameter.untyped_storage()._cdata for parameter in one.module.parameters()}
            for tensor in tensors:
                if not isinstance(tensor, NotComputed) and (key := tensor.untyped_storage()._cdata) not in own:
                    found.setdefault(key, (one.name, tensor))
    return [*found.values()]
