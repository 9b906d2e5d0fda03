"""Random trees of modules that read each other's parameters: `Tree(number)` has the same structure everywhere."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LENGTH, BATCH = 6, 3, 2

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, weight: x @ weight.T @ weight if weight.dim() == 2 else x * weight,
    "looked up": lambda x, weight: x + weight[torch.arange(LENGTH) % len(weight)] if weight.dim() == 2 else x + weight,
    "norm": lambda x, weight: x / (1 + weight.pow(2).mean()),
    "expanded": lambda x, weight: x + weight.view(-1, WIDTH)[:1].expand(x.shape).sin(),
    "detached": lambda x, weight: x * (1 + weight.detach().mean()),
}
"""What a module does with a parameter of another."""


class Node(nn.Module):
    """Children, parameters and reads of parameters elsewhere, in a drawn order."""

    def __init__(self, draw: Random, depth: int) -> None:
        super().__init__()
        self.own = draw.choice(["", "", "scale", "table", "scale table"]).split()
        if "scale" in self.own:
            self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        if "table" in self.own:
            self.table = nn.Parameter(torch.rand(draw.choice([1, 3, 5, 7]), WIDTH))
        self.container = draw.choice(["list", "sequential", "dict", "attributes"])
        made = [self._child(draw, depth) for _ in range(draw.randint(1, 3))]
        if self.container == "list":
            self.inner: Any = nn.ModuleList(made)
        elif self.container == "sequential":
            for one in made:  # which hands on what it is given, and takes one tensor
                one.form = "residual" if getattr(one, "form", "") == "handing" else getattr(one, "form", "")
            self.inner = nn.Sequential(*made)
        elif self.container == "dict":
            self.inner = nn.ModuleDict({f"part{index}": one for index, one in enumerate(made)})
        else:
            for index, one in enumerate(made):
                self.add_module(f"part{index}", one)
        self.form = draw.choice(["plain", "residual", "residual", "twice", "handing"])
        self.reads: list[tuple[str, nn.Module, str]] = []
        """How, of which module, and by which name there, it reads parameters."""

    @staticmethod
    def _child(draw: Random, depth: int) -> nn.Module:
        if depth and draw.random() < 0.6:
            return Node(draw, depth - 1)
        return draw.choice([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Looking(draw), nn.Tanh()])

    def parts(self) -> list[nn.Module]:
        """Return the children in the order in which they run."""
        if self.container == "list":
            return list(self.inner)
        if self.container == "dict":
            return list(self.inner.values())
        return [self.inner] if self.container == "sequential" else list(self.children())

    def run(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same."""
        if "table" in self.own:
            x = x + self.table[torch.arange(LENGTH) % len(self.table)]
        for part in self.parts():
            x = _single(part(x))
        for how, module, name in self.reads:
            x = READS[how](x, getattr(module, name))
        return x * self.scale if "scale" in self.own else x

    def forward(self, x: Tensor) -> Any:
        """(batch, LENGTH, WIDTH) -> the same, alone or with a part of a parameter."""
        x = _single(x)
        match self.form:
            case "residual":
                return x + self.run(x)
            case "twice":
                return self.run(torch.tanh(self.run(x)))
            case "handing" if self.own:
                return self.run(x), getattr(self, self.own[0])[:1].expand(len(x), LENGTH, -1)[..., :WIDTH]
        return self.run(x)


class Looking(nn.Module):
    """An embedding of positions."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH + draw.randint(0, 3), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same."""
        y: Tensor = x + self.table(torch.arange(LENGTH))
        return y


class Tree(nn.Module):
    """A tree of nodes between two layers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = Random(number)
        self.embed, self.body, self.head = nn.Linear(WIDTH, WIDTH), Node(draw, 2), nn.Linear(WIDTH, WIDTH)
        nodes = [module for module in self.modules() if isinstance(module, Node)]
        places = [
            (module, name)
            for module in self.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.shape[-1] == WIDTH
        ]
        self.reads: list[tuple[str, nn.Module, str]] = []
        for _ in range(draw.randint(1, 3)):
            reader: Any = draw.choice([self, *nodes])
            module, name = draw.choice(places)
            # Plain attributes would be found as submodules, and cycles never end.
            (reader.reads if isinstance(reader, Node) else self.reads).append(
                (draw.choice(sorted(READS)), module, name)
            )
        if draw.random() < 0.3:
            draw.choice(places)[0].requires_grad_(False)
        self.head.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> a loss."""
        y = self.head(_single(self.body(self.embed(x))))
        for how, module, name in self.reads:
            y = READS[how](y, getattr(module, name))
        loss: Tensor = torch.tanh(y).pow(2).mean()
        return loss

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.randn(batch, LENGTH, WIDTH),), {}


def _single(output: Any) -> Tensor:
    """Return what a module returns, with what it hands on mixed in."""
    if isinstance(output, tuple):
        made: Tensor = output[0] + 0.1 * output[1]
        return made
    assert isinstance(output, Tensor)
    return output
