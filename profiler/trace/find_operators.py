"""Finds operators (who owns which parameters) and blocks (the repeated units) in a module tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from profiler.opaque_parameters import is_opaque

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that one operator holds, and the modules that run it."""

    modules: tuple[str, ...]
    """Paths of the modules that own the parameters, tied ones together; the first gives the name."""
    parameters: tuple[str, ...]
    """Names of the parameters as in `named_parameters()`."""


class OtherDtypesError(Exception):
    """An operator that was merged of several has trained parameters in other dtypes than most: `names`."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(*names)
        self.names = frozenset(names)


def find_groups(
    root: nn.Module, dtypes: Mapping[str, torch.dtype] | None = None, whole: Container[str] = ()
) -> tuple[Group, ...]:
    """Return the operators of `root` in module order: one per owning module, tied modules together.

    `dtypes` are those that parameters rest in, by name; None: those that they have.  Those in `whole` are left out.

    Parameters without dimensions (`logit_scale` of CLIP) or elements belong to none: there is nothing to shard or to
    plan.  Of a module whose trained parameters have several dtypes, neither do those that are not of the most frequent
    one: FSDP2 reduces gradients of one dtype together.  Nor do opaque ones.  Of operators that are merged later the
    same is true (`of_other_dtypes`).
    """
    rested = {id(one): dtypes[name] if dtypes else one.dtype for name, one in root.named_parameters()}
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    owned = {path: list(map(id, _shardable(one._parameters.values(), rested))) for path, one in root.named_modules()}
    if whole:
        owned = {path: [one for one in identities if names[one] not in whole] for path, identities in owned.items()}
    above, first = {path: path for path in owned}, dict[int, str]()  # a forest: tied paths are in one tree

    def top(path: str) -> str:
        while above[path] != path:
            path = above[path]
        return path

    for path, identities in owned.items():
        for identity in identities:
            above[top(path)] = top(first.setdefault(identity, path))
    groups: dict[str, list[str]] = {}
    for path, identities in owned.items():
        if identities:
            groups.setdefault(top(path), []).append(path)
    return tuple(
        Group(tuple(paths), tuple(dict.fromkeys(names[identity] for path in paths for identity in owned[path])))
        for paths in groups.values()
    )


def _shardable(parameters: Iterable[nn.Parameter | None], dtypes: Mapping[int, torch.dtype]) -> list[nn.Parameter]:
    """Return those of some parameters that can be in one unit; `dtypes` are by identity."""
    own = [one for one in parameters if one is not None and one.dim() and one.numel()]
    own = [one for one in own if not is_opaque(one)]
    trained: Counter[torch.dtype] = Counter()
    for parameter in own:
        trained[dtypes[id(parameter)]] += parameter.numel() if parameter.requires_grad else 0
    most = max(trained, key=lambda dtype: trained[dtype], default=None)
    return [parameter for parameter in own if not parameter.requires_grad or dtypes[id(parameter)] == most]


def of_other_dtypes(root: nn.Module, groups: Iterable[Group], dtypes: Mapping[str, torch.dtype]) -> set[str]:
    """Return the names of the parameters that merged operators train in another dtype than most of theirs."""
    named = dict(root.named_parameters())
    rested = {id(named[name]): dtype for name, dtype in dtypes.items() if name in named}
    apart = set[str]()
    for group in groups:
        kept = set(map(id, _shardable((named[name] for name in group.parameters), rested)))
        apart |= {name for name in group.parameters if id(named[name]) not in kept}
    return apart


def held_whole(root: nn.Module, groups: Iterable[Group]) -> list[str]:
    """Return the names of the parameters that belong to no operator, which every rank holds whole."""
    held = {name for group in groups for name in group.parameters}
    return [name for name, _ in root.named_parameters() if name not in held]


def merge_read_outside(
    groups: Sequence[Group], readers: Mapping[int, Iterable[str]], ran: Container[str]
) -> tuple[Group, ...]:
    """Merge operators that were read while no forward of theirs ran into the module whose forward is around all of it.

    `readers` has, by operator, the paths of the modules that ran in place of its own, `ran` the paths of all modules
    whose forward ran.  Examples are the output projection of `nn.MultiheadAttention`, and an embedding whose weight
    the model multiplies its last outputs with.
    """
    targets: dict[str, list[Group]] = {}
    merged: dict[str, Group] = {}
    for index, group in enumerate(groups):
        around = _around([*group.modules, *readers[index]], ran) if index in readers else group.modules[0]
        if around in group.modules:
            merged[group.modules[0]] = group
        else:
            targets.setdefault(around, []).append(group)
    home = {path: leader for leader, group in merged.items() for path in group.modules}
    for path, guests in targets.items():
        leader = home.get(path, path)
        host = merged.get(leader, Group((path,), ()))
        names = (name for group in (host, *guests) for name in group.parameters)
        merged[leader] = Group(host.modules, tuple(dict.fromkeys(names)))
    return tuple(merged.values())


def modules_around(paths: Iterable[str]) -> set[str]:
    """Return the paths of the modules that others are in."""
    found = set[str]()
    for path in paths:
        around = path
        while around and (around := around.rpartition(".")[0]) not in found:
            found.add(around)
    return found


def _around(paths: Iterable[str], ran: Container[str]) -> str:
    """Return the path of the innermost module that ran and has all of these inside, or is one of them."""
    parts = [names[0] for names in takewhile(_alike, zip(*(path.split(".") for path in paths), strict=False))]
    while parts and ".".join(parts) not in ran:
        parts.pop()
    return ".".join(parts)


def _alike(names: Sequence[str]) -> bool:
    return len(set(names)) == 1


def find_blocks(root: nn.Module) -> tuple[str, ...]:
    """Return the paths of the outermost repeated units with at least two operators each.

    These are the items of lists, dicts and `Sequential`s, and alike siblings.  A container of such
    items is descended into, and so is an item that is the only one of its class and holds a list of
    such items (an encoder in a `Sequential`).
    """
    return tuple(_BlockFinder().find(root, ""))


class _BlockFinder:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._sizes: dict[int, int] = {}

    def find(self, module: nn.Module, path: str) -> Iterable[str]:
        """Yield the paths of the blocks below `module`."""
        children = list(module.named_children())
        classes = Counter(type(child) for _, child in children)
        listed = isinstance(module, _CONTAINERS)
        rivals = [] if listed else [(name, child) for name, child in children if classes[type(child)] > 1]
        signatures = {name: _signature(child) for name, child in rivals}
        alike = Counter(signatures.values())
        for name, child in children:
            if id(child) in self._seen or self._size(child) < 2:
                continue
            self._seen.add(id(child))
            where = f"{path}.{name}" if path else name
            repeated = listed and classes[type(child)] > 1
            candidate = listed or alike[signatures.get(name, ())] > 1
            if candidate and self._can_be_block(child) and (repeated or not self._holds_list(child)):
                yield where
            else:
                yield from self.find(child, where)

    def _can_be_block(self, module: nn.Module) -> bool:
        """Return whether the module runs by itself and is not merely a list of larger units."""
        if type(module) not in _CONTAINERS:
            return True
        return type(module) is nn.Sequential and all(self._size(child) < 2 for child in module.children())

    def _holds_list(self, module: nn.Module) -> bool:
        """Return whether a container inside has several items of one class with two operators each."""
        lists = (inner for inner in module.modules() if isinstance(inner, _CONTAINERS))
        classes = (Counter(type(child) for child in one.children() if self._size(child) >= 2) for one in lists)
        return any(count > 1 for counts in classes for count in counts.values())

    def _size(self, module: nn.Module) -> int:
        """Return the number of modules in the tree that own parameters."""
        if id(module) not in self._sizes:
            own = any(parameter is not None for parameter in module._parameters.values())
            self._sizes[id(module)] = own + sum(self._size(child) for child in module.children())
        return self._sizes[id(module)]


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """Return the structure of a module: types and parameter shapes, and those of its children."""
    shapes = tuple((name, None if p is None else p.shape) for name, p in module._parameters.items())
    return (type(module), shapes, tuple((name, _signature(child)) for name, child in module.named_children()))
