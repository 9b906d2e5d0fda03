"""Memory where a model's forward holds what its blocks hand out beside their outputs, in objects of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, HEADS, LENGTH, CLASSES = 32, 4, 48, 256


@dataclass
class Maps:
    """What an attention hands out to be looked at: no container that torch knows."""

    scores: Tensor
    weights: Tensor


class Attention(nn.Module):
    """Hands out its maps; of the second a copy, but for one sample, whose transpose is contiguous as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Maps]:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).tanh()
        weights = scores.softmax(-1)
        out = self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + out, Maps(scores, weights.transpose(0, 1).contiguous())


class Looked(nn.Module):
    """Holds the maps of all blocks until its forward is over, and returns a loss without them.

    As it compares all samples, all micro-batches are traced with blocks that run again, a single sample too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, maps = self.embed(x), []
        for block in self.blocks:
            x, found = block(x)
            maps.append(found)
        pairs = x.mean(1) @ x.mean(1).T
        return pairs.mean() + self.head(x).mean()


SOURCE = ModelSource("looked", Looked, lambda _, batch: ((torch.randn(batch, LENGTH, WIDTH),), {}), LENGTH)


@cache
def graph() -> ModelGraph:
    return trace_model(SOURCE)


def test_maps_are_on_no_line_in_the_micro_batch() -> None:
    """Those that are saved and held are the scores, and of one sample the weights too."""
    held = [call.recomputed.held_bytes for call in graph().calls if call.recomputed is not None]
    map_bytes = 4 * HEADS * LENGTH**2
    assert min(one(1) for one in held) == -2 * map_bytes
    assert min(one(2) for one in held) == -2 * map_bytes


@pytest.mark.parametrize(
    ("strategy", "recomputed", "micro_batch"),
    some(
        [
            *product(
                ["shard", "replicate", "secondary_shard:2"],
                [("blocks.0",), ("blocks.0", "blocks.1", "blocks.2")],
                [1, 2, 3],
            )
        ],
        2,
    ),
)
def test_maps_are_held_by_the_forward(strategy: str, recomputed: tuple[str, ...], micro_batch: int) -> None:
    """Most is held as the output layer ends, when a secondary shard is copied out of its parameters."""
    machine = cluster(2, 2)
    choices = {one.name: strategy for one in graph().operators}
    found = compare(plan_of(graph(), machine, choices, recomputed, micro_batch=micro_batch), SOURCE, graph(), machine)
    assert found.error >= -0.002
    if micro_batch > 1:
        assert found.error <= 0.01
