"""Models whose constructors convert and copy layers, and read numbers, built without data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, STEPS = 32, 8


def _layers() -> nn.Module:
    return nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3), nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1))


class Model(nn.Module):
    """Two branches, which its constructor changes."""

    def __init__(self, change: Callable[[Model], Any]) -> None:
        super().__init__()
        self.one, self.two = _layers(), _layers()
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH, STEPS) -> a loss."""
        x = x.to(next(self.parameters()).dtype)
        return (self.one(x) - self.two(x)).float().pow(2).mean()


class Augmented(Model):
    """Shifts its inputs by a number that it draws and looks at."""

    def forward(self, x: Tensor) -> Tensor:
        shift = float(torch.empty(1).uniform_(-0.5, 0.5))
        if not -0.5 <= shift <= 0.5:
            raise ValueError(shift)
        return super().forward(x + shift)


class Moving(Model):
    """Moves layers to where its inputs are, where they are already."""

    def forward(self, x: Tensor) -> Tensor:
        self.two.to(x.device)
        return super().forward(x)


def _copies(model: Model) -> None:
    model.two = copy.deepcopy(model.one)


def _copies_converted(model: Model) -> None:
    model.one.register_buffer("table", torch.tensor([1, 2, 3]))
    model.to(torch.device("cpu"), torch.bfloat16)
    _copies(model)
    model.two.half().bfloat16()


def _reads_and_converts(model: Model) -> None:
    """Reads a number, which no tensor of the meta device has: the trace turns to fake ones."""
    if torch.linspace(0, 1, 3)[1].item() > 2:
        raise ValueError
    torch.nn.init.uniform_(torch.empty(1)).numpy()
    _copies(model)
    model.to("cpu")


def _runs_and_converts(model: Model) -> None:
    model(torch.zeros(2, WIDTH, STEPS))
    model.to("cpu")


CHANGES: dict[str, Callable[[Model], Any]] = {
    "to": lambda model: model.to("cpu"),
    "bfloat16": lambda model: model.bfloat16(),
    "double and back": lambda model: model.double().float(),
    "apply": lambda model: model._apply(lambda tensor: tensor.clone()),
    "copy": _copies,
    "copy, converted": _copies_converted,
    "read, converted": _reads_and_converts,
    "run, converted": _runs_and_converts,
}


@pytest.mark.parametrize(
    ("kind", "change"), [*((Model, name) for name in some([*CHANGES], 3, 1)), (Augmented, "copy"), (Moving, "to")]
)
def test_a_rehearsal_builds_it_and_holds_what_one_with_data_does(kind: type[Model], change: str) -> None:
    """Torch's own mode for fake tensors converts no module and copies no BatchNorm: every one of these once failed."""
    inputs = lambda _, batch: ((torch.randn(batch, WIDTH, STEPS),), {})  # noqa: E731
    source = ModelSource(change, lambda: kind(CHANGES[change]), inputs, 1)
    graph, machine = trace_model(source), cluster(1, 2)
    plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators})
    fake, real = (compare(plan, source, graph, machine, with_data=with_data) for with_data in (False, True))
    assert dict(fake.tracked) == dict(real.tracked)
    assert fake.error >= -0.002
