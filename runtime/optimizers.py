"""The optimizers that plans name, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
"""Takes parameters, and settings by name; without settings they are what the planner counts with."""
