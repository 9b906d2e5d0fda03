"""Hooks of gradients that see what they see in one process: the mean over ranks, once a backward.

    parameter.register_post_accumulate_grad_hook(clip)    is called before ranks average, where each has it whole, and
                                                          else once for each forward that ran its layer
    parameter.register_hook(clip)                         is called before ranks average

So they are held back until a backward has ended: then those that change gradients are called with the mean of what it
adds to them, and the others after that.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.errors import OsdpError
from runtime.host_copies import on_device
from runtime.sharded_model import ShardedModel

NAMES = "_post_accumulate_grad_hooks", "_backward_hooks"
"""What parameters have hooks of either kind in."""
Hooks = dict[int, Any]
"""Hooks of a parameter, in the order in which they were registered, by the numbers that remove them."""


class Backward(Protocol):
    """A model, as far as its backwards go."""

    sharded: ShardedModel
    has_begun: bool
    """Whether a backward has reached it."""


class AtOnce(partial[None]):
    """A hook of our own, which autograd calls as a gradient comes."""


def has_hooks(model: ShardedModel) -> bool:
    """Return whether somebody is to be told of gradients of a model's parameters."""
    return any(_others(parameter, NAMES[0]) for parameter in model.resting.values())


def check_hooks_wait(model: ShardedModel) -> None:
    """Raise OsdpError where hooks would see what ranks average later, in the step, as they do under odc."""
    hooked = [one for unit in model.units for one in unit.computing if any(_others(one, name) for name in NAMES)]
    if hooked:
        what = "under odc hooks of gradients are called before ranks have synchronized"
        got = f"hooks of {len(hooked)} parameters that every rank holds whole"
        advice = "call model.finish_gradients() on all ranks after the last backward, and do it then"
        raise OsdpError(what, got=got, expected="no hooks of these", advice=advice)


@contextmanager
def holding_hooks(models: Sequence[Backward], accumulates: bool) -> Iterator[None]:
    """Call hooks of gradients when the backward within has ended; `accumulates`: it adds to `.grad`."""
    came: list[nn.Parameter] = []
    trained: dict[nn.Parameter, Hooks] = {}
    changing = [_Changing(model) for model in models if accumulates]
    with ExitStack() as held:
        for model in models:
            model.has_begun = False
            for parameter in model.sharded.resting.values():
                if hooks := _others(parameter, NAMES[0]):
                    trained[parameter] = hooks
                    held.enter_context(_replaced(parameter, NAMES[0], came.append))
        for one in changing:
            one.hold(held)
        yield
    for one in changing:
        one.call()
    for parameter in dict.fromkeys(came):
        for hook in trained[parameter].values():
            hook(parameter)


class _Changing:
    """Hooks that change gradients of a model's parameters, of those to which autograd gives gradients."""

    def __init__(self, model: Backward) -> None:
        self.model = model
        computing = dict.fromkeys(parameter for unit in model.sharded.units for parameter in unit.computing)
        self.hooks = {one: hooks for one in computing if (hooks := _others(one, NAMES[1]))}
        self.added: dict[nn.Parameter, Tensor] = {}

    def hold(self, held: ExitStack) -> None:
        """Keep what a backward would add, which adds nothing meanwhile."""
        for parameter in self.hooks:
            held.enter_context(_replaced(parameter, NAMES[1], partial(self._keep, parameter)))

    def _keep(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        if parameter in self.added:
            return None  # a further hook of this parameter, which gets zeros
        self.added[parameter] = gradient.detach()
        return torch.zeros_like(gradient)

    @torch.no_grad()
    def call(self) -> None:
        """Add what hooks make of the mean over ranks."""
        if not (self.hooks and self.model.has_begun):
            return
        device = self.model.sharded.device
        counts = on_device(torch.tensor([one in self.added for one in self.hooks], dtype=torch.int32), device)
        dist.all_reduce(counts)
        for (parameter, hooks), count in zip(self.hooks.items(), counts.tolist(), strict=True):
            if count:
                gradient = self.added.get(parameter, torch.zeros_like(parameter)).clone()
                dist.all_reduce(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
                gradient /= dist.get_world_size()
                for hook in hooks.values():
                    changed = hook(gradient)
                    gradient = gradient if changed is None else changed
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _others(parameter: nn.Parameter, name: str) -> Hooks:
    return {key: hook for key, hook in (getattr(parameter, name) or {}).items() if not _is_called_at_once(hook)}


def _is_called_at_once(hook: Any) -> bool:
    """Return whether a hook is ours, or of `torch.autograd.graph.register_multi_grad_hook`, which counts gradients."""
    return isinstance(hook, AtOnce) or getattr(hook, "__module__", None) == "torch.autograd.graph"


@contextmanager
def _replaced(parameter: nn.Parameter, name: str, by: Any) -> Iterator[None]:
    """Call another function in place of hooks, of which some may be removed meanwhile."""
    hooks, registered = _others(parameter, name), getattr(parameter, name)
    registered.update(dict.fromkeys(hooks, by))
    try:
        yield
    finally:
        registered.update({key: hook for key, hook in hooks.items() if key in registered})
