"""Notifies models before and after the steps of the optimizers that train them.

An optimizer's parameters must be those that rest.  Steps of others would be lost without a word, so they are refused:
those that the model had before it was sharded, and those that a forward gathers and the next discards.  So are steps of
optimizers that look at whole tensors where a rank has parts: on torch 2.13 Muon trained something else on some meshes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from profiler.errors import OsdpError

WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP")
"""Classes of optimizers, of PyTorch and others, whose steps are not element by element."""


class Trained(Protocol):
    """What is notified of steps."""

    def before_step(self, has_closure: bool) -> None:
        """Prepare for a step; `has_closure` says that the optimizer will run forward and backward."""

    def after_step(self) -> None:
        """React to a step that is done."""

    def gathers(self, parameter: nn.Parameter) -> bool:
        """Return whether the model has this beside the parameters that rest: gathered by a forward, or added later."""


_watched: weakref.WeakKeyDictionary[Trained, frozenset[int]] = weakref.WeakKeyDictionary()
"""The models of this process, each with the identities of its parameters, which live as long as it does."""


_replaced: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters that models had before they were sharded and that somebody holds still, by identity."""


def watch_optimizers(
    model: Trained, parameters: Iterable[nn.Parameter], replaced: Iterable[weakref.ref[nn.Parameter]] = ()
) -> None:
    """Notify a model of all steps of its parameters, until it is collected or `unwatch_optimizers` is called.

    `replaced`: parameters that are no longer the model's, whose steps are refused.
    """
    _watched[model] = frozenset(map(id, parameters))
    _replaced.update({id(one): one for reference in replaced if (one := reference()) is not None})
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
        _check_parameters(optimizer)
        has_closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))  # the first is itself
        for model in _trained_by(optimizer):
            model.before_step(has_closure)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for model in _trained_by(optimizer):
            model.after_step()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise OsdpError if an optimizer has parameters whose steps would be lost, or parts of what it needs whole."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = {id(one): one for one in parameters if not any(id(one) in known for known in _watched.values())}
    parts = [one for one in parameters if isinstance(one, DTensor) and id(one) not in others]
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in WHOLE_TENSORS), None)
    if name is not None and parts:
        what = f"{name} computes with whole tensors, of which this plan leaves parts on each rank"
        got = f"{len(parts)} of {len(parameters)} parameters sharded"
        advice = "plan with the pin *=replicate, or take an optimizer that steps element by element, such as AdamW"
        raise OsdpError(what, got=got, expected="replicated parameters", advice=advice)
    replaced = [one for key, one in others.items() if _replaced.get(key) is one]
    gathered = [one for one in others.values() if any(model.gathers(one) for model in _watched)]
    for lost, why in (
        (replaced, "were the model's before OSDP(...)"),
        (gathered, "are gathered for one step only, or were added later"),
    ):
        if lost:
            what = "optimizer.step() would change parameters that the model no longer trains"
            got = f"{type(optimizer).__name__} with {len(parameters)} parameters, of which {len(lost)} {why}"
            advice = "make the optimizer after OSDP(...), from the parameters() of what it returns"
            raise OsdpError(what, got=got, expected="parameters that rest on this rank", advice=advice)
