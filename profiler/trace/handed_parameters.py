"""Counts parameters that a `torch.autograd.Function` is handed as read by the module that applies it.

Its forward may compute with none of them: it calls layers, and its backward calls them again and asks autograd for
gradients of what it was handed, as adjoints of ODEs, reversible layers, backwards of equilibrium models and checkpoints
of one's own do.  Of a sharded parameter there are none (`runtime.step.unreachable_gradients`), and no layer that
gathers its own is called where it is handed over.  As for what is read outside of its owner
(`profiler.trace.find_operators.merge_read_outside`), the module around has to gather it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd import Function

_below: Any = Function.__mro__[1]
"""The class that `Function.apply` hands on to, in torch 2.11 to 2.13.  What has been bound before, as in `run =
Swish.apply` at the top of a file or in a constructor, comes by there too."""

_OF_OTHERS = ("profiler.", "torch.utils.checkpoint")
"""Modules of functions that only hand on what they are handed: the trace's own, and those of checkpoints."""


@classmethod  # type: ignore[misc]
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """As a function's own, which reads the parameters that it is handed, if it is of the model and not of the trace."""
    if not cls.__module__.startswith(_OF_OTHERS):
        for one in (*args, *kwargs.values()):
            if isinstance(one, nn.Parameter):
                with torch.no_grad():
                    one.new_empty(0)  # an op that reads it, and is free
    return super(_below, cls).apply(*args, **kwargs)


def handed_are_read() -> AbstractContextManager[Any]:
    """Have functions that are applied within read all parameters that they are handed."""
    return patch.object(_below, "apply", _apply)
