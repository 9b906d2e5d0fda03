"""Layers that compute with what others computed, by `torch.func.functional_call`: gathered by the module around."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn
from torch.func import functional_call

from osdp.models.user_factory import source_of
from profiler.trace.trace import trace_model

WIDTH = 32


class Made(nn.Module):
    """A network of which another layer makes all weights, or the first one's, or scales them: (batch, WIDTH)."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.names = [name for name, _ in self.network.named_parameters() if made != "first" or name[0] == "0"]
        if made == "all":
            self.network.requires_grad_(False)  # they are never trained: others are in their places
        count = sum(self.network.get_parameter(name).numel() for name in self.names)
        self.code, self.maker = nn.Parameter(torch.ones(4) / 9), nn.Linear(4, count)

    def forward(self, x: Tensor) -> Tensor:
        parameters = [self.network.get_parameter(name).shape for name in self.names]
        parts = self.maker(self.code).split([shape.numel() for shape in parameters])
        made = {name: part.view(shape) for name, part, shape in zip(self.names, parts, parameters, strict=True)}
        y: Tensor = functional_call(self.network, made, (x,))
        return x + y


class Model(nn.Module):
    """Such networks between layers; returns a loss."""

    def __init__(self, *made: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Made(one) for one in made)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


@pytest.mark.parametrize("made", [("all", "all"), ("first", "first"), ("all", "first")])
def test_they_are_one_operator_with_the_module_around(made: tuple[str, ...]) -> None:
    """They were refused in the first forward of any plan that sharded them, also of those that the search chose."""

    def inputs(batch: int) -> tuple[Any, ...]:
        return (torch.randn(batch, WIDTH),)

    source, machine = source_of(lambda: Model(*made), "Model", None, inputs), cluster(1, 2)
    graph = trace_model(source)
    names = [operator.name for operator in graph.operators]
    for index, kind in enumerate(made):
        path = f"blocks.{index}"
        assert (f"{path}.network.0" in names, f"{path}.network.2" in names) == (False, kind == "first")
        assert path in names
    for strategies, again in ((("shard", "owner"), ()), (("owner", "shard_grad", "replicate"), names)):
        choices = dict(zip(names, cycle(strategies), strict=False))
        assert -0.01 <= compare(plan_of(graph, machine, choices, again), source, graph, machine).error <= 0.1
