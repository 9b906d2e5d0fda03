"""The optimizers that plans name, in PyTorch."""

from collections.abc import Callable, Iterable
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from planner import optimizers
from runtime.local_shards import local_data

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
"""Takes parameters, and settings by name; without settings they are what the planner counts with."""


def optimizer_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes a plan's optimizer: a stand-in for one that is known by the bytes that it keeps."""
    return OPTIMIZERS.get(name) or partial(StandIn, optimizers.optimizer_of(name).other_bytes)


class StandIn(torch.optim.Optimizer):
    """Gradient descent that holds so many bytes per parameter for an optimizer that plans know nothing else of."""

    def __init__(self, bytes_per_parameter: float, parameters: Iterable[Tensor], **_: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.bytes_per_parameter = bytes_per_parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Hold all updates at once, and then apply them."""
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            updates = [-group["lr"] * local_data(one.grad) for one in trained]
            for parameter, update in zip(trained, updates, strict=True):
                local = local_data(parameter)
                kept_bytes = ceil(self.bytes_per_parameter * local.numel())
                if not self.state[parameter]:
                    self.state[parameter]["kept"] = torch.zeros(kept_bytes, dtype=torch.uint8, device=local.device)
                local.add_(update)
