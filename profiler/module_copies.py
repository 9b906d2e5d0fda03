"""Copies of modules that reach nothing of the original, through hooks and other functions either.

`copy.deepcopy` takes functions as they are.  One that closes over the model it belongs to, as a hook that notes what a
layer returned in `self.features`, or a forward that was put in place of another, would read and change the original.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_DEPTH = 4
"""Containers, partial functions and closures in each other that are looked into."""
_CONTAINERS = (dict, list, tuple, set)


def copied(module: nn.Module, replaced: Mapping[int, Any]) -> nn.Module:
    """Return a deep copy of a module, with other objects for those of these identities.

    Functions in it that close over something of the module are copied too, with what they close over of it; cells that
    they share, they share again.  Raises what `copy.deepcopy` raises.
    """
    memo = dict(replaced)
    functions = {id(one): one for one in _functions(module)}
    cells = _Cells(module)
    made = {key: one for key, function in functions.items() if (one := cells.rebuilt(function)) is not None}
    memo |= made
    result: nn.Module = copy.deepcopy(module, memo)
    cells.fill(memo)
    return result


class _Cells:
    """The cells of functions that close over something of a module, and those of their copies."""

    def __init__(self, module: nn.Module) -> None:
        self._own = {id(one) for one in module.modules()}
        self._own |= {id(one) for one in (*module.parameters(), *module.buffers())}
        for part in module.modules():  # and dicts, lists and other objects that are attributes
            self._own |= {id(value) for value in vars(part).values() if not isinstance(value, _ATOMS)}
        self._copies: dict[int, tuple[CellType, CellType]] = {}

    def rebuilt(self, function: FunctionType) -> FunctionType | None:
        """Return a copy of a function with cells that are still empty; None if it reaches nothing of the module."""
        if not any(self._is_reached(cell) for cell in function.__closure__ or ()):
            return None
        closure = tuple(self._copies.setdefault(id(one), (one, CellType()))[1] for one in function.__closure__ or ())
        made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
        made.__dict__.update(function.__dict__)
        return made

    def fill(self, memo: dict[int, Any]) -> None:
        """Give the copies what the cells hold: a copy of what is of the module, all else as it is."""
        for cell, made in self._copies.values():
            for content in _content(cell):
                made.cell_contents = copy.deepcopy(content, memo) if self._is_reached(cell) else content

    def _is_reached(self, cell: CellType) -> bool:
        return any(self._reaches(content) for content in _content(cell))

    def _reaches(self, value: Any, depth: int = _DEPTH) -> bool:
        """Return whether a value is something of the module, or holds or closes over something of it."""
        if id(value) in self._own:
            return True
        return depth > 0 and any(self._reaches(part, depth - 1) for part in _parts(value))


_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, ModuleType)
"""What copies and originals may share: it does not change."""


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a value holds, closes over or is bound to."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            yield from _content(cell)


def _content(cell: CellType) -> Iterator[Any]:
    """Yield what a cell holds, if it holds anything yet."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the functions with closures that are in attributes, hooks among them, and those that they close over."""

    def inside(value: Any, depth: int) -> Iterator[FunctionType]:
        if isinstance(value, FunctionType) and value.__closure__:
            yield value
        if depth and not isinstance(value, (nn.Module, Tensor)):
            for part in _parts(value):
                yield from inside(part, depth - 1)

    for part in module.modules():
        for value in vars(part).values():
            yield from inside(value, _DEPTH)
