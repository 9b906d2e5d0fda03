"""Plain attributes that a block's forward changes, for a forward that runs again with them as they were.

Caches are often a buffer and a number beside it, which says how much of it is filled:

    forward                     length = 0: fills the buffer, length = 8
    forward that runs again     the buffer as it was, and length = 8: reads what nobody has written there

So numbers, strings, None, and tuples of these, such as shapes, go back with the buffers, also where a dict in an
attribute has them.  Tensors do not, nor what is in lists.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class _Kinds(dict[type, int]):
    """Of types: 1 if their values are plain, 2 if they are where they contain nothing else, or 0."""

    def __missing__(self, kind: type) -> int:
        self[kind] = 1 if issubclass(kind, _PLAIN) else 2 if issubclass(kind, tuple) else 0
        return self[kind]


_KINDS = _Kinds()
"""Asked of every attribute of a block at every forward, so that it is no function."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold what is registered, and hooks."""
_Values = list[tuple[dict[str, Any], str, Any]]
"""Of modules' attributes: the dict that has one, its name, and a value."""


class RememberedAttributes:
    """What the attributes of a block's modules were before its forward; then those that it has changed.

    It holds no tensors: a forward that replaces one frees the old.
    """

    def __init__(self, block: nn.Module) -> None:
        attributes = [held for module in block.modules() for held in (vars(module), *_dicts(vars(module)))]
        self._before = [(now, _plain(now)) for now in attributes]
        self._changed: _Values = []

    def end(self) -> None:
        """Keep those that differ now."""
        for now, before in self._before:
            self._changed += [
                (now, name, value) for name, value in before.items() if name in now and now[name] is not value
            ]
        self._before.clear()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have those that were changed be as they were, and then again as they are now."""
        now = [(attributes, name, attributes[name]) for attributes, name, _ in self._changed if name in attributes]
        _put(self._changed)
        try:
            yield
        finally:
            _put(now)


def _dicts(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [value for name, value in attributes.items() if value.__class__ is dict and name not in _OF_MODULES]


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return those attributes that are plain."""
    return {
        name: value
        for name, value in attributes.items()
        if (kind := _KINDS[value.__class__]) == 1 or (kind == 2 and _is_plain(value))
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _put(values: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    for attributes, name, value in values:
        attributes[name] = value
