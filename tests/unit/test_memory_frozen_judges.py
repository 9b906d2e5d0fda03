"""Memory of frozen networks of which no backward comes, before, between and after what is trained, in a dry run.

So are teachers whose output is a target, and judges of what was made: what they keep unsharded, nothing shards before
all backward is over.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from random import Random

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, LENGTH = 64, 4
ORDERS = {"after": "tj", "before": "jt", "between": "tjt", "twice": "tjtj", "before and after": "jttj", "alone": "tjj"}
"""In which order what is trained (t) and what is frozen (j) run."""
NO_BACKWARD = ("no_grad", "handed what is detached", "detached itself")


def part(hidden: int) -> nn.Module:
    """Return a block of layers in a row."""
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH)
    return nn.Sequential(*layers)


class Judged(nn.Module):
    """Trains towards what a frozen network makes of what it makes itself."""

    def __init__(self, order: str, why: str) -> None:
        super().__init__()
        draw = Random(f"{order} {why}")
        self.order, self.why = order, why
        self.before, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        hidden = draw.choice((256, 1024))
        self.trained = nn.ModuleList(part(hidden) for _ in range(2))
        if draw.random() < 0.5:
            hidden = draw.choice((512, 1024))
        self.judge = nn.ModuleList(part(hidden) for _ in range(2)).requires_grad_(False)
        if draw.random() < 0.3:
            self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), self.judge[0]).requires_grad_(False)

    def judged(self, x: Tensor) -> Tensor:
        """Run what is frozen."""
        x = x.detach() if self.why == NO_BACKWARD[1] else x
        with torch.set_grad_enabled(self.why != "no_grad"):
            for block in self.judge:
                x = block(x)
        return x.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> a loss."""
        x = self.before(x)
        loss = x.new_zeros(())
        for each in self.order:
            if each == "j":
                loss = loss + (x - self.judged(x)).square().mean()
            else:
                for block in self.trained:
                    x = x + block(x)
        return loss + self.head(x).square().mean()


@cache
def traced(order: str, why: str) -> tuple[ModelSource, ModelGraph]:
    inputs = lambda _, batch: ((torch.randn(batch, LENGTH, WIDTH),), {})  # noqa: E731
    source = ModelSource(f"{order}, {why}", lambda: Judged(ORDERS[order], why), inputs, 1)
    return source, trace_model(source)


KEPT, SHARDED = ("shard_grad", "secondary_shard:2"), ("shard", "owner", "group_shard:2")
CASES = [
    *product(ORDERS, NO_BACKWARD[:2], KEPT, (False, True), (False, True)),
    *product(ORDERS, NO_BACKWARD[2:], KEPT[:1], (False, True), (False, True)),
    *product(ORDERS, NO_BACKWARD[:2], SHARDED, (False, True), (False, True)),
    *product(("before", "after", "between"), NO_BACKWARD[2:], ("shard", "group_shard:2"), (False, True), (False, True)),
]
"""Orders, why no backward comes, the frozen network's strategy, whether that is all others' too, and recomputation."""
BOUNDS = {"secondary_shard:2": (-0.01, 0.1), "owner": (-0.003, 0.06)}
"""Where wider: as forward ends, a copy of a part is counted beside the parts; and a layer's parameters at its call, to
which no backward comes, where something after it runs back."""


@pytest.mark.parametrize(("order", "why", "strategy", "is_all", "recomputes"), some(CASES, 29), ids=str)
def test_what_it_keeps_unsharded_is_there_through_all_backward(
    order: str, why: str, strategy: str, is_all: bool, recomputes: bool
) -> None:
    """Of stages below, it was not counted: up to 27 % too low.  Recomputed, it was counted to run again."""
    (source, graph), machine = traced(order, why), cluster(2, 2)
    draw = Random(f"{order} {why} {strategy} {is_all} {recomputes}")
    choices = {one.name: strategy if is_all or one.name.startswith("judge") else "shard" for one in graph.operators}
    again = [block.name for block in graph.blocks] if recomputes else []
    numbers = {"micro_batch": draw.choice((8, 16)), "accumulation": draw.choice((1, 2))}
    found = compare(plan_of(graph, machine, choices, again, **numbers), source, graph, machine)
    lowest, highest = BOUNDS.get(strategy, (-0.003, 0.03))
    assert lowest <= found.error <= highest
