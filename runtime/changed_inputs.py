"""What modules change in place in the tensors that they are handed, the code around them sees, with its gradient.

    caller    FSDP2's hook, or an owner's     module               after its forward     caller
    x         a view of x                     an alias, changed    x takes its history   x

Hooks put in the place of an input the output of a function that tells when its gradient is there.  That is a view of
it, which autograd lets nobody change (`x += self.bias`, a ReLU in place that a block begins with).  So a module that
changes what it is handed gets an alias: the same memory and version counter, and to autograd no view.  When its forward
is over, the caller's tensor goes on from there, as it does without hooks.

Which modules do so their first forward with gradients tells.  Others are left alone then, as aliases take time.  What
is in lists and dicts is not followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from profiler.alias_outputs import Alias
from runtime.autograd_compat import unchanged


class _Handed(NamedTuple):
    """A tensor that a module is handed."""

    given: Tensor
    """What the caller has."""
    version: int
    """How often that had been changed."""
    alias: Tensor
    """What the module gets."""


class _Followed:
    """The inputs of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.changes = False
        """Whether a forward has changed one of them."""
        self.given: list[dict[int | str, Tensor]] = []
        """What the caller has handed, of forwards that have begun; a module may run within itself."""
        self.handed: list[list[_Handed]] = []
        self.got: list[list[tuple[Tensor, int]]] = []
        """What the module gets itself, also tensors without a gradient, and how often that had been changed."""
        hooks = (
            module.register_forward_pre_hook(self._before_hooks, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward, prepend=True, always_call=True),
        )
        self.handles: tuple[RemovableHandle, ...] = hooks

    def _before_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given.append(_trained(args, kwargs))

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, handed, aliases = self.given.pop(), list[_Handed](), dict[int, Tensor]()
        for place, tensor in _trained(args, kwargs).items():
            # One that is handed twice stays one: attention projects its inputs together if they are.
            if place in given and tensor is not given[place] and tensor._is_view() and id(tensor) not in aliases:
                alias = aliases[id(tensor)] = Alias.apply(tensor)  # type: ignore[no-untyped-call]
                handed.append(_Handed(given[place], given[place]._version, alias))
        self.handed.append(handed)
        args = tuple(aliases.get(id(one), one) for one in args)
        kwargs = {name: aliases.get(id(one), one) for name, one in kwargs.items()}
        tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and not one.is_inference())
        self.got.append([(one, one._version) for one in tensors])
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        handed = self.handed.pop() if self.handed else []
        got = self.got.pop() if self.got else []
        changed = [one for one in handed if one.given._version != one.version]
        for one in changed:
            with unchanged(one.given):  # what has changed it may have kept it for its backward
                _Continued.apply(one.given, one.alias)  # type: ignore[no-untyped-call]
        # Of data too: what the module is handed next may need a gradient.
        self.changes = self.changes or any(one._version != version for one, version in got)
        # After a forward that raised, and so returned nothing, hooks must not be removed while they are called.
        if output is not None and torch.is_grad_enabled() and not self.changes:
            for handle in self.handles:
                handle.remove()


def follow_changed_inputs(modules: Iterable[nn.Module]) -> None:
    """Let modules change what they are handed. To be called after they are wrapped: hooks run in order."""
    for module in modules:
        _Followed(module)


def _trained(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Tensor]:
    """Return the arguments that are tensors which need gradients, by position or name."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return {}
    places: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
    return {place: one for place, one in places if isinstance(one, Tensor) and one.requires_grad}


class _Continued(torch.autograd.Function):
    """Gives a tensor the history of an alias of it, as what has changed it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, alias: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.is_part = tensor._is_view()
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        # Without a gradient of a part, autograd would take it that there is none of the whole.
        return (gradient.new_zeros(()).expand_as(gradient) if ctx.is_part else None), gradient
