"""Notifies models before and after the steps of the optimizers that train them.

An optimizer's parameters must be those that rest.  Steps of others would be lost without a word, so they are refused:
those that the model had before it was sharded, and those that a forward gathers and the next discards.  So are steps of
optimizers that look at whole tensors where a rank has parts: on torch 2.13 Muon trained something else on some meshes.
Where one rank owns a tensor, such an optimizer gets the whole of it there, and elsewhere nothing, while it steps.
"""

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from profiler.errors import OsdpError
from runtime.dtensor_rows import laid_out_as, own_rows
from runtime.local_shards import LocalShard, local_data
from runtime.step.local_steps import step_on_local_tensors
from runtime.step.whole_steps import enter, guard_steps, is_within_itself, leave, out_of_it, outside

WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP")
"""Classes of optimizers, of PyTorch and others, whose steps are not element by element."""
ALL_TENSORS = ("LBFGS",)
"""Those of them that look at all tensors together."""


class Trained(Protocol):
    """What is notified of steps."""

    def before_step(self, has_closure: bool) -> None:
        """Prepare for a step; `has_closure` says that the optimizer will run forward and backward."""

    def after_step(self) -> None:
        """React to a step that is done."""

    def before_zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Discard what else there is of the gradients that an optimizer is about to clear."""

    def gathered(self, parameters: Mapping[int, nn.Parameter]) -> set[int]:
        """Return which of these, by identity, the model has beside the parameters that rest."""

    @property
    def local_shards(self) -> Sequence[LocalShard]:
        """What this rank holds."""


_watched: weakref.WeakKeyDictionary[Trained, frozenset[int]] = weakref.WeakKeyDictionary()
"""The models of this process, each with the identities of its parameters, which live as long as it does."""


_slices: weakref.WeakKeyDictionary[Trained, Sequence[nn.Parameter]] = weakref.WeakKeyDictionary()
"""Of those models: parameters that are slices of the original ones."""


def trained_already(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a model of this process that is in use trains one of these parameters."""
    given = set(map(id, parameters))
    if not any(given & known for known in _watched.values()):
        return False
    gc.collect()  # what was deleted may be here still
    return any(given & known for known in _watched.values())


_replaced: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters that models had before they were sharded and that somebody holds still, by identity."""


def watch_optimizers(
    model: Trained, parameters: Iterable[nn.Parameter], replaced: Iterable[weakref.ref[nn.Parameter]] = ()
) -> None:
    """Notify a model of all steps of its parameters, until it is collected or `unwatch_optimizers` is called.

    `replaced`: parameters that are no longer the model's, whose steps are refused.
    """
    _watched[model] = frozenset(map(id, parameters))
    _slices[model] = [one.parameter for one in model.local_shards if tuple(one.parameter.shape) != one.shape]
    _replaced.update({id(one): one for reference in replaced if (one := reference()) is not None})
    _watch()


def unwatch_optimizers(model: Trained) -> None:
    """Stop notifying a model."""
    _watched.pop(model, None)


def _trained_by(optimizer: torch.optim.Optimizer) -> list[Trained]:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [model for model, parameters in list(_watched.items()) if not parameters.isdisjoint(trained)]


@cache
def _watch() -> None:
    """Hook every optimizer's step, once and permanently: a hook cannot be removed while hooks run."""

    def start(optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        _prepare(optimizer, has_closure)
        trained = _trained_by(optimizer)
        if trained:
            if _whole_tensors(optimizer) is None:
                step_on_local_tensors(optimizer)
            enter(optimizer, [one for model in trained for one in _slices[model]])

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))  # the first is itself
        if not is_within_itself(optimizer):
            start(optimizer, has_closure)
        elif has_closure:  # its step had none, maybe
            with out_of_it():
                for model in _trained_by(optimizer):
                    model.before_step(has_closure)
        if not has_closure:
            return None
        ends, begins = partial(_take_back, optimizer), partial(_prepare, optimizer, False)
        closed = {id(one): outside(one, ends, begins) for one in (*args[1:], *kwargs.values()) if callable(one)}
        given = [closed.get(id(one), one) for one in args[1:]]
        return (args[0], *given), {name: closed.get(id(one), one) for name, one in kwargs.items()}

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_within_itself(optimizer):
            return
        leave(optimizer)
        _take_back(optimizer)
        for model in _trained_by(optimizer):
            model.after_step()

    zero_grad_by_torch = torch.optim.Optimizer.zero_grad

    @wraps(zero_grad_by_torch)
    def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        for model in _trained_by(optimizer):
            model.before_zero_grad(optimizer, set_to_none)
        zero_grad_by_torch(optimizer, set_to_none)

    load_by_torch = torch.optim.Optimizer.load_state_dict

    @wraps(load_by_torch)
    def load_state_dict(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
        load_by_torch(optimizer, state_dict)
        if _trained_by(optimizer):
            _lay_out_states(optimizer)

    guard_steps()
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign,assignment]  # it has no hooks
    torch.optim.Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign,assignment]


def _lay_out_states(optimizer: torch.optim.Optimizer) -> None:
    """Let a rank keep its rows of states that are whole, as those of one process are."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                rows = own_rows(parameter, value).reshape(local_data(parameter).shape)
                state[name] = laid_out_as(rows.clone(), parameter)


def _prepare(optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
    """Complete the gradients that an optimizer steps with, and let it have what it needs whole."""
    _take_back(optimizer)
    owned = _check_parameters(optimizer)
    for model in _trained_by(optimizer):
        model.before_step(has_closure)
    if owned:
        _give_whole(optimizer, owned)


_given: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[list[nn.Parameter]], dict[Any, nn.Parameter]]]
_given = weakref.WeakKeyDictionary()
"""Of optimizers that step with whole tensors: parameters of their groups, and what stands for which of them."""


def _give_whole(optimizer: torch.optim.Optimizer, owned: Mapping[int, LocalShard]) -> None:
    """Let an optimizer have plain tensors in place of those that one rank owns: all of them there, elsewhere none."""
    groups = [group["params"] for group in optimizer.param_groups]
    instead: dict[Any, nn.Parameter] = {}
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = []
        for parameter in parameters:
            shard = owned.get(id(parameter))
            if shard is None:
                group["params"].append(parameter)
            elif shard.numel:
                whole = nn.Parameter(shard.local(parameter), parameter.requires_grad)
                whole.grad = None if parameter.grad is None else shard.local(parameter.grad)
                state = optimizer.state.pop(parameter, {})
                if state:
                    optimizer.state[whole] = {
                        name: local_data(value) if isinstance(value, Tensor) else value for name, value in state.items()
                    }
                instead[whole] = parameter
                group["params"].append(whole)
    _given[optimizer] = groups, instead


def _take_back(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer have its own parameters again, with the states that it made."""
    groups, instead = _given.pop(optimizer, ([], {}))
    for group, parameters in zip(optimizer.param_groups, groups, strict=False):
        group["params"] = parameters
    for whole, parameter in instead.items():
        if whole in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(whole)


def _whole_tensors(optimizer: torch.optim.Optimizer) -> str | None:
    """Return by which of the names of `WHOLE_TENSORS` an optimizer computes with whole tensors, if it does."""
    return next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in WHOLE_TENSORS), None)


def _check_parameters(optimizer: torch.optim.Optimizer) -> dict[int, LocalShard]:
    """Return the shards of parameters that the optimizer needs whole and that one rank owns, by their identity.

    Raises OsdpError if it has parameters whose steps would be lost, or parts of what it needs whole.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    watched = frozenset().union(*_watched.values())
    others = {id(one): one for one in parameters if id(one) not in watched}
    name = _whole_tensors(optimizer)
    owned = {
        id(shard.parameter): shard
        for model in (list(_watched) if name is not None and name not in ALL_TENSORS else ())
        for shard in model.local_shards
        if shard.is_uneven and tuple(shard.parameter.shape) == shard.shape
    }
    apart = () if name is None else parameters
    parts = [one for one in apart if isinstance(one, DTensor) and id(one) not in others and id(one) not in owned]
    if parts:
        what = f"{name} computes with whole tensors, of which this plan leaves parts on each rank"
        got = f"{len(parts)} of {len(parameters)} parameters sharded"
        pins = "*=replicate" if name in ALL_TENSORS else "*=replicate or *=owner"
        advice = f"plan with the pin {pins}, or take an optimizer that steps element by element, such as AdamW"
        raise OsdpError(what, got=got, expected="whole parameters", advice=advice)
    replaced = [one for key, one in others.items() if _replaced.get(key) is one]
    gathered = {key for model in (_watched if others else ()) for key in model.gathered(others)}
    for lost, why in (
        (replaced, "were the model's before OSDP(...)"),
        ([others[key] for key in gathered], "are gathered for one step only, or were added later"),
    ):
        if lost:
            what = "optimizer.step() would change parameters that the model no longer trains"
            got = f"{type(optimizer).__name__} with {len(parameters)} parameters, of which {len(lost)} {why}"
            advice = "make the optimizer after OSDP(...), from the parameters() of what it returns"
            raise OsdpError(what, got=got, expected="parameters that rest on this rank", advice=advice)
    return {id(one): owned[id(one)] for one in parameters if id(one) in owned}
