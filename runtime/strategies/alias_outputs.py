"""What a module's forward returns: the tensors in it, and views made safe for hooks.

Sharding relies on hooks on the tensors that a wrapped module returns: they gather its parameters
before its backward.  A change in place of a *view*, as the output of a linear layer is one, gives it
a new history without the hook (`y = self.linear(x); y += x`), and backward fails.  So wrapped
modules return an alias: the same memory and version counter, and to autograd no view.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.errors import OsdpError


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dicts, dataclasses and registered pytree nodes, in order."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):  # which pytree takes for a leaf
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


def return_no_views(module: nn.Module) -> None:
    """Let a module return aliases in place of views. To be called before it is wrapped: hooks run in order."""
    module.register_forward_hook(_without_views)


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    aliases: dict[int, Tensor] = {}  # a tensor that is returned twice stays one

    def no_view(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and tensor._is_view()):
            return tensor
        if id(tensor) not in aliases:
            aliases[id(tensor)] = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        return aliases[id(tensor)]

    return tree_map_only(Tensor, no_view, output) if torch.is_grad_enabled() else output


def refuse_double_backward() -> None:
    """Raise OsdpError in a backward that is itself differentiated: FSDP2 would crash in the second one (torch 2.13)."""
    if torch.is_grad_enabled():
        what = "gradients of gradients are not supported under this plan"
        got = "create_graph=True"
        raise OsdpError(what, got=got, advice="plan with every operator replicated, in fp32")


class _Alias(torch.autograd.Function):
    """The identity. A detached tensor shares the version counter, so harmful changes in place are still refused."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        refuse_double_backward()
        return gradient
