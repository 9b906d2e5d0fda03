"""The optimizers that plans name, in PyTorch.

What FSDP2 shards are DTensors, whose dispatch takes longer than the step: all step on what they hold on the rank.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from torch import Tensor

from planner import optimizers
from profiler.byte_sizes import allocated_bytes
from runtime.local_shards import local_data
from runtime.step.local_steps import step_on_local_tensors


def _on_local_tensors(kind: Any, parameters: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(parameters, **settings)
    step_on_local_tensors(optimizer)
    return optimizer


_Adam, _AdamW = partial(_on_local_tensors, torch.optim.Adam), partial(_on_local_tensors, torch.optim.AdamW)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "fused_adam": partial(_Adam, fused=True),
    "fused_adamw": partial(_AdamW, fused=True),
    "fused_sgd": partial(_on_local_tensors, torch.optim.SGD, fused=True),
}
"""Takes parameters, and settings by name; without settings they are what the planner counts with."""

_UNFUSED = {"adam": _Adam, "adamw": _AdamW}


def optimizer_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes a plan's optimizer: a stand-in for one that is known by the bytes that it keeps."""
    return OPTIMIZERS.get(name) or partial(StandIn, optimizers.optimizer_of(name).other_bytes)


def as_priced(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes a plan's optimizer in the form that its memory is counted of: that which holds more.

    All tensors together take one of the size of each; one by one, as a user's optimizer of DTensors steps, two of the
    size of one, beside one of the tensor before.
    """

    def unfused(parameters: Iterable[Tensor], **settings: Any) -> torch.optim.Optimizer:
        given = [*parameters]
        stepped = (local_data(one) for one in given if one.requires_grad)
        return _UNFUSED[name](given, foreach=_more_apart(stepped) <= 0, **settings)

    return unfused if name in _UNFUSED else optimizer_of(name)


def _more_apart(tensors: Iterable[Tensor]) -> int:
    """Return by how many bytes what is made of tensors one by one exceeds that of all; at most 0 where it does not."""
    sizes = [allocated_bytes(tensor.nbytes) for tensor in tensors]
    return max((before + 2 * size for before, size in pairwise([0, *sizes])), default=0) - sum(sizes)


def can_fuse(parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer of these can be fused, which takes real numbers of floating point."""
    return all(parameter.is_floating_point() for parameter in parameters if parameter.requires_grad)


class StandIn(torch.optim.Optimizer):
    """Gradient descent that holds so many bytes per parameter for an optimizer that plans know nothing else of."""

    def __init__(self, bytes_per_parameter: float, parameters: Iterable[Tensor], **_: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.bytes_per_parameter = bytes_per_parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Hold all updates at once, or what Adam makes of one by one if that is more, and then apply them."""
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            updates = [-group["lr"] * local_data(one.grad) for one in trained]
            more_bytes = max(0, _more_apart(updates))
            _ = torch.empty(more_bytes, dtype=torch.uint8, device=updates[0].device if updates else None)
            for parameter, update in zip(trained, updates, strict=True):
                local = local_data(parameter)
                kept_bytes = ceil(self.bytes_per_parameter * local.numel())
                if not self.state[parameter]:
                    self.state[parameter]["kept"] = torch.zeros(kept_bytes, dtype=torch.uint8, device=local.device)
                local.add_(update)
