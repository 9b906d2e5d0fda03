"""What modules return: no views, in a trace as in the runtime, so that what is priced does not depend on the plan.

Sharding relies on hooks on the tensors that a wrapped module returns: they gather its parameters before its backward.
A change in place of a *view*, as the output of a linear layer with a bias is one, gives it a new history without the
hook (`y = self.linear(x); y += x`), and backward fails.  So modules that may be wrapped return an alias: the same
memory and version counter, and to autograd no view.  Without, backward would also copy the gradient of what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from profiler.trace.find_operators import find_blocks


def wrappable(root: nn.Module) -> list[nn.Module]:
    """Return the modules that a plan may wrap: the model itself, blocks, and those that own parameters."""
    paths = {"", *find_blocks(root)}
    return [module for path, module in root.named_modules() if path in paths or any(True for _ in _own(module))]


def return_no_views(
    modules: Iterable[nn.Module], in_backward: Callable[[], None] = lambda: None
) -> list[RemovableHandle]:
    """Let modules return aliases in place of views, in whose backward a function is called.

    To be called before they are wrapped: hooks run in order.
    """
    hook = partial(_without_views, in_backward)
    return [module.register_forward_hook(hook) for module in modules]


@contextmanager
def outputs_aliased(root: nn.Module) -> Iterator[None]:
    """Let the modules of a model that a plan may wrap return aliases in place of views within."""
    handles = return_no_views(wrappable(root))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _without_views(in_backward: Callable[[], None], module: nn.Module, args: Any, output: Any) -> Any:
    """Return what takes the place of a module's output, None if it may stay."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # compiled code has no views
        return None
    aliases: dict[int, Tensor] = {}  # a tensor that is returned twice stays one
    for leaf in [output] if isinstance(output, Tensor) else tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view() and id(leaf) not in aliases:
            aliases[id(leaf)] = _Alias.apply(leaf, in_backward)  # type: ignore[no-untyped-call]
    return tree_map_only(Tensor, lambda tensor: aliases.get(id(tensor), tensor), output) if aliases else None


class _Alias(torch.autograd.Function):
    """The identity. A detached tensor shares the version counter, so harmful changes in place are still refused."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, in_backward: Callable[[], None]) -> Tensor:
        ctx.in_backward = in_backward
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.in_backward()
        return gradient, None
