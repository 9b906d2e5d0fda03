"""Memory of recomputed blocks that write into their buffers, however they do that."""

from __future__ import annotations

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from torch.nn.functional import normalize

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, ENTRIES, LAYERS = 32, 128, 3
WAYS = ("copy_", "data.copy_", "data.lerp_", "data[]", "detach().mul_", "data =", "=", "flatten().data", "not at all")


class Block(nn.Module):
    """A residual branch, and averages of what it has seen, as codebooks and banks of keys have them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), way
        self.register_buffer("bank", torch.randn(ENTRIES, WIDTH))
        self.bank: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 20, WIDTH) -> the same."""
        y: Tensor = self.down(torch.relu(self.up(x)))
        with torch.no_grad():
            new = normalize(self.bank + y.mean((0, 1)), dim=-1)
            if self.way == "copy_":
                self.bank.copy_(new)
            elif self.way == "data.copy_":
                self.bank.data.copy_(new)
            elif self.way == "data.lerp_":
                self.bank.data.lerp_(new, 0.1)
            elif self.way == "data[]":
                self.bank.data[:8] = new[:8]
            elif self.way == "detach().mul_":
                self.bank.detach().mul_(0.9).add_(new)
            elif self.way == "data =":
                self.bank.data = new
            elif self.way == "=":
                self.bank = new
            elif self.way == "flatten().data":
                self.bank.flatten().data.add_(1)
        return x + y


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block(way) for _ in range(LAYERS))), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).pow(2).mean()


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("strategies", [("owner",), ("shard", "replicate")])
def test_copies_are_there_as_a_block_of_several_units_runs_again(way: str, strategies: tuple[str, ...]) -> None:
    """Those that take the places of buffers meanwhile were not counted: up to 5 % too low."""
    own = ModelSource(way, lambda: Model(way), lambda _, batch: ((torch.randn(batch, 20, WIDTH),), {}), 1)
    graph, machine = trace_model(own), cluster(1, 2)
    choices = {one.name: strategies[number % len(strategies)] for number, one in enumerate(graph.operators)}
    for again in ([0], [1, 2]):
        blocks = [graph.blocks[number].name for number in again]
        plan = plan_of(graph, machine, choices, blocks, micro_batch=1, optimizer="sgd")
        assert -0.003 <= compare(plan, own, graph, machine).error <= 0.08, again


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_written_buffers_are_counted(way: str) -> None:
    """Those that are written by way of `.data` were not: up to 19 % too low for vector-quantize-pytorch.

    What is another tensor after each step was counted twice, 5 % too high.
    """
    own = ModelSource(way, lambda: Model(way), lambda _, batch: ((torch.randn(batch, 20, WIDTH),), {}), 1)
    graph, machine = trace_model(own), cluster(1, 2)
    blocks = [block.name for block in graph.blocks]
    cases = [("shard", blocks, 1), ("replicate", blocks[:2], 2), ("shard_grad", blocks[1:], 2), ("shard", [], 1)]
    for strategy, again, accumulation in some(cases, 2, WAYS.index(way)):
        choices = {operator.name: strategy for operator in graph.operators}
        plan = plan_of(graph, machine, choices, again, accumulation=accumulation)
        assert -0.003 <= compare(plan, own, graph, machine).error <= 0.02, (strategy, again)
