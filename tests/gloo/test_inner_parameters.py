"""Modules that compute with parameters of layers deep inside other units: trained as in one process, never apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import torch
from drawn_trees import Tree
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import STRATEGIES, Toy, graph_of, plan_of, seeded, train_on

from profiler.model_graph import ModelGraph

KINDS = ("embedding", "weight", "scale", "view", "several", "norms", "checkpoint")
"""What the model itself reads: whole parameters of a layer, of a block or in a block, or what a module makes of one; or
those of its head in its first forward alone, but its backbone runs all blocks again in the backward."""


class Block(nn.Module):
    """Owns a scale of its own around layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 10), nn.Linear(10, 6), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> the same."""
        y: Tensor = x + self.down(torch.tanh(self.up(x))) * self.scale
        return y


class Backbone(nn.Module):
    """Owns positions, beside an embedding and blocks, and hands on a part of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(7, 6), nn.Parameter(torch.rand(5, 6))
        self.blocks, self.runs_again = nn.Sequential(*(Block() for _ in range(3))), False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 5, 6) -> the same, and a row of the embedding for all."""
        x = x + self.positions + self.table(torch.arange(5))
        x = checkpoint(self.blocks, x, use_reentrant=False) if self.runs_again else self.blocks(x)
        return x, self.table.weight[2].expand(len(x), 5, 6)


class Reading(Toy):
    """Reads what is inside of its backbone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.backbone, self.head = kind, Backbone(), nn.Linear(6, 6)
        self.backbone.runs_again = kind == "checkpoint"
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        y, row = self.backbone(x)
        y, block, table = self.head(y), self.backbone.blocks[1], self.backbone.table.weight
        if self.kind == "embedding":
            y = y @ table.T
        elif self.kind == "weight":
            y = y @ block.up.weight.T
        elif self.kind == "scale":
            y = y * block.scale
        elif self.kind == "view":
            y = y + row
        elif self.kind == "several":
            y = (y * block.scale) @ table.T @ table + row
        elif self.kind == "checkpoint":
            self.kept = self.head.weight.detach().sum(0) if self.kept is None else self.kept
            y = y * self.kept
        elif self.kind == "norms":
            y = y + 0.1 * sum(one.pow(2).mean() for one in self.backbone.blocks.parameters())
        return torch.sin(y).pow(2).mean()


def models() -> dict[str, Callable[[], nn.Module]]:
    """Return what makes each model."""
    trees = {f"tree {number}": partial(Tree, number) for number in range(60 if THOROUGH else 4)}
    return {**{kind: partial(Reading, kind) for kind in KINDS}, **trees}


def plans(name: str, graph: ModelGraph) -> list[tuple[str, dict[str, str], tuple[str, ...]]]:
    """Return strategies, and of operators that have others, and which blocks are recomputed."""
    draw, blocks = Random(name), tuple(block.name for block in graph.blocks)
    found: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
    if name in KINDS:
        found = [(one, {}, ()) for one in (STRATEGIES if THOROUGH else ("shard", draw.choice(STRATEGIES)))]
    for again in ((), blocks[1:], *((blocks,) * 8))[: 10 if THOROUGH else 1 + (name not in KINDS)]:
        found.append((draw.choice(STRATEGIES), {one.name: draw.choice(STRATEGIES) for one in graph.operators}, again))
    return found


def train(rank: int) -> list[str]:
    """Return which models are trained otherwise than in one process, under which plan."""
    from osdp import OSDP

    wrong = []
    for name, make in models().items():
        graph, alone = graph_of(make()), seeded(make)
        train_on((0, 1), alone, alone)
        wanted = alone.state_dict()
        for default, choices, again in plans(name, graph):
            made = seeded(make)
            model = OSDP(made, plan_of(made, default, choices, recomputed=again, ranks=(1, 2), graph=graph))
            train_on((rank,), model, alone)
            found = model.full_state_dict()
            far = [key for key, one in found.items() if not torch.allclose(one, wanted[key], rtol=1e-4, atol=2e-6)]
            wrong += [f"{name} under {choices or default}: {', '.join(far)}"] if far else []
    return wrong


def test_what_is_read_inside_other_units_is_trained() -> None:
    """FSDP2 leaves out parameters inside of wrapped modules: under `shard` they trained on each rank apart once."""
    assert run_ranks(train, 2) == [[], []]
