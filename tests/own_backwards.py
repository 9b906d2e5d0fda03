"""Models with functions whose backward asks autograd for gradients of parameters of layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class _Adjoint(torch.autograd.Function):
    """Euler steps of an ODE, which its backward takes back; keeps the parameters as torchdiffeq does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dynamics: nn.Module, *parameters: nn.Parameter) -> Tensor:
        for _ in range(3):
            x = x + dynamics(x) / 3
        ctx.dynamics = dynamics
        ctx.save_for_backward(x, *parameters)
        return x

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(3):
            with torch.enable_grad():
                before = x.detach().requires_grad_()
                change = ctx.dynamics(before)
            found = torch.autograd.grad(change, [before, *parameters], adjoint, allow_unused=True)
            adjoint = adjoint + found[0] / 3
            sums = [one if more is None else one + more / 3 for one, more in zip(sums, found[1:], strict=True)]
            x = x - change.detach() / 3
        return adjoint, None, *sums


class Reverse(torch.autograd.Function):
    """A reversible layer, which looks its parameters up in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *parameters: nn.Parameter) -> Tensor:
        left, right = x.chunk(2, -1)
        ctx.layer = layer
        y = torch.cat([left + layer(right), right], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, right = ctx.saved_tensors[0].chunk(2, -1)
        ours, others = gradient.chunk(2, -1)
        with torch.enable_grad():
            right = right.detach().requires_grad_()
            inside, *found = torch.autograd.grad(ctx.layer(right), [right, *trained(ctx.layer)], ours)
        return torch.cat([ours, others + inside], -1), None, *found


class _Equilibrium(torch.autograd.Function):
    """A fixed point, whose backward solves for a gradient; keeps what it was handed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *parameters: nn.Parameter) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(4):
            z = layer(z) / 2 + x
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            again = ctx.layer(z) / 2
        solved = gradient
        for _ in range(4):
            solved = gradient + torch.autograd.grad(again, z, solved, retain_graph=True)[0]
        return solved, None, *torch.autograd.grad(again, ctx.parameters, solved)


FUNCTIONS: dict[str, tuple[Any, int]] = {
    "adjoint": (_Adjoint, WIDTH),
    "reverse": (Reverse, WIDTH // 2),
    "equilibrium": (_Equilibrium, WIDTH),
}
"""Functions, and the width of the layers that they run."""


def layers(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


class Applied(nn.Module):
    """A function around layers."""

    def __init__(self, kind: str, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.run = inside, FUNCTIONS[kind][0].apply  # bound before a trace, as is usual

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> the same."""
        return self.run(x, self.inside, *trained(self.inside))  # type: ignore[no-any-return]


class Whole(nn.Module):
    """Parts between two layers."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.parts, self.last = nn.Linear(WIDTH, WIDTH), nn.ModuleList(parts), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.last(x).pow(2).mean()  # type: ignore[no-any-return]

    def example_inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.ones(batch, WIDTH),)


def drawn(seed: int) -> Callable[[], Whole]:
    """Return the factory of a model: functions in its blocks or around several, some layers frozen or tied."""
    draw = random.Random(seed)
    kinds = [draw.choice([*FUNCTIONS]) for _ in range(2)]
    around, freezes, ties = draw.random() < 0.4, draw.random() < 0.4, draw.random() < 0.3

    def build() -> Whole:
        if around:
            width = FUNCTIONS[kinds[0]][1]
            return Whole(Applied(kinds[0], nn.Sequential(*(layers(width) for _ in range(2)))), layers(WIDTH))
        parts = [Applied(kind, layers(FUNCTIONS[kind][1])) for kind in kinds]
        model = Whole(*parts, layers(WIDTH))
        inner = [part.inside[0] for part in parts]  # type: ignore[index]
        if freezes:
            inner[0].requires_grad_(False)
        if ties and kinds[0] == kinds[1]:
            inner[1].weight = inner[0].weight
        return model

    return build
