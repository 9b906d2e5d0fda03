"""Memory where no backward comes to the first part of a model: what it makes is codes, or it is frozen.

Nothing of such a part is gathered or runs again in backward, while what comes after it has left gradients.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, CODES = 64, 32


def layers(*, normed: bool = False, wide: int = 4) -> nn.Module:
    """Return a block of layers in a row."""
    up, down = nn.Linear(WIDTH, wide * WIDTH), nn.Linear(wide * WIDTH, WIDTH)
    return nn.Sequential(weight_norm(up) if normed else up, nn.Tanh(), weight_norm(down) if normed else down)


class Coded(nn.Module):
    """Encodes, and learns from codes or from features of a frozen encoder."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = nn.Sequential(*(layers(normed="normed" in kind, wide=8) for _ in range(2)))
        if "frozen" in kind:
            self.encoder.requires_grad_(requires_grad=False)
        self.table, self.decoder = nn.Embedding(CODES, WIDTH), nn.Sequential(*(layers() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.encoder(x)
        if "frozen" not in self.kind:
            seen = self.table(seen[..., :CODES].argmax(-1))
        made: Tensor = self.decoder(seen)
        return made.pow(2).mean()


@cache
def traced(kind: str) -> tuple[ModelSource, ModelGraph]:
    inputs = lambda _, batch: ((torch.randn(batch, 4, WIDTH),), {})  # noqa: E731
    source = ModelSource(kind, lambda: Coded(kind), inputs, 1)
    return source, trace_model(source)


CASES = [
    *product(("codes", "codes, normed", "frozen"), ("shard", "owner", "shard_grad", "group_shard:2"), (False, True))
]


@pytest.mark.parametrize(("kind", "strategy", "recomputed"), some(CASES, 7))
def test_nothing_of_it_is_gathered_in_backward(kind: str, strategy: str, recomputed: bool) -> None:
    """Its parameters were counted as gathered for a backward, and to run again: up to 55 % too high.

    Weights that parametrizations compute are held by the graph of what no backward comes to; where those blocks are
    recomputed, they are not, and still counted in the forward of what follows: an upper bound.
    """
    highest = 0.2 if recomputed and "normed" in kind else 0.02
    (source, graph), machine = traced(kind), cluster(2, 2)
    again = [block.name for block in graph.blocks if recomputed]
    choices = {one.name: strategy for one in graph.operators}
    for accumulation in (1, 2):
        plan = plan_of(graph, machine, choices, again, micro_batch=2, accumulation=accumulation)
        assert -0.004 <= compare(plan, source, graph, machine).error <= highest
