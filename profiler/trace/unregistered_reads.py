"""Finds parameters that a forward reads through something else than the modules that own them.

A module may keep a registered parameter in a list or another plain attribute, too, as for a penalty on all weights.
Sharding puts another tensor in the place of a registered one, and what such an attribute holds trains no longer.  In a
trace, stand-ins are in these attributes: they pass on the parameter, and note that they were asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from profiler.opaque_parameters import is_opaque
from profiler.plain_attributes import Replaced, holding_parameters, reads_values, replaced


class _StandIn(nn.Parameter):
    """Stands for a parameter in a plain attribute."""

    of: nn.Parameter
    path: str
    place: str
    read: dict[str, str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_read = reads_values(func)

        def passed_on(leaf: Any) -> Any:
            if not isinstance(leaf, _StandIn):
                return leaf
            own = vars(leaf)
            if is_read:
                own["read"].setdefault(own["path"], own["place"])
            return own["of"]

        return func(*tree_map(passed_on, args), **tree_map(passed_on, kwargs or {}))


@contextmanager
def unregistered_reads(root: nn.Module) -> Iterator[dict[str, str]]:
    """Yield what is filled with the parameters that are read through a plain attribute of a module, and with that."""
    names = {id(parameter): name for name, parameter in root.named_parameters() if not is_opaque(parameter)}
    read, before = dict[str, str](), list[tuple[nn.Module, str, Any]]()
    containers: Replaced = {}
    for path, module in root.named_modules():
        for key, value in list(holding_parameters(module)):

            def stand_in(parameter: nn.Parameter, where: str = f"{path}.{key}" if path else key) -> nn.Parameter:
                if id(parameter) not in names:
                    return parameter
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made = torch.Tensor._make_subclass(_StandIn, empty, parameter.requires_grad)
                vars(made).update(of=parameter, path=names[id(parameter)], place=where, read=read)
                return made

            before.append((module, key, value))
            vars(module)[key] = replaced(value, nn.Parameter, stand_in, containers)
    try:
        yield read
    finally:
        for module, key, value in before:
            vars(module)[key] = value
