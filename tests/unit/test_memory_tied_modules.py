"""Memory of models in which several blocks run one module whose weight an embedding or a head has too.

Modules that share a weight are gathered as one of them runs and sharded when all have run, so it matters which of them
a block runs once more.
"""

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
ALONE = [*STRATEGIES, "owner", "replicate", "shard+offload", None, None]


class Block(nn.Module):
    """Two layers, and before, between or after them one that is registered last."""

    def __init__(self, shared: nn.Module, place: str) -> None:
        super().__init__()
        self.norm, self.place = nn.LayerNorm(WIDTH), place
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 30, WIDTH) -> the same."""
        y = self.norm(x)
        y = self.shared(y) if self.place == "before" else y
        y = self.second(torch.relu(self.first(y)))
        if self.place == "last":
            shared: Tensor = self.shared(y)
            return shared
        return x + (self.shared(y) if self.place == "after" else y)


class Model(BlocksBetweenLayers):
    """Blocks of which those in `uses` run one module; an embedding, a head or both have its weight (`ties`)."""

    def __init__(self, blocks: int, uses: list[int], place: str, ties: str) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.embed = nn.Embedding(WIDTH, WIDTH) if "embed" in ties else nn.Linear(WIDTH, WIDTH)
        layers = [shared if number in uses else nn.Linear(WIDTH, WIDTH, bias=False) for number in range(blocks)]
        self.blocks = nn.ModuleList(Block(layer, place) for layer in layers)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if "embed" in ties:
            self.embed.weight = shared.weight
        if "head" in ties:
            self.head.weight = shared.weight


How = tuple[int, list[int], str, str]


def drawn(number: int) -> How:
    """Return how a model is made."""
    draw = Random(f"tied modules {number}")
    blocks = draw.choice([2, 3, 4])
    uses = sorted(draw.sample(range(blocks), draw.choice([2, min(3, blocks)])))
    place, ties = draw.choice(["before", "after", "last"]), draw.choice(["embed", "embed", "head", "embed and head"])
    return blocks, uses, place, ties


def source_of(*how: object) -> ModelSource:
    def inputs(model: Model, batch: int) -> tuple[tuple[Tensor], dict[str, object]]:
        is_table = isinstance(model.embed, nn.Embedding)
        return (torch.randint(0, WIDTH, (batch, 30)) if is_table else torch.randn(batch, 30, WIDTH),), {}

    return ModelSource("tied modules", lambda: Model(*how), inputs, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", drawn_numbers(0, 2, 200))
def test_a_module_of_several_blocks_that_an_embedding_or_a_head_shares_is_predicted(number: int) -> None:
    """What runs after all have run gathers them once more, and they stay so to the backward: up to 4.8 % too low."""
    source, machine, draw = source_of(*drawn(number)), cluster(2, 2), Random(number)
    graph = trace_model(source)
    again = [block.name for block in graph.blocks if draw.random() < 0.5]
    alone = draw.choice(ALONE)
    choices = {one.name: alone or draw.choice(STRATEGIES) for one in graph.operators}
    micro_batch, accumulation = draw.choice([1, 2, 4]), draw.choice([1, 2])
    plan = plan_of(graph, machine, choices, again, micro_batch=micro_batch, accumulation=accumulation)
    assert -0.003 <= compare(plan, source, graph, machine).error <= 0.1


@pytest.mark.parametrize(
    ("model", "choices", "again", "micro_batch"),
    [
        ((3, [0, 1], "before", "embed"), {}, [1], 4),
        ((2, [0, 1], "last", "embed"), {"": "shard_grad", "embed": "secondary_shard:2", "head": "hierarchical"}, [], 4),
        ((3, [0, 1, 2], "last", "embed and head"), {"": "owner"}, [0], 4),
        ((4, [0, 1, 2], "before", "head"), {"": "hierarchical"}, [1, 3], 1),
    ],
    ids=["stays", "from the loss on", "owner", "order of parameters"],
)
def test_what_such_a_module_takes_is_counted_where_it_is(
    model: How, choices: dict[str, str], again: list[int], micro_batch: int
) -> None:
    """In the last case, that of the gradient that FSDP2 holds as it reduces a block: the last registered, not run."""
    source, machine = source_of(*model), cluster(2, 2)
    graph = trace_model(source)
    found = {one.name: choices.get(one.name) or choices.get("", "shard") for one in graph.operators}
    blocks = [f"blocks.{number}" for number in again]
    plan = plan_of(graph, machine, found, blocks, micro_batch=micro_batch, accumulation=2)
    assert -0.001 <= compare(plan, source, graph, machine).error <= 0.01
