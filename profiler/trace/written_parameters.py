"""Which parameters a model changes itself: where they are sharded, it changes what is gathered, and that is lost.

Beside that, what else it writes into, also by way of `.data`, which no version counter shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves


class WrittenParameters:
    """The parameters of a module that its forward or backward writes into, or whose `.data` it sets."""

    def __init__(self, module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
        """`named` are the parameters of the module now."""
        self.names: dict[str, None] = {}
        self.last: dict[int, int] = {}
        """By key of a storage: the number of the last write into it."""
        self._count = 0
        self._module = module
        self._names = {one.untyped_storage()._cdata: name for name, one in named.items()}
        """By key of the storage."""

    def note(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what an op writes into."""
        arguments = op._schema.arguments
        given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
        for one in arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                for written in tree_leaves(given.get(one.name)):
                    if isinstance(written, Tensor):
                        key = written.untyped_storage()._cdata
                        self._count += 1
                        self.last[key] = self._count
                        if name := self._names.get(key):
                            self.names[name] = None

    def end_forward(self) -> None:
        """Note the parameters that have other data than before."""
        for name, parameter in self._module.named_parameters():
            if self._names.get(parameter.untyped_storage()._cdata) != name:
                self.names[name] = None
