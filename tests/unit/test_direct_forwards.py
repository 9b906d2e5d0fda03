"""Layers whose `forward` is called, and not they themselves, so that none of their hooks run."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH = 64


class Layers(nn.Module):
    """A layer, two in a container that reads a parameter of its own, and one more."""

    def __init__(self, direct: frozenset[str]) -> None:
        super().__init__()
        self.direct, self.scale = direct, nn.Parameter(torch.ones(WIDTH))
        self.one, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for name in ("one", "two", "last"):
            layer = getattr(self, name)
            x = x + (layer.forward if name in self.direct else layer)(x) * self.scale
        return x


class Model(nn.Module):
    """Layers between linear ones."""

    def __init__(self, direct: frozenset[str]) -> None:
        super().__init__()
        self.direct = direct
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layers(direct) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer.forward(x) if "all" in self.direct else layer(x)
        loss: Tensor = self.head(x).pow(2).mean()
        return loss


@pytest.mark.parametrize(
    ("strategy", "direct"), some([*product(["shard", "owner"], ["one", "two", "one last", "one two last", "all"])], 2)
)
def test_their_parameters_are_gathered_with_those_of_what_is_called(direct: str, strategy: str) -> None:
    """They were planned as layers that gather their own, and refused in the first step."""
    inputs = lambda _, batch: ((torch.randn(batch, 8, WIDTH),), {})  # noqa: E731
    source = ModelSource(direct, lambda: Model(frozenset(direct.split())), inputs, 8)
    graph, machine = trace_model(source), cluster(1, 4)
    plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, micro_batch=4)
    assert -0.002 <= compare(plan, source, graph, machine).error <= 0.05
