"""What modules return: no views or leaves, in a trace as in the runtime, so that what is priced is what runs.

Sharding relies on hooks on the tensors that a wrapped module returns: they gather its parameters before its backward.
A change in place of a *view*, as the output of a linear layer with a bias is one, gives it a new history without the
hook (`y = self.linear(x); y += x`), and backward fails.  So modules that may be wrapped return an alias: the same
memory and version counter, and to autograd no view.  Without, backward would also copy the gradient of what changed.

Of a *leaf* that needs a gradient, as a loss of `torch.zeros(1, requires_grad=True)` is that a block returns beside its
output, autograd runs the hooks before anything else that is due: parameters would be gathered long before the backward
of their module.  An alias has its turn when the module has.  Of a parameter of the module, or a part of one, the memory
is freed as the forward ends: a copy is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from profiler.nested_tensors import tensors_in, with_tensors
from profiler.trace.find_operators import find_blocks


def wrappable(root: nn.Module) -> list[nn.Module]:
    """Return the modules that a plan may wrap: the model itself, blocks, and those that own parameters."""
    paths = {"", *find_blocks(root)}
    return [module for path, module in root.named_modules() if path in paths or any(True for _ in _own(module))]


def return_no_views(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Let modules return aliases in place of views. To be called before they are wrapped: hooks run in order."""
    return [module.register_forward_hook(_without_views) for module in modules]


@contextmanager
def outputs_aliased(root: nn.Module) -> Iterator[Callable[[Iterable[nn.Module]], None]]:
    """Let the modules of a model that a plan may wrap return aliases in place of views within.

    Yields what lets others do so too: those that turn out to read the parameters of modules inside.
    """
    wrapped = set(wrappable(root))
    handles = return_no_views(wrapped)

    def others(modules: Iterable[nn.Module]) -> None:
        new = set(modules) - wrapped
        wrapped.update(new)
        handles.extend(return_no_views(new))

    try:
        yield others
    finally:
        for handle in handles:
            handle.remove()


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Return what takes the place of a module's output, None if it may stay."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled code has no views
        return None
    if isinstance(output, Tensor):
        return _alias(module, output) if _needs_alias(output) else None
    # A tensor that is returned twice stays one.
    tensors = {id(tensor): tensor for tensor in tensors_in(output)}
    aliases = {key: _alias(module, tensor) for key, tensor in tensors.items() if _needs_alias(tensor)}
    return with_tensors(output, lambda tensor: aliases.get(id(tensor), tensor)) if aliases else None


def _needs_alias(tensor: Tensor) -> bool:
    return tensor.requires_grad and (tensor.is_leaf or tensor._is_view())


def _alias(module: nn.Module, view: Tensor) -> Tensor:
    """Return the same memory, as no view; of a parameter, which is sharded again after the forward, a copy."""
    if isinstance(view if view._base is None else view._base, nn.Parameter):
        return _copy(view)
    # What a linear layer returns is a view of a product that nobody else holds, unless another hook saw it, and needs
    # no common version counter then.  Python would take longer for an alias than for all else of such a layer.
    is_held_here_alone = type(module).forward is nn.Linear.forward and len(module._forward_hooks) == 1
    if is_held_here_alone and type(view) is Tensor:  # subclasses may have no such operation
        aliased: Tensor = torch.ops.aten._unsafe_view.default(view, view.shape)
    else:
        aliased = Alias.apply(view)  # type: ignore[no-untyped-call]
    return aliased


def _copy(view: Tensor) -> Tensor:
    """Return a copy that takes no more memory than a view: one row of an expanded dimension."""
    if 0 not in view.stride():
        return view.clone()
    once = view[tuple(slice(1) if stride == 0 else slice(None) for stride in view.stride())]
    return Alias.apply(once.clone().expand(view.shape))  # type: ignore[no-any-return, no-untyped-call]


class Alias(torch.autograd.Function):
    """The identity. A detached tensor shares the version counter, so harmful changes in place are still refused."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
