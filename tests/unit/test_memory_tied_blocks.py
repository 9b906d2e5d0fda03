"""Memory of models whose blocks share weights of layers with each other, where blocks are recomputed."""

from __future__ import annotations

from random import Random

import pytest
import torch
from rehearsals import compare, plan_of
from stacks import BlocksBetweenLayers
from synthetic import cluster
from thoroughness import drawn_numbers
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH = 128
STRATEGIES = ["shard", "shard_grad", "group_shard:2", "secondary_shard:2", "hierarchical"]
ALONE = [*STRATEGIES, "owner", "replicate", "shard+offload"]


class Block(nn.Module):
    """Linear layers; what follows the last of them (`end`) is a sum, another function, a view or nothing."""

    def __init__(self, wide: int, count: int, end: str) -> None:
        super().__init__()
        self.end, self.norm = end, nn.LayerNorm(WIDTH)
        sizes = [(WIDTH, wide) if number % 2 == 0 else (wide, WIDTH) for number in range(count)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 30, WIDTH) -> the same."""
        y: Tensor = self.norm(x)
        for number, layer in enumerate(self.layers):
            y = layer(y) if number % 2 else torch.relu(layer(y))
        return {"sum": x + y if self.end == "sum" else y, "tanh": torch.tanh(y), "view": y.view_as(y)}.get(self.end, y)


class Tied(BlocksBetweenLayers):
    """Blocks of which some layers have the weight of the same layer in others, its bias too, or are the same module."""

    def __init__(self, wide: int, count: int, end: str, blocks: int, ties: list[tuple[int, list[int], str]]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(wide, count, end) for _ in range(blocks))
        for layer, (first, *others), what in ties:
            layers = [self.blocks[number].layers for number in (first, *others)]
            for one in layers[1:]:
                if what == "module":
                    one[layer] = layers[0][layer]
                else:
                    one[layer].weight = layers[0][layer].weight
                    one[layer].bias = layers[0][layer].bias if what == "both" else one[layer].bias


def drawn(number: int) -> tuple[int, int, str, int, list[tuple[int, list[int], str]]]:
    """Return how a model is made."""
    draw = Random(f"tied {number}")
    blocks, count = draw.choice([2, 3, 4]), draw.choice([2, 4])
    ties = [
        (
            draw.randrange(count),
            sorted(draw.sample(range(blocks), draw.choice([2, min(3, blocks)]))),
            draw.choice(["weight", "weight", "both", "module"]),
        )
        for _ in range(draw.choice([1, 2, 3]))
    ]
    return draw.choice([128, 256, 512]), count, draw.choice(["sum", "tanh", "view", ""]), blocks, ties


def source_of(*how: object) -> ModelSource:
    return ModelSource("tied", lambda: Tied(*how), lambda _, batch: ((torch.randn(batch, 30, WIDTH),), {}), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", drawn_numbers(0, 2, 200))
def test_what_tied_layers_of_recomputed_blocks_take_is_predicted(number: int) -> None:
    """The buffer of their gather was there from the first block that ran again to the end: up to 15 % too low."""
    source, machine, draw = source_of(*drawn(number)), cluster(2, 2), Random(number)
    graph = trace_model(source)
    names = [block.name for block in graph.blocks]
    again = [name for name in names if draw.random() < 0.6] or names
    selective = [name for name in again if draw.random() < 0.2]
    alone = draw.choice([*ALONE, None])
    choices = {one.name: alone or draw.choice(STRATEGIES) for one in graph.operators}
    once = [name for name in again if name not in selective]
    micro_batch, accumulation = draw.choice([1, 2, 4]), draw.choice([1, 2])
    plan = plan_of(graph, machine, choices, once, selective, micro_batch=micro_batch, accumulation=accumulation)
    assert -0.003 <= compare(plan, source, graph, machine).error <= 0.1


MIXED = {"norm": "shard", "layers.0": "shard", "layers.1": "hierarchical", "layers.2": "shard"}


@pytest.mark.parametrize(
    ("model", "choices", "again"),
    [
        ((256, 2, "sum", 3, [(0, [0, 1, 2], "weight")]), {}, [0, 1, 2]),
        ((128, 4, "sum", 3, [(0, [1, 2], "weight")]), {"": "hierarchical"}, [2]),
        ((128, 4, "", 3, [(3, [1, 2], "weight")]), {}, [0]),
        ((512, 4, "sum", 3, [(0, [0, 2], "weight")]), MIXED | {"layers.3": "group_shard:2"}, [0, 2]),
    ],
    ids=["buffer", "order", "one output", "units"],
)
def test_every_gather_of_tied_layers_is_counted_where_it_is(
    model: tuple[object, ...], choices: dict[str, str], again: list[int]
) -> None:
    """Of blocks that are one unit, and of several: 2.4 to 7.3 % too low once."""
    source, machine = source_of(*model), cluster(2, 2)
    graph = trace_model(source)
    found = {one.name: choices.get("", "shard") for one in graph.operators}
    for end, choice in choices.items():
        found |= {name: choice for name in found if name.endswith(end)}
    plan = plan_of(graph, machine, found, [f"blocks.{number}" for number in again], micro_batch=1)
    assert -0.001 <= compare(plan, source, graph, machine).error <= 0.01
