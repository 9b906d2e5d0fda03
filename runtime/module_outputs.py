"""Hooks of what a module's forward returns, and a backward through it that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from profiler.errors import OsdpError
from profiler.nested_tensors import tensors_in
from runtime.autograd_compat import without_transforms


def refuse_double_backward_through(module: nn.Module) -> None:
    """Refuse a backward through a module's outputs that is itself differentiated."""
    watch_outputs(module, refuse_double_backward)


def watch_outputs(module: nn.Module, reached: Callable[[], None]) -> None:
    """Have a function called when a backward comes to what a module's forward returned."""

    def call(gradient: Tensor) -> None:
        reached()

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in map(without_transforms, tensors_in(output)):
                if tensor.requires_grad:
                    tensor.register_hook(call)  # type: ignore[no-untyped-call]

    module.register_forward_hook(watch)


def refuse_double_backward() -> None:
    """Raise OsdpError in a backward that is itself differentiated: FSDP2 would crash in the second one (torch 2.13)."""
    if torch.is_grad_enabled():
        what = "gradients of gradients are not supported under this plan"
        got = "create_graph=True"
        raise OsdpError(what, got=got, advice="plan with every operator replicated, in fp32")
