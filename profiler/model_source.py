"""The input of the tracer: how to build a model, and example inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one forward call."""


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built, and inputs that it accepts."""

    name: str
    """As the user named it."""
    build: Callable[[], nn.Module]
    """Makes the module. Called under fake tensors, so no memory is spent on weights."""
    example_inputs: Callable[[nn.Module, int], Inputs]
    """(module, micro-batch) -> arguments of its forward, labels included where it takes any."""
    sequence_length: int
    """Tokens per sample in those inputs (1 where the model has no sequence)."""
    notes: tuple[str, ...] = ()
    """What was assumed when it was loaded, for the user."""
    inputs_advice: str = "check that the example inputs fit the model's forward, by running it once on real tensors"
    """What to try where its forward raises."""
