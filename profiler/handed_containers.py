"""Lists, dicts and dataclasses that a module is handed: what its forward changes in them, the code around it sees.

    caller          hooks before forward      forward                     hooks after forward     caller
    seen: [a, b]    a copy: [a', b']          seen: [a', b'] + [c]        c as an output          seen: [a, b, c]

Hooks put other tensors in the places of those that a module is handed: cast ones, or such that tell when their
gradients are there.  So they make copies of what these are in, and a list to which the module adds would be one that
nobody else has.  The module gets the caller's own instead, which holds these tensors until its forward is over.  What
it has put there is an output to all hooks: a unit is gathered before its backward, whichever way the gradient comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves
from torch.utils.hooks import RemovableHandle

_PLAIN = frozenset({Tensor, type(None), bool, int, float, str})
"""Classes of what modules are mostly handed."""


class HandedContainers:
    """The containers among arguments, from when hooks have made others of them to the end of the forward."""

    def __init__(self, given: Any, hooked: Any) -> None:
        """`given` are the arguments as the caller has them, `hooked` those that hooks have made of them."""
        self._given_for: dict[int, Any] = {}
        """By identity of what hooks have made."""
        self._known: dict[int, Any] = {}
        """By identity: all that is handed."""
        self._containers: dict[int, Any] = {}
        self.handed = self._hand(given, hooked)
        """The arguments as the module gets them: of `given` the containers, of `hooked` what is in them."""

    def _hand(self, given: Any, hooked: Any) -> Any:
        if type(given) in _PLAIN:
            handed = given
            if isinstance(given, Tensor) and given is not hooked:
                self._given_for[id(hooked)], handed = given, hooked
        else:
            handed = given if id(given) in self._containers else self._filled(given, hooked)
        self._known[id(handed)] = handed
        return handed

    def _filled(self, given: Any, hooked: Any) -> Any:
        """Return a given container with what hooks have made of what it holds; what is none, as hooks made it."""
        before, after = items_of(given), items_of(hooked)
        if before is None or after is None or before.keys() != after.keys():
            if given is not hooked:
                self._given_for[id(hooked)] = given
            return hooked
        if isinstance(given, tuple):
            parts = [self._hand(before[key], after[key]) for key in before]
            if all(one is other for one, other in zip(parts, given, strict=True)):
                return given
            made = tuple_like(given, parts)
            self._given_for[id(made)] = given
            return made
        self._containers[id(given)] = given
        for key, value in before.items():
            put(given, key, value, self._hand(value, after[key]))
        return given

    def added(self) -> dict[int, Any]:
        """Return, by identity, what the forward has put into containers that needs gradients."""
        held = {id(value): value for one in self._containers.values() for value in (items_of(one) or {}).values()}
        return {key: value for key, value in held.items() if key not in self._known and _needs_gradient(value)}

    def give_back(self, added: dict[int, Any]) -> None:
        """Put back what hooks have replaced; `added` is what takes the place of what the forward has added."""
        places = {**added, **self._given_for}
        for container in self._containers.values():
            for key, value in (items_of(container) or {}).items():
                put(container, key, value, places.get(id(value), value))


def items_of(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds, and where; None of what is none."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    is_container = type(value) in SUPPORTED_NODES or (is_dataclass(value) and not isinstance(value, type))
    return dict(vars(value)) if is_container and hasattr(value, "__dict__") else None


def put(container: Any, key: Any, old: Any, new: Any) -> None:
    """Put something in the place of what a container, but no tuple, holds there."""
    if new is old:
        return
    if isinstance(container, (dict, list, deque)):
        container[key] = new
    else:
        object.__setattr__(container, key, new)  # also where a dataclass is frozen: its caller gets it as it was


def tuple_like(given: Any, parts: list[Any]) -> Any:
    """Return a tuple of parts, with names if the given one has."""
    return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)


def _needs_gradient(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))


class _Leaving(NamedTuple):
    """What leaves a module, between the first and the last of the hooks after its forward."""

    output: Any
    added: list[Any]


class _Run:
    """One run of a module that is handed containers."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.containers: HandedContainers | None = None
        self.added: dict[int, Any] = {}


class _HandedModule:
    """The hooks of a module that may change what it is handed."""

    def __init__(self, module: nn.Module) -> None:
        """Register the hooks nearest to the forward: what makes copies, or sees outputs, is to come after."""
        self._module = module
        self._runs: list[_Run | None] = []
        """Of the runs that go on, the last of which is the innermost; None for those that are handed no container."""
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._hand, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._add_outputs),
        ]

    def surround(self) -> None:
        """Register the hooks around all others."""
        self.handles.append(self._module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
        self.handles.append(self._module.register_forward_hook(self._end, always_call=True))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_plain = _PLAIN.issuperset(map(type, (*args, *kwargs.values())))
        self._runs.append(None if is_plain else _Run((args, {**kwargs})))

    def _hand(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (run := self._runs[-1]) is None:
            return None
        run.containers, run.given = HandedContainers(run.given, (args, kwargs)), None
        return run.containers.handed

    def _add_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        run = self._runs[-1]
        if run is not None and run.containers is not None:
            run.added = run.containers.added()
            if run.added:
                return _Leaving(output, [*run.added.values()])
        return None

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """End a run, also one that has failed."""
        run = self._runs.pop() if self._runs else None
        if run is None or run.containers is None:
            return None
        if not isinstance(output, _Leaving):
            run.containers.give_back({})
            return None
        run.containers.give_back(dict(zip(run.added, output.added, strict=True)))
        return output.output


class ContainersHanded:
    """Lets modules change the containers that they are handed, whatever other hooks do.

    It is made before the hooks that put other tensors in the places of arguments, or see outputs, and surrounds them
    when they are registered.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [_HandedModule(module) for module in dict.fromkeys(modules) if _may_change(module)]

    def surround(self) -> None:
        """Come around the hooks that there are now."""
        for one in self._modules:
            one.surround()

    @contextmanager
    def surrounding(self) -> Iterator[None]:
        """Be around the hooks that there are now, and remove all of its own at the end."""
        self.surround()
        try:
            yield
        finally:
            for one in self._modules:
                for handle in one.handles:
                    handle.remove()


def _may_change(module: nn.Module) -> bool:
    """Return whether a forward may change what it is handed: those of PyTorch do not, but for what they call."""
    return not type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is not None
