"""Plain attributes that a block's forward changes, for a forward that runs again with them as they were.

Caches are often a buffer and a number beside it, which says how much of it is filled:

    forward                     length = 0: fills the buffer, length = 8
    forward that runs again     the buffer as it was, and length = 8: reads what nobody has written there

So numbers, strings, None, and tuples of these, such as shapes, go back with the buffers.  Tensors do not, nor what is
changed in place.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_Values = list[tuple[dict[str, Any], str, Any]]
"""Of modules' attributes: the dict that has one, its name, and a value."""


class RememberedAttributes:
    """What the attributes of a block's modules were before its forward; then those that it has changed."""

    def __init__(self, block: nn.Module) -> None:
        self._before = [(now := vars(module), now.copy()) for module in block.modules()]
        self._changed: _Values = []

    def end(self) -> None:
        """Keep the plain ones that differ now."""
        for now, before in self._before:
            if now.keys() != before.keys() or not all(map(is_, before.values(), now.values())):
                self._changed += _differing(now, before)
        self._before.clear()  # which holds tensors, too

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have those that were changed be as they were, and then again as they are now."""
        now = [(attributes, name, attributes[name]) for attributes, name, _ in self._changed if name in attributes]
        _put(self._changed)
        try:
            yield
        finally:
            _put(now)


def _differing(now: dict[str, Any], before: dict[str, Any]) -> _Values:
    return [
        (now, name, value)
        for name, value in before.items()
        if name in now and now[name] is not value and _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _put(values: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    for attributes, name, value in values:
        attributes[name] = value
