"""Notifies models before and after the steps of the optimizers that train them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Trained(Protocol):
    """What is notified of steps."""

    def before_step(self, has_closure: bool) -> None:
        """Prepare for a step; `has_closure` says that the optimizer will run forward and backward."""

    def after_step(self) -> None:
        """React to a step that is done."""


_watched: weakref.WeakKeyDictionary[Trained, frozenset[int]] = weakref.WeakKeyDictionary()
"""The models of this process, each with the identities of its parameters, which live as long as it does."""


def watch_optimizers(model: Trained, parameters: Iterable[nn.Parameter]) -> None:
    """Notify a model of all steps of its parameters, until it is collected or `unwatch_optimizers` is called."""
    _watched[model] = frozenset(map(id, parameters))
    _watch()


def unwatch_optimizers(model: Trained) -> None:
    """Stop notifying a model."""
    _watched.pop(model, None)


def _trained_by(optimizer: torch.optim.Optimizer) -> list[Trained]:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [model for model, parameters in list(_watched.items()) if parameters & trained]


@cache
def _watch() -> None:
    """Hook every optimizer's step, once and permanently: a hook cannot be removed while hooks run."""

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))  # the first is itself
        for model in _trained_by(optimizer):
            model.before_step(has_closure)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for model in _trained_by(optimizer):
            model.after_step()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
