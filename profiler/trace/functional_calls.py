"""Counts parameters in whose places `torch.func.functional_call` puts others as read by the module that calls it.

weights = self.generator(x)                        a network whose weights another one computes
y = functional_call(self.network, weights, (x,))

A layer that is sharded by itself would compute with what it gathers instead, and refuses to
(`runtime.registered_parameters`).  As for what is read outside of its owner
(`profiler.trace.find_operators.merge_read_outside`), the module around gathers it, and the layer only computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

_replacing = stateless._reparametrize_module


def _reading(module: nn.Module, values: dict[str, Tensor], *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """As torch's own, after an op that reads each parameter that is replaced, and is free."""
    own = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in own.items():
            if name in values:
                parameter.new_empty(0)
    return _replacing(module, values, *args, **kwargs)


def replaced_are_read() -> AbstractContextManager[Any]:
    """Have functional calls within read all parameters that they replace."""
    return patch.object(stateless, "_reparametrize_module", _reading)
