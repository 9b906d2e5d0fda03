"""A live module, or a factory of one, as the `ModelSource` that the tracer needs.

The tracer builds the model again, without data: a factory is called, a module is copied with empty
parameters and buffers in place of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from osdp.models.user_factory import module_source
from profiler.errors import OsdpError
from profiler.model_source import ModelSource


def source_of(
    model: nn.Module | Callable[[], Any],
    name: str,
    sequence_length: int | None,
    example_inputs: Callable[..., Any] | None,
) -> ModelSource:
    """Return what the tracer needs; `example_inputs(batch)` gives the arguments of forward.

    Without it the module's own method of that name is asked, or inputs are inferred from its first
    layer.  Raises OsdpError.
    """
    build = (lambda: _hollow(model)) if isinstance(model, nn.Module) else model
    return module_source(name, build, sequence_length, example_inputs)


def _hollow(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters and buffers are empty ones on the current default device."""
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise OsdpError("the model is sharded already", advice="build it again for another plan")
    hollow: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        hollow[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        hollow[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    try:
        copied = copy.deepcopy(module, hollow)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise OsdpError(
            "the model cannot be copied, which planning needs",
            got=f"{type(error).__name__}: {error}",
            advice="pass a function that builds it: OSDP(lambda: Model(...), ...)",
        ) from error
    assert isinstance(copied, nn.Module)
    return copied
