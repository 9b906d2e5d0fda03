"""Memory of models that run some of their modules once more, or at all, in every n-th step only.

What FSDP2 prefetches in the other steps is another unit, which may be larger: a plan has to fit in both.
"""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import drawn_numbers
from torch import Tensor, nn

from planner.model.fsdp_units import units_of
from planner.model.stages import cut
from planner.strategies.notation import parse_strategy
from profiler.graph_file import graph_from_text, graph_to_text
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, LENGTH = 64, 4
KINDS = ("first block", "last block", "two blocks", "a layer", "head", "each block", "another head")


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same; runs two of its layers once more for `more`."""
        y = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y + self.down(torch.sigmoid(self.up(y))) if more else y


class Model(nn.Module):
    """Runs more in every `every`-th step, in all (1) or in none (0)."""

    def __init__(self, number: int, every: int) -> None:
        super().__init__()
        draw = Random(f"least {number}")
        self.kind, self.every, self.step = KINDS[number % len(KINDS)], every, 0
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, draw.choice([1, 8]) * WIDTH)
        self.other = nn.Linear(WIDTH, draw.choice([1, 8]) * WIDTH) if self.kind == "another head" else None
        self.blocks = nn.ModuleList(Block(draw.choice([1, 8]) * WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        more = self.every > 0 and self.step % self.every == 0
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x, more=more and self.kind == "a layer" and index == 1)
            x = block(x) if more and self.kind == "each block" else x
        again = {"first block": [0], "last block": [-1], "two blocks": [0, 1]}.get(self.kind, []) if more else []
        for number in again:
            x = self.blocks[number](x)
        loss: Tensor = self.head(x).pow(2).mean()
        if more and self.kind == "head":
            loss = loss + self.head(torch.tanh(x)).pow(2).mean()
        return loss + self.other(torch.tanh(x)).pow(2).mean() if more and self.other else loss


@cache
def traced(number: int, every: int) -> tuple[ModelSource, ModelGraph]:
    inputs = lambda _, batch: ((torch.randn(batch, LENGTH, WIDTH),), {})  # noqa: E731
    source = ModelSource(str(number), lambda: Model(number, every), inputs, LENGTH)
    return source, trace_model(source)


def order(graph: ModelGraph) -> list[tuple[str, str]]:
    """Return the operator and the block of each call."""
    blocks = [*(block.name for block in graph.blocks), ""]
    return [
        (graph.operators[call.operator].name, blocks[-1 if call.block is None else call.block]) for call in graph.calls
    ]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_what_the_least_step_leaves_out_is_known(number: int) -> None:
    graph, least, none = traced(number, 2)[1], traced(number, 0)[1], traced(number, 1)[1]
    found = cut(graph, leaves_out=True).graph
    assert order(graph) == order(none)
    assert order(found) == order(least)
    assert [(one.first_call, one.last_call) for one in found.blocks] == [
        (one.first_call, one.last_call) for one in least.blocks
    ]
    assert not any(call.occasional for call in (*least.calls, *none.calls))
    assert graph_from_text(graph_to_text(graph)) == graph


@pytest.mark.parametrize("number", drawn_numbers(5, 4))
def test_both_steps_fit(number: int) -> None:
    """What a shorter step prefetches was not counted: up to 8 % too low."""
    source, graph = traced(number, 2)
    draw, machine = Random(f"plans {number}"), cluster(2, 2)
    strategies = draw.choice([["shard"], ["shard", "group_shard:2"], ["shard", "shard_grad", "owner"]])
    choices = {one.name: draw.choice(strategies) for one in graph.operators}
    again = [name for name in dict.fromkeys(block.name for block in graph.blocks) if draw.random() < 0.7]
    plan = plan_of(graph, machine, choices, again, micro_batch=draw.choice([1, 2]), accumulation=3)
    assert -0.003 <= compare(plan, source, graph, machine).error <= 0.05, (choices, again)


class Beside(Model):
    """Runs a large layer on next to nothing after the first one, or before the head, in every second step."""

    def __init__(self, place: str) -> None:
        super().__init__(0, 2)
        self.place, self.extra, self.head = place, nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> a loss."""
        self.step += 1
        more = self.step % self.every == 0
        x = self.embed(x)
        if more and self.place == "after the first":
            x = x + self.extra(x[:1, :1]).mean()
        for block in self.blocks:
            x = block(x)
        loss = self.extra(torch.sin(x[:1, :1])).mean() if more and self.place == "before the head" else 0
        found: Tensor = loss + self.head(x).pow(2).mean()
        return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", ["after the first", "before the head"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_some_steps_leave_out_is_wrapped_apart(place: str, recompute: bool, accumulation: int) -> None:
    """FSDP2 does not shard what is wrapped with it where it does not run: up to 18 % too low."""
    machine = cluster(2, 2)
    inputs = lambda _, batch: ((torch.randn(batch, LENGTH, WIDTH),), {})  # noqa: E731
    source = ModelSource("beside", lambda: Beside(place), inputs, LENGTH)
    graph = trace_model(source)
    again = [block.name for block in graph.blocks] if recompute else []
    choices = {one.name: "shard" for one in graph.operators}
    sizes = {"micro_batch": 96, "accumulation": accumulation}
    plan = plan_of(graph, machine, choices, again, optimizer="sgd", **sizes)
    assert -0.003 <= compare(plan, source, graph, machine).error <= 0.05
    strategies = {number: (parse_strategy("shard", machine),) for number, _ in enumerate(graph.operators)}
    units = [one for one in units_of(cut(graph), strategies) if one.whole_block is None]
    together = {tuple(graph.operators[number].name for number in unit.operators) for unit in units}
    assert together == {("embed",), ("extra",), ("head",)}
