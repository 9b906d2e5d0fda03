"""Finds operators (who owns which parameters) and blocks (the repeated units) in a module tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from networkx.utils import UnionFind
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


def find_groups(root: nn.Module, dtypes: Mapping[str, torch.dtype] | None = None) -> tuple[Group, ...]:
    """Return the operators of `root` in module order: one per owning module, tied modules together.

    `dtypes` are those that parameters rest in, by name; None: those that they have.

    Parameters without dimensions (`logit_scale` of CLIP) belong to none: there is nothing to shard or to plan.  Of a
    module whose trained parameters have several dtypes, neither do those that are not of the most frequent one: FSDP2
    reduces gradients of one dtype together.  Nor do opaque ones.
    """
    rested = {id(one): dtypes[name] if dtypes else one.dtype for name, one in root.named_parameters()}
    names: dict[int, str] = {}  # by storage: tied parameters have one
    for name, parameter in root.named_parameters():
        names.setdefault(parameter.untyped_storage()._cdata, name)
    owned = {
        path: [parameter.untyped_storage()._cdata for parameter in _shardable(module, rested)]
        for path, module in root.named_modules()
    }
    tied = UnionFind(owned)
    first: dict[int, str] = {}
    for path, storages in owned.items():
        for storage in storages:
            tied.union(first.setdefault(storage, path), path)
    groups: dict[str, list[str]] = {}
    for path, storages in owned.items():
        if storages:
            groups.setdefault(tied[path], []).append(path)
    return tuple(
        Group(tuple(paths), tuple(dict.fromkeys(names[storage] for path in paths for storage in owned[path])))
        for paths in groups.values()
    )


def _shardable(module: nn.Module, dtypes: Mapping[int, torch.dtype]) -> list[nn.Parameter]:
    """Return the parameters that a module owns and that can be in one unit; `dtypes` are by identity."""
    own = [one for one in module._parameters.values() if one is not None and one.dim() and not is_opaque(one)]
    trained: Counter[torch.dtype] = Counter()
    for parameter in own:
        trained[dtypes[id(parameter)]] += parameter.numel() if parameter.requires_grad else 0
    most = max(trained, key=lambda dtype: trained[dtype], default=None)
    return [parameter for parameter in own if not parameter.requires_grad or dtypes[id(parameter)] == most]


def merge_unrun(groups: Iterable[Group], used: Iterable[int], ran: Mapping[str, Any]) -> tuple[Group, ...]:
    """Merge operators that were read though no forward of theirs ran into the ancestor that ran.

    `used` are indices of operators whose parameters were read, `ran` has the paths of the modules
    whose forward ran.  An example is the output projection of `nn.MultiheadAttention`.
    """
    groups = tuple(groups)
    reads = set(used)
    targets: dict[str, list[Group]] = {}
    merged: dict[str, Group] = {}
    for index, group in enumerate(groups):
        if index in reads and not any(path in ran for path in group.modules):
            targets.setdefault(_running_ancestor(group.modules[0], ran), []).append(group)
        else:
            merged[group.modules[0]] = group
    home = {path: leader for leader, group in merged.items() for path in group.modules}
    for path, guests in targets.items():
        leader = home.get(path, path)
        host = merged.get(leader, Group((path,), ()))
        names = (name for group in (host, *guests) for name in group.parameters)
        merged[leader] = Group(host.modules, tuple(dict.fromkeys(names)))
    return tuple(merged.values())


def _running_ancestor(path: str, ran: Mapping[str, Any]) -> str:
    while path:
        path = path.rpartition(".")[0]
        if path in ran:
            break
    return path


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
