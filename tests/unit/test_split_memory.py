"""Memory of linear layers in slices, with what the code around them holds meanwhile, against dry runs."""

from __future__ import annotations

from random import Random

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import draws
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, LENGTH = 32, 12
HOLDS = ("nothing", "its input in fp32", "what layers are handed in fp32", "all outputs")


class Model(nn.Module):
    """Layers of two products, up and down, and what holds more than they need."""

    def __init__(self, holds: str, layers: int, factor: int) -> None:
        super().__init__()
        self.holds = holds
        self.first = nn.Linear(2 * WIDTH, WIDTH)
        inner = factor * WIDTH
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, inner), nn.ReLU(), nn.Linear(inner, WIDTH)) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, 2 * WIDTH) -> a loss."""
        held = [x.float()] if self.holds == "its input in fp32" else []
        y = self.first(held[0] if held else x)
        for layer in self.layers:
            handed = y.float() if self.holds == "what layers are handed in fp32" else y
            y = y + layer(handed)
            if self.holds == "all outputs":
                held.append(y)
        return self.head(y).logsumexp(-1).mean()


@pytest.mark.parametrize("number", range(draws(4, 60)))
def test_slices_hold_what_is_predicted(number: int) -> None:
    draw, holds = Random(f"slices {number}"), HOLDS[number % len(HOLDS)]
    sizes = draw.randint(2, 4), draw.choice([2, 4])

    def inputs(module: nn.Module, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        return (torch.randn(batch, LENGTH, 2 * WIDTH),), {}

    source = ModelSource(holds, lambda: Model(holds, *sizes), inputs, LENGTH)
    graph = trace_model(source, draw.choice(["bf16", "bf16", "fp32"]))
    machine = cluster(*draw.choice([(1, 2), (1, 4), (2, 2)]))
    choices = {}
    for operator in graph.operators:
        slices = [draw.choice(["shard", "replicate", "shard_grad", "owner"]) for _ in range(draw.choice([1, 2, 2, 3]))]
        choices[operator.name] = slices[0] if len(slices) == 1 else f"split({', '.join(slices)})"
    again = [block.name for block in graph.blocks if draw.random() < 0.4]
    held = compare(
        plan_of(graph, machine, choices, again, micro_batch=draw.choice([4, 8]), optimizer="sgd"),
        source,
        graph,
        machine,
    )
    predicted, tracked = sum(held.predicted.values()), sum(held.tracked.values())
    assert 0.99 * tracked <= predicted <= 1.04 * tracked, (holds, choices, again)


class Wide(nn.Module):
    """A layer that is handed more features, in fp32, than it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, 2 * WIDTH) -> a loss."""
        return self.down(torch.cat([self.up(x).float()] * 16, -1)).logsumexp(-1).mean()


@pytest.mark.parametrize("count", [2, 3])
def test_slices_share_one_cast_of_their_input(count: int) -> None:
    """Each on its own would have gradients of its part in fp32, which are put together in fp32."""

    def inputs(module: nn.Module, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        return (torch.randn(batch, LENGTH, 2 * WIDTH),), {}

    source = ModelSource("wide", Wide, inputs, LENGTH)
    graph, machine = trace_model(source, "bf16"), cluster(1, 2)
    choices = {"up": "shard", "down": f"split({', '.join(['shard'] * count)})"}
    held = compare(plan_of(graph, machine, choices, micro_batch=8, optimizer="sgd"), source, graph, machine)
    predicted, tracked = sum(held.predicted.values()), sum(held.tracked.values())
    assert 0.99 * tracked <= predicted <= 1.01 * tracked
