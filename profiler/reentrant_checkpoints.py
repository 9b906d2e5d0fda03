"""Runs checkpoints with `use_reentrant=True` as those with `use_reentrant=False`, in the tracer and the runtime alike.

A reentrant checkpoint runs its part of the model back in a backward of its own, inside the model's: what is gathered,
reduced and resharded there follows no order that a plan could know.  Its values and gradients are the same; but the
second run ends as soon as backward has what it needs, and what a part does after that, as counting, it does once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, check_backward_validity, checkpoint


@classmethod  # type: ignore[misc]
def _apply(cls: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Stand in for `CheckpointFunction.apply`, which makes no gradients where no argument needs one, and warns."""
    if cls is not CheckpointFunction:  # a class of somebody's own
        return super(CheckpointFunction, cls).apply(function, preserve_rng_state, *args)
    check_backward_validity(args)
    if not any(isinstance(one, Tensor) and one.requires_grad for one in args):
        with torch.no_grad():
            return function(*args)
    settings: Any = {
        "preserve_rng_state": preserve_rng_state,
        "determinism_check": "none",
    }  # reentrant ones check nothing
    return checkpoint(function, *args, use_reentrant=False, **settings)


def reentrant_as_others() -> AbstractContextManager[Any]:
    """Run reentrant checkpoints so within."""
    return patch.object(CheckpointFunction, "apply", _apply)


def run_reentrant_as_others() -> None:
    """Run reentrant checkpoints so from now on, in this process: their backward may come at any time."""
    CheckpointFunction.apply = _apply  # type: ignore[method-assign]
