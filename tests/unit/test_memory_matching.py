"""Detectors whose loss matches predictions to labels by scipy, against steps in which it does.

Scipy is no requirement; a module of its name stands for it, which reads all costs as it does.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import permutations
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn

from profiler.model_graph import ModelGraph
from profiler.model_source import Inputs, ModelSource
from profiler.trace.trace import trace_model

WIDTH, CLASSES = 64, 16


def cheapest(cost_matrix: Any, maximize: bool = False) -> tuple[Any, Any]:
    """Return the rows and columns of the cheapest (or dearest) pairs, of every way to pair."""
    cost = np.asarray(cost_matrix) * (-1 if maximize else 1)
    flipped = cost.shape[0] > cost.shape[1]
    cost = cost.T if flipped else cost
    rows = np.arange(cost.shape[0])
    found = min(permutations(range(cost.shape[1]), len(rows)), key=lambda columns: cost[rows, list(columns)].sum())
    columns = np.array(found, dtype=int)
    order = np.argsort(columns)
    return (columns[order], rows[order]) if flipped else (rows, columns)


linear_sum_assignment = cheapest
"""As if imported from scipy."""


@pytest.fixture(autouse=True)
def scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scipy be what has it."""
    optimize = ModuleType("scipy.optimize")
    vars(optimize)["linear_sum_assignment"] = cheapest
    monkeypatch.setitem(sys.modules, "scipy.optimize", optimize)


class Detector(nn.Module):
    """Predicts classes and boxes of as many queries, and learns those that are matched to labels."""

    def __init__(self, queries: int, *, named: bool) -> None:
        super().__init__()
        self.queries, self.named = nn.Parameter(torch.randn(queries, WIDTH)), named
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)) for _ in range(3)
        )
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    @torch.no_grad()
    def match(self, scores: Tensor, boxes: Tensor, labels: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return which queries are to predict which labels."""
        cost = torch.cdist(boxes, labels["boxes"], p=1) - scores.softmax(-1)[:, labels["classes"]]
        match_by = linear_sum_assignment if self.named else sys.modules["scipy.optimize"].linear_sum_assignment
        rows, columns = match_by(cost.cpu())
        return torch.as_tensor(rows, dtype=torch.int64), torch.as_tensor(columns, dtype=torch.int64)

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        """(batch, width), what each is to be found to hold -> a loss."""
        hidden = x[:, None] + self.queries
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        losses = []
        for scores, boxes, one in zip(self.classes(hidden), self.boxes(hidden), labels, strict=True):
            rows, columns = self.match(scores, boxes, one)
            missed = F.cross_entropy(scores[rows], one["classes"][columns])
            losses.append(missed + F.l1_loss(boxes[rows], one["boxes"][columns]))
        return torch.stack(losses).mean()


def model(queries: int, objects: int, *, named: bool = True) -> ModelSource:
    """Return a detector of as many queries, and samples that hold as many objects."""

    def inputs(module: nn.Module, batch: int) -> Inputs:
        device = next(module.parameters()).device
        one = {"classes": torch.randint(CLASSES, (objects,)), "boxes": torch.rand(objects, 4)}
        labels = [{name: value.to(device) for name, value in one.items()} for _ in range(batch)]
        return (torch.randn(batch, WIDTH, device=device), labels), {}

    return ModelSource(f"detector {queries} {objects}", lambda: Detector(queries, named=named), inputs, 1)


@cache
def graph_of(queries: int, objects: int) -> ModelGraph:
    return trace_model(model(queries, objects))


@pytest.mark.parametrize(
    ("queries", "objects", "strategy", "every", "with_data"),
    [(6, 3, "shard", 0, True), (6, 3, "replicate", 2, False), (3, 5, "shard_grad", 1, True)],
)
def test_a_step_that_matches_holds_what_is_predicted(
    queries: int, objects: int, strategy: str, every: int, with_data: bool
) -> None:
    graph, machine = graph_of(queries, objects), cluster(2, 2)
    again = [block.name for block in graph.blocks[::every]] if every else []
    plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, again, micro_batch=4)
    assert -0.01 <= compare(plan, model(queries, objects), graph, machine, with_data=with_data).error <= 0.03


def test_it_is_noted_what_is_assumed_wherever_the_function_was_taken_from() -> None:
    graphs = [trace_model(model(6, 3, named=named)) for named in (True, False)]
    for graph in graphs:
        assert any("match labels in order" in note for note in graph.notes)
    assert graphs[0].calls == graphs[1].calls


def test_costs_that_are_known_are_matched_as_they_are() -> None:
    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8 * number) for number in (1, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            cost = torch.tensor([[9.0, 9.0, 1.0], [9.0, 1.0, 9.0]])
            first, second = linear_sum_assignment(cost)[1]
            total: Tensor = self.layers[first](x).sum() + self.layers[second](x).sum()
            return total

    graph = trace_model(ModelSource("known", Known, lambda module, batch: ((torch.zeros(batch, 8),), {}), 1))
    assert [graph.operators[one.operator].name for one in graph.calls] == ["layers.2", "layers.1"]
    assert not any("match labels" in note for note in graph.notes)
    assert linear_sum_assignment is cheapest
