"""Memory where layers run several times, and no backward comes to some of those runs, as they are under `no_grad`.

So do models that refine what they made in cycles, of which the last alone is learned from, and those that compare what
they make with what the same layers make of a target.
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
from torch.utils.checkpoint import checkpoint

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH = 48
ORDERS = {"learned last": "..x", "learned first": "x.", "between": "x.x", "all": "xx", "in turn": ".x.x"}
"""In which cycles there are gradients."""


class Around(nn.Module):
    """A block with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.up(self.scale * x)))
        return made


def plain() -> nn.Module:
    """Return a block of layers in a row."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))


class Refining(nn.Module):
    """Encodes, runs the same blocks in cycles, and decodes."""

    def __init__(self, order: str, kind: str) -> None:
        super().__init__()
        self.order, self.kind = order, kind
        self.before = nn.ModuleList([nn.Linear(WIDTH, WIDTH), plain()])
        self.cycled = nn.ModuleList(Around() if kind == "around" else plain() for _ in range(2))
        self.after = nn.ModuleList([plain(), nn.Linear(WIDTH, WIDTH)])

    def cycle(self, x: Tensor) -> Tensor:
        """Run the blocks that are shared by the cycles."""
        for block in self.cycled:
            x = x + (checkpoint(block, x, use_reentrant=True) if self.kind == "reentrant" else block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        for block in self.before:
            x = block(x)
        made = x
        for step in self.order:
            with torch.set_grad_enabled(step == "x"):
                seen = self.cycle(made)
            made = seen if step == "x" else made + seen
        for block in self.after:
            made = block(made)
        return made.pow(2).mean()


@cache
def traced(order: str, kind: str) -> tuple[ModelSource, ModelGraph]:
    inputs = lambda _, batch: ((torch.randn(batch, 16, WIDTH),), {})  # noqa: E731
    source = ModelSource(f"{order} {kind}", lambda: Refining(ORDERS[order], kind), inputs, 1)
    return source, trace_model(source)


KINDS, STRATEGIES = ("plain", "around", "reentrant"), ("shard", "shard_grad", "owner", "group_shard:2")
CASES = [*product(ORDERS, KINDS, STRATEGIES, (False, True))]


@pytest.mark.parametrize(("order", "kind", "strategy", "recomputed"), some(CASES, 29))
def test_what_has_no_backward_waits_for_nothing(order: str, kind: str, strategy: str, recomputed: bool) -> None:
    """Their parameters were predicted to stay unsharded, and their gradients to wait: up to 74 % too high."""
    (source, graph), machine = traced(order, kind), cluster(2, 2)
    choices = {one.name: strategy for one in graph.operators}
    again, accumulation = ([block.name for block in graph.blocks], 1) if recomputed else ([], 2)
    plan = plan_of(graph, machine, choices, again, micro_batch=4, accumulation=accumulation)
    assert -0.004 <= compare(plan, source, graph, machine).error <= 0.03


class Peaking(nn.Module):
    """A layer that has run under `no_grad` before, after one whose forward makes large temporaries."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.norm, self.first, self.shared = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16, WIDTH) -> the same."""
        x = x + self.first(self.norm(x))
        with torch.no_grad():
            noise = (x.unsqueeze(-1) * torch.zeros(512)).sum(-1)
        made: Tensor = x + torch.tanh(self.shared(x + noise))
        return made


class Targets(nn.Module):
    """Adds what a wide layer made of the input, without a gradient, and runs that layer once more."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH))
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), wide
        self.blocks = nn.ModuleList([plain(), Peaking(wide)])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16, WIDTH) -> a loss."""
        with torch.no_grad():
            target = self.shared(x)
        x = self.first(x) + target
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("strategy", ["secondary_shard:2", "shard_grad", "shard"])
def test_what_a_run_without_backward_keeps_is_there_in_forward(strategy: str) -> None:
    """The copy of an earlier run, in the forward of the stage in which the layer runs again."""
    inputs = lambda _, batch: ((torch.randn(batch, 16, WIDTH),), {})  # noqa: E731
    source = ModelSource("targets", Targets, inputs, 1)
    graph, machine = trace_model(source), cluster(2, 2)
    plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, micro_batch=1)
    found = compare(plan, source, graph, machine)
    assert found.tracked_phase == "forward"
    assert -0.002 <= found.error <= 0.02
