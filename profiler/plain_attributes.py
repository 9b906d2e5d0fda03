"""Tensors that modules keep in lists and other plain attributes, beside what they register."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.parameter_memory import has_strides

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold what is registered, and hooks."""

_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that have its values."""
_ABOUT = {Tensor.numel, Tensor.nelement, Tensor.size, Tensor.dim, Tensor.stride, Tensor.element_size}
_ABOUT |= {Tensor.ndimension, Tensor.type, Tensor.requires_grad_, Tensor.get_device, Tensor.data_ptr, Tensor.is_set_to}
_ABOUT |= {Tensor.__repr__, Tensor.untyped_storage, Tensor.storage_offset, Tensor.is_pinned, Tensor.is_same_size}
_ABOUT |= {Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__hash__, Tensor.__len__}
"""Methods that tell of a tensor and not what is in it."""


def reads_values(func: Any) -> bool:
    """Return whether a function of PyTorch, as `__torch_function__` gets it, reads what is in tensors."""
    of_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
    return getattr(func.__self__, "__name__", "") in _VIEWS if of_attribute else func not in _ABOUT


Replaced = dict[int, tuple[Any, Any]]
"""By identity of what attributes held: that, and what they hold instead."""


def replaced(value: Any, kind: type[Tensor], replacement: Callable[[Any], Any], known: Replaced) -> Any:
    """Return what an attribute holds with other tensors in it; a container that several modules have stays one."""
    if id(value) not in known:
        known[id(value)] = value, tree_map_only(kind, replacement, value)
    return known[id(value)][1]


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module that are, or contain, tensors, and what they hold; tensors come first."""
    own = [item for item in vars(module).items() if item[0] not in _OF_MODULES]
    yield from (item for item in own if isinstance(item[1], Tensor))
    for key, value in own:
        if isinstance(value, (list, tuple, dict)) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            yield key, value


def holding_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module that are, or contain, parameters, and what they hold."""
    for key, value in plain_attributes(module):
        if key == "_flat_weights" and isinstance(module, nn.RNNBase):  # which follows what is registered
            continue
        if any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(value)):
            yield key, value


def unregistered_tensors(root: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Return what plain attributes hold that is neither registered nor shares memory with what is.

    By storage, so that each is there once: where it is, and a tensor that has it.
    """
    registered = (one for one in (*root.parameters(), *root.buffers()) if has_strides(one))
    known = {one.untyped_storage()._cdata for one in registered}
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in root.named_modules():
        for key, value in plain_attributes(module):
            for number, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, Tensor) and has_strides(leaf):
                    place = ".".join([*filter(None, [path]), key, *([] if leaf is value else [str(number)])])
                    found.setdefault(leaf.untyped_storage()._cdata, (place, leaf))
    return {storage: one for storage, one in found.items() if storage not in known}
