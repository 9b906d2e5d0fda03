"""What modules are made of, as far as Python shows it: what tells alike blocks from others.

Blocks are of one class if all of this is equal: classes and paths of their modules; names, shapes and dtypes of
parameters and buffers, and what is trained; hooks; plain attributes.  Numbers that are different in every block, such
as its index or its drop path rate, are left out: they number the blocks.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from profiler.trace.handover import PLAIN

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_INTERNAL = {*vars(nn.Module())} - {"training"}
DEPTH = 5
"""How many containers inside each other are looked into."""
_CONTAINERS = (list, tuple, set, frozenset, dict)


def structures(root: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """Return for modules at some paths what is equal for alike ones."""
    read = {path: _read(root.get_submodule(path)) for path in paths}
    kinds: dict[Any, list[str]] = {}
    for path, (kind, _) in read.items():
        kinds.setdefault(kind, []).append(path)
    found = {}
    for number, alike in enumerate(kinds.values()):
        columns = zip(*(read[path][1] for path in alike), strict=True)
        shared = [len({*column}) < len(alike) for column in columns]
        for path in alike:
            found[path] = number, tuple(itertools.compress(read[path][1], shared))
    return found


def _read(module: nn.Module) -> tuple[Any, list[float]]:
    """Return what a module is, and the numbers among its attributes."""
    kind, numbers = list[Any](), list[float]()
    for path, one in module.named_modules(remove_duplicate=False):
        kind += (path, type(one))
        for name, parameter in one._parameters.items():
            kind.append(name)
            if parameter is not None:
                kind += (parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, buffer in one._buffers.items():
            kind.append(name)
            if buffer is not None:
                kind += (buffer.shape, buffer.dtype)
        for hooks in _HOOKS:
            for hook in getattr(one, hooks).values():
                kind += (hooks, getattr(hook, "__module__", ""), getattr(hook, "__qualname__", type(hook)))
        for name, value in vars(one).items():
            if name in _INTERNAL:
                continue
            kind.append(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers.append(value)
            else:
                kind.append(_frozen(value))
    return tuple(kind), numbers


def _frozen(value: Any, depth: int = DEPTH) -> Any:
    """Return a hashable that is equal for equal plain values, and for others if they are the same."""
    if isinstance(value, PLAIN):
        return value.__class__, value
    if not depth:
        return id(value)
    parts: Any = ()
    if isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, FunctionType) and value.__closure__ is None:
        parts = value.__defaults__, value.__kwdefaults__, value.__code__
    else:
        return id(value)
    return value.__class__, *(_frozen(part, depth - 1) for part in parts)


def python_state(root: nn.Module) -> dict[Any, Any]:
    """Return the numbers, words and lengths that a forward can reach and may change.

    They are attributes of modules, of their classes, of the files of those, and what their forwards close over.
    """
    scopes: dict[int, Mapping[str, Any]] = {}
    modules = list(root.modules())
    for kind in {kind for own in {type(module) for module in modules} for kind in own.__mro__}:
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        scopes[id(kind)] = vars(kind)
        file = sys.modules.get(kind.__module__)
        scopes[id(file)] = {} if file is None else vars(file)
        forward = vars(kind).get("forward")
        if isinstance(forward, FunctionType) and forward.__closure__:
            scopes[id(forward)] = dict(
                zip(forward.__code__.co_freevars, map(_content, forward.__closure__), strict=True)
            )
    for module in modules:
        scopes[id(module)] = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
    return {(scope, name): _state(value) for scope, names in scopes.items() for name, value in [*names.items()]}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _state(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if type(value) in _CONTAINERS:  # others may do anything when they are looked into
        items = value if value.__class__ is not dict else (*value, *value.values())
        return len(value), *(item for item in itertools.islice(items, 100) if isinstance(item, PLAIN))
    return repr(value) if isinstance(value, itertools.count) else None
