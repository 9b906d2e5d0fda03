"""Parameters that modules keep in lists and other plain attributes, beside where they are registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold what is registered, and hooks."""


def holding_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module that are, or contain, parameters, and what they hold."""
    for key, value in vars(module).items():
        if key in _OF_MODULES or not isinstance(value, (list, tuple, dict, nn.Parameter)):
            continue
        if key == "_flat_weights" and isinstance(module, nn.RNNBase):  # which follows what is registered
            continue
        if any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(value)):
            yield key, value
