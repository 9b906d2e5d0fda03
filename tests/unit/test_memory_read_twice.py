"""Memory where code after a unit reads what it returns several times: gradients are added before the unit runs back."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import drawn_numbers
from torch import Tensor, nn

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, LENGTH = 64, 16
READS = {
    "tanh": torch.tanh,
    "sine": torch.sin,
    "softmax": lambda x: x.softmax(-1),
    "itself": lambda x: x,
    "half": lambda x: x * 0.5,
}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same."""
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """A head reads what blocks return, drawn ones of them, in drawn ways and in a drawn order."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = Random(f"read twice {number}")
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        self.blocks = nn.ModuleList(Block(draw.choice([1, 2, 4]) * WIDTH) for _ in range(draw.choice([2, 3])))
        self.reads = [draw.sample(sorted(READS), draw.choice([0, 2])) for _ in self.blocks]
        self.reads[-1] = draw.sample(sorted(READS), 2)
        self.by_head = {name for name in sorted(READS) if draw.random() < 0.7}

    def forward(self, x: Tensor) -> Tensor:
        x, losses = self.embed(x), []
        for block, names in zip(self.blocks, self.reads, strict=True):
            x = block(x)
            for name in names:
                read = READS[name](x)
                losses.append((self.head(read) if name in self.by_head else read).pow(2).mean())
        return torch.stack([*losses, self.head(x).abs().mean()]).sum()


@cache
def traced(number: int) -> tuple[ModelSource, ModelGraph]:
    inputs = lambda _, batch: ((torch.randn(batch, LENGTH, WIDTH),), {})  # noqa: E731
    source = ModelSource(str(number), lambda: Model(number), inputs, LENGTH)
    return source, trace_model(source)


@pytest.mark.parametrize("number", drawn_numbers(0, 6))
def test_gradients_that_were_added_before_are_there_as_it_is_reduced(number: int) -> None:
    """Sums of the gradients of what it returns were taken for sums of what it returns itself: up to 4 % too low."""
    (source, graph), machine, draw = traced(number), cluster(2, 2), Random(f"plan {number}")
    taken = draw.choice([["owner"], ["owner"], ["owner", "shard"], ["shard", "shard_grad"]])
    choices = {one.name: draw.choice(taken) for one in graph.operators}
    again = [block.name for block in graph.blocks if draw.random() < 0.2]
    plan = plan_of(graph, machine, choices, again, micro_batch=8, accumulation=draw.choice([1, 2]), optimizer="sgd")
    assert -0.002 <= compare(plan, source, graph, machine).error <= 0.05
