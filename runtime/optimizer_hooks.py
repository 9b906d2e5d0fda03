"""Tells models before and after the steps of the optimizers that train them."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Trained(Protocol):
    """What wants to know of steps."""

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has parameters of this model."""

    def before_step(self, has_closure: bool) -> None:
        """Prepare for a step; `has_closure` says that the optimizer will run forward and backward."""

    def after_step(self) -> None:
        """Take note of a step."""


_watched: weakref.WeakSet[Trained] = weakref.WeakSet()
"""The models of this process."""


def watch_optimizers(model: Trained) -> None:
    """Tell a model of all steps from now on, for as long as it lives or until `unwatch_optimizers`."""
    _watched.add(model)
    _watch()


def unwatch_optimizers(model: Trained) -> None:
    """Tell a model of no more steps."""
    _watched.discard(model)


@cache
def _watch() -> None:
    """Have every optimizer tell before and after it steps; for good, as a hook cannot be removed while hooks run."""

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))  # the first is itself
        for model in list(_watched):
            if model.is_trained_by(optimizer):
                model.before_step(has_closure)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for model in list(_watched):
            if model.is_trained_by(optimizer):
                model.after_step()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
