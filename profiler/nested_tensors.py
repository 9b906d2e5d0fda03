"""The tensors in nested values: arguments and outputs of modules, operands and results of ops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

T = TypeVar("T")


_PLAIN = frozenset({type(None), bool, int, float, str})
"""Classes of most of what is no tensor."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts, dataclasses and registered pytree nodes, in order."""
    found: list[Tensor] = []
    for leaf in tree_leaves(value):  # traces ask it often: no calls that are not needed
        if leaf.__class__ in _PLAIN:
            continue
        if isinstance(leaf, Tensor):
            found += (leaf,)
        elif _is_dataclass(leaf):
            found += tensors_in(list(_items(leaf).values()))
    return found


def with_tensors(value: T, replaced: Callable[[Tensor], Tensor]) -> T:
    """Return nested values with others in the places of tensors: what these are in is copied, dataclasses included."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return replaced(leaf)
        if not _is_dataclass(leaf) or not tensors_in(leaf):
            return leaf
        made = copy.copy(leaf)
        for name, item in _items(leaf).items():
            object.__setattr__(made, name, with_tensors(item, replaced))  # also of a frozen one
        return made

    found: T = tree_map(changed, value)
    return found


def _is_dataclass(leaf: Any) -> bool:
    """Return whether it is one that pytree takes for a leaf."""
    return hasattr(leaf, "__dataclass_fields__") and not isinstance(leaf, type)


def _items(leaf: Any) -> dict[str, Any]:
    return {field.name: getattr(leaf, field.name) for field in fields(leaf) if hasattr(leaf, field.name)}
