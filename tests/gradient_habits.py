"""What loops do with gradients of a small model, and what such loops share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from thoroughness import STEPS
from torch import Tensor, nn
from toys import Block, Toy, batch_of


class Coder(Toy):
    """An encoder and a decoder, of which scripts call each, with an attribute that they set and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.block, self.decoder = nn.Linear(6, 6), Block(0.0), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))  # without dimensions, so that every rank holds it
        self.temperature = 1.0
        self.boxed = False

    def forward(self, x: Tensor) -> Any:
        """(batch, 5, 6) -> (batch, 5, 3), in an object that nobody looks into if `boxed`."""
        y = self.decoder(self.block(self.encoder(x))) * self.scale * self.temperature
        return SimpleNamespace(y=y) if self.boxed else y

    def loss(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        return self.decoder(self.block(self.encoder(x))).pow(2).mean()  # type: ignore[no-any-return]


SAMPLE = Coder()
"""What batches and plans are made for."""
Train = Callable[[Any, Sequence[int]], list[float]]
"""A loop over a model on the batches of some ranks; returns numbers that are the same on all ranks."""


def mean_of(ranks: Sequence[int], loss: Callable[[Tensor], Tensor], number: int) -> Tensor:
    """Return the mean of a loss over the batches of ranks."""
    losses = [loss(batch_of(SAMPLE, rank, number)[0][0]) for rank in ranks]
    return torch.stack(losses).mean()


def finish(model: Any) -> None:
    """Complete gradients before they are read, as is needed under odc, and in a step that is shorter than planned."""
    plan = getattr(model, "plan", None)
    if plan is not None and (plan.accumulation > 1 or any("odc" in one for one in plan.choices.values())):
        model.finish_gradients()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every loop."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def each_step(model: Any, ranks: Sequence[int], loss: Callable[[Tensor], Tensor]) -> list[float]:
    """Train by a loss that a script computes of a batch."""
    optimizer = sgd(model)
    for number in range(STEPS):
        mean_of(ranks, loss, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def by_gradients_of_ones_own(model: Any, ranks: Sequence[int]) -> list[float]:
    """Put whole gradients of this rank's own batch in their places, and clip them."""
    optimizer, seen = sgd(model), []
    for number in range(STEPS):
        for index, parameter in enumerate(model.parameters()):
            own = [batch_of(SAMPLE, rank, number + index)[0][0].mean() for rank in ranks]
            parameter.grad = torch.stack(own).mean() * torch.ones(parameter.shape)
        if number:
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def by_autograd(model: Any, ranks: Sequence[int]) -> list[float]:
    """Take gradients from `torch.autograd.grad`, which changes none of `.grad`, and clip them."""
    optimizer, seen = sgd(model), []
    parameters = [*model.parameters()]
    for number in range(STEPS):
        loss = mean_of(ranks, lambda x: model(x).pow(2).mean(), number)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        finish(model)
        seen.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def by_kept_gradients(model: Any, ranks: Sequence[int]) -> list[float]:
    """Keep gradients of one loss while another's are made, clip them beside others, and clear as old loops do."""
    optimizer, seen, other = sgd(model), [], nn.Parameter(torch.ones(3))
    for number in range(STEPS):
        kept = []
        for power in (2, 3):
            mean_of(ranks, lambda x: model(x).pow(power).mean(), number).backward()  # noqa: B023
            finish(model)
            kept.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        for parameter, *gradients in zip(model.parameters(), *kept, strict=True):
            parameter.grad = gradients[0] + 0.5 * gradients[1]
        other.grad = torch.full((3,), 0.1)
        seen.append(float(nn.utils.clip_grad_norm_([*model.parameters(), other], 0.1)))
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.detach_()
            parameter.grad.zero_()
    return seen


def by_vmap(model: Any, ranks: Sequence[int]) -> list[float]:
    """Run the last micro-batch of a step by vmap, a sample at a time."""
    optimizer, at_once = sgd(model), torch.func.vmap(model)
    for number in range(STEPS):
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            mean_of(ranks, lambda x: model(x).pow(2).mean(), number).backward()
        mean_of(ranks, lambda x: at_once(x).pow(3).mean(), number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def by_adversaries(model: Any, ranks: Sequence[int]) -> list[float]:
    """Train on inputs that were changed along their gradients, which are taken of the model and of the model frozen."""
    optimizer, loss = sgd(model), lambda x: model(x).pow(2).mean()
    for number in range(STEPS):
        inputs = [batch_of(SAMPLE, rank, number)[0][0].requires_grad_() for rank in ranks]
        model.requires_grad_(False)
        sum(map(loss, inputs)).backward()
        optimizer.zero_grad()
        model.requires_grad_(True)
        for one in inputs:
            (gradient,) = torch.autograd.grad(loss(one), one)
            one.data += 0.1 * one.grad.sign() + 0.1 * gradient.sign()
        optimizer.zero_grad()
        torch.stack([loss(one.detach()) for one in inputs]).mean().backward()
        optimizer.step()
    return []
