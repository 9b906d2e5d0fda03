"""Parameters of modules that are around others, used early, late or by those: predicted against steps that compute.

FSDP2 gathers them before the module's forward and shards them after it, whatever is read in between.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from trace_models import source

from profiler.trace.trace import trace_model

WIDTH = 128


class Block(nn.Module):
    """Two layers and a product with a matrix of the model, or of its own."""

    def __init__(self, *, has_own: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(32, WIDTH)) if has_own else None

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        matrix = matrix if self.bias is None else matrix + self.bias
        return x + torch.tanh(self.b(torch.tanh(self.a(x)))) @ matrix.t() @ matrix


class Stack(nn.Module):
    """Blocks and a matrix: of the model, of a module whose forward does not run, or of an embedding."""

    def __init__(self, place: str, use: str, *, has_own: bool) -> None:
        super().__init__()
        self.place, self.use = place, use
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(has_own=has_own) for _ in range(3))
        if place == "root":
            self.matrix = nn.Parameter(torch.randn(32, WIDTH))
        else:
            self.table = nn.Embedding(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix if self.place == "root" else self.table.weight
        given = torch.ones(32, WIDTH)
        if self.use == "early":
            given = matrix * 1
        elif self.use == "blocks":
            given = matrix
        x = self.first(x)
        for block in self.blocks:
            x = block(x, given)
        x = self.last(x)
        return (x @ matrix.t()).sum() if self.use == "late" else x.sum()


CASES = [
    *product(
        ["root", "table"],
        ["early", "late", "blocks"],
        [False, True],
        ["shard", "shard_grad", "replicate"],
        [False, True],
    )
]


@pytest.mark.parametrize(("place", "use", "has_own", "strategy", "recomputes"), some(CASES, 13))
def test_a_module_holds_its_own_parameters_from_its_begin_to_its_end(
    place: str, use: str, has_own: bool, strategy: str, recomputes: bool
) -> None:
    model = source(lambda: Stack(place, use, has_own=has_own), (WIDTH,))
    graph = trace_model(model)
    again = [block.name for block in graph.blocks] if recomputes else []
    choices = {one.name: strategy for one in graph.operators}
    plan = plan_of(graph, cluster(1, 4), choices, again, micro_batch=2)
    error = compare(plan, model, graph, cluster(1, 4), with_data=True).error
    assert -0.001 <= error <= 0.01
