"""Copies of modules that hooks and other functions in them follow.

`copy.deepcopy` takes functions as they are.  One that closes over the model it belongs to, as a hook that notes what a
layer returned in `self.features`, or a forward that was put in place of another, would read and change the original.
So do those still that know it through an object of a class of the user's, as a trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import WRAPPER_ASSIGNMENTS, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_DEPTH = 4
"""Containers, partial functions and closures in each other that are looked into."""
_CONTAINERS = (dict, list, tuple, set)


def copied(module: nn.Module, replaced: Mapping[int, Any]) -> nn.Module:
    """Return a deep copy of a module, with other objects for those of these identities.

    Functions in it that close over something of the module, or have it for a default, are copied too, with what they
    hold of it; cells that they share, they share again.  Raises what `copy.deepcopy` raises.
    """
    memo, functions = dict(replaced), _Functions(module)
    memo |= functions.rebuilt()
    result: nn.Module = copy.deepcopy(module, memo)
    functions.fill(memo)
    return result


class _Functions:
    """Functions in a module that hold something of it, and their copies."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = {id(one) for one in module.modules()}
        self._own |= {id(one) for one in (*module.parameters(), *module.buffers())}
        for part in module.modules():  # and dicts, lists and other objects that are attributes
            self._own |= {id(value) for value in vars(part).values() if not isinstance(value, _ATOMS)}
        self._made: list[tuple[FunctionType, FunctionType]] = []
        self._cells: dict[int, tuple[CellType, CellType]] = {}

    def rebuilt(self) -> dict[int, FunctionType]:
        """Return copies of the functions, by the identity of what they are copies of; their cells are still empty."""
        for function in _functions(self._module):
            if any(self._reaches(held) for held in _parts(function)):
                closure = tuple(
                    self._cells.setdefault(id(one), (one, CellType()))[1] for one in function.__closure__ or ()
                )
                given = function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
                made = FunctionType(*given)
                for name in (*WRAPPER_ASSIGNMENTS, "__kwdefaults__"):
                    setattr(made, name, getattr(function, name))
                self._made.append((function, made))
        return {id(function): made for function, made in self._made}

    def fill(self, memo: dict[int, Any]) -> None:
        """Give the copies what the functions hold: a copy of what is of the module, all else as it is."""

        def taken(value: Any) -> Any:
            return copy.deepcopy(value, memo) if self._reaches(value) else value

        for cell, empty in self._cells.values():
            for content in _content(cell):
                empty.cell_contents = taken(content)
        for function, made in self._made:
            vars(made).update({name: taken(value) for name, value in vars(function).items()})  # `__wrapped__`, too
            if function.__defaults__:
                made.__defaults__ = tuple(map(taken, function.__defaults__))
            if function.__kwdefaults__:
                made.__kwdefaults__ = {name: taken(value) for name, value in function.__kwdefaults__.items()}

    def _reaches(self, value: Any) -> bool:
        """Return whether a value is something of the module, or holds or closes over something of it."""
        return any(id(one) in self._own for one in _inside(value))


_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, ModuleType)
"""What is not known as the module's by itself: others have the same."""


def _inside(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield a value and, each once, what it holds, closes over or is bound to, but of modules and tensors nothing."""
    seen, layer = {id(value)}, [value]
    for _ in range(depth + 1):
        yield from layer
        held = [one for each in layer if not isinstance(each, (nn.Module, Tensor)) for one in _parts(each)]
        layer = [one for one in {id(one): one for one in held}.values() if id(one) not in seen]
        seen |= {id(one) for one in layer}


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a value holds, closes over, has for defaults or is bound to."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, _CONTAINERS):
        yield from value
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            yield from _content(cell)


def _content(cell: CellType) -> Iterator[Any]:
    """Yield what a cell holds, if it holds anything yet."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _functions(module: nn.Module) -> list[FunctionType]:
    """Return the functions in attributes of modules, hooks among them, and those which they hold, each once."""
    values = (value for part in module.modules() for value in vars(part).values())
    found = (one for value in values for one in _inside(value) if isinstance(one, FunctionType))
    return list({id(one): one for one in found}.values())
