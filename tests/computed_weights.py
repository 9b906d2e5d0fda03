"""Models whose modules keep weights in plain attributes that hooks compute of parameters before each forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import prune

WIDTH = 16
Change = Callable[["Layers"], object]


class Block(nn.Module):
    """Two layers beside what they are added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Layers(nn.Module):
    """Blocks, a convolution and a recurrent layer, of which a function changes how some keep their weights."""

    def __init__(self, change: Change, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.wave = nn.Conv1d(1, 4, 3, padding=1)
        self.steps = nn.GRU(4, 4, batch_first=True)
        self.with_steps = True
        self.head = nn.Linear(4, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            change(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> the same."""
        for block in self.blocks:
            x = block(x)
        waves = F.leaky_relu(self.wave(x[:, None])).transpose(1, 2)
        if self.with_steps:
            waves, _ = self.steps(waves)
        return self.head(waves).squeeze(-1)  # type: ignore[no-any-return]


def wide(kind: str) -> Layers:
    """Return a larger one, of which no recurrent layer runs: what kernels of these take is not known."""
    model = Layers(CHANGES[kind], 128)
    model.with_steps = False
    return model


def linears(model: Layers) -> list[nn.Linear]:
    return [layer for block in model.blocks for layer in (block.up, block.down)]


def weight_normed(model: Layers) -> None:
    for layer in (*linears(model), model.wave):
        nn.utils.weight_norm(layer)
    nn.utils.weight_norm(model.steps, "weight_hh_l0", dim=None)


def spectral_normed(model: Layers) -> None:
    for layer in (model.blocks[0].up, model.blocks[2].down, model.wave):
        nn.utils.spectral_norm(layer)


def pruned(model: Layers) -> None:
    """At random, by size and by norms of rows."""
    up, down, *others = linears(model)
    prune.l1_unstructured(up, "weight", 0.3)
    prune.random_unstructured(down, "weight", 0.2)
    prune.ln_structured(others[0], "weight", 0.2, n=2, dim=0)
    prune.random_structured(model.wave, "weight", 1, dim=0)
    prune.l1_unstructured(model.head, "bias", 0)
    prune.custom_from_mask(model.head, "weight", torch.tensor([[1.0, 0, 1, 1]]))
    prune.l1_unstructured(model.steps, "weight_hh_l0", 0.5)


def pruned_globally(model: Layers) -> None:
    layers = [(layer, "weight") for layer in linears(model)]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.4)


def pruned_again(model: Layers) -> None:
    """What is pruned already: which part is left to prune depends on values, so no factory can be recorded."""
    pruned(model)
    for layer in linears(model)[:3]:
        prune.l1_unstructured(layer, "weight", 0.3)
        prune.ln_structured(layer, "weight", 0.2, n=2, dim=1)
    pruned_globally(model)


class Standardised:
    """Computes the weight of a layer as old users' hooks do: of rows with mean 0 and variance 1, in place of it."""

    def __init__(self, layer: nn.Linear) -> None:
        layer.register_parameter("raw", layer._parameters.pop("weight"))
        self(layer, None)
        layer.register_forward_pre_hook(self)

    def __call__(self, layer: nn.Module, inputs: Any) -> None:
        raw = layer.raw
        assert isinstance(raw, Tensor)
        parts = [(raw - raw.mean(1, keepdim=True)) / raw.std(1, keepdim=True)]
        vars(layer).update(weight=parts[0] / raw.shape[1] ** 0.5, parts=parts)


def standardised(model: Layers) -> None:
    for layer in linears(model):
        Standardised(layer)


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (weight_normed, spectral_normed, pruned, pruned_globally, pruned_again, standardised)
}


CASES = [(kind, how) for kind in CHANGES for how in ("module", "factory") if (kind, how) != ("pruned_again", "factory")]
"""Kinds of models, and whether OSDP is given a module or what makes it."""


def build(kind: str) -> Layers:
    """Return a model whose weights are kept in some way."""
    return Layers(CHANGES[kind])
