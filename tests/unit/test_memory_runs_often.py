"""Memory where layers run several times: in a block whose layers have several strategies, and outside of blocks.

Layers of one strategy are wrapped together, and FSDP2 shards them again when each has run.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial
from random import Random

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import THOROUGH
from torch import Tensor, nn

from planner.analysis.explain import open_plan
from planner.model.fsdp_units import units_of
from planner.model.stages import cut
from planner.strategies.registry import known_strategies
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, LENGTH = 64, 32
STRATEGIES = ("shard", "shard_grad", "replicate", "secondary_shard:2", "owner", "group_shard:2")


class Repeats(nn.Module):
    """Runs three layers in some order, some of them more often than others."""

    def __init__(self, order: tuple[int, ...], *, adds: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order, self.adds = order, adds

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same."""
        y = x
        for layer in self.order:
            y = self.layers[layer](y).tanh()
        return x + y if self.adds else y


class Drawn(nn.Module):
    """Blocks of them, and a head that runs up to three times; `number` draws how many, and the order."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = Random(number)
        order = [0, 1, 2, *(draw.randrange(3) for _ in range(draw.choice((1, 2, 3))))]
        draw.shuffle(order)
        adds = draw.random() < 0.5
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Repeats(tuple(order), adds=adds) for _ in range(draw.choice((1, 2, 3))))
        self.heads = draw.choice((1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = torch.stack([self.head(x * k).tanh().mean() for k in range(1, self.heads + 1)]).sum()
        return loss


class Loose(nn.Module):
    """Layers outside of blocks, of which the last runs twice when all have run, and a loss of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        third = self.third(second) + self.third(first)
        loss: Tensor = third.sum() + (second.exp().tanh() + first.softmax(-1).log()).mean()
        return loss


def inputs(_: object, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    return (torch.randn(batch, LENGTH, WIDTH),), {}


@cache
def traced(number: int | None) -> tuple[ModelSource, ModelGraph]:
    source = ModelSource(str(number), Loose if number is None else partial(Drawn, number), inputs, LENGTH)
    return source, trace_model(source)


@pytest.mark.parametrize("number", range(12) if THOROUGH else (3, 10))
def test_layers_that_run_often(number: int) -> None:
    """Where gradients are all-reduced too, those of a layer that ran twice are reduced once."""
    (source, graph), machine, draw = traced(number), cluster(2, 2), Random(number)
    for _ in range(3 if THOROUGH else 2):
        among = [draw.choice(STRATEGIES) for _ in range(draw.choice((1, 2, 3)))]
        choices = {one.name: draw.choice(among) for one in graph.operators}
        again = [block.name for block in graph.blocks if draw.random() < 0.6]
        plan = plan_of(graph, machine, choices, again, micro_batch=4, accumulation=draw.choice((1, 2, 2)))
        found = compare(plan, source, graph, machine, with_data=False)
        assert -0.002 <= found.error <= 0.1, (choices, again, plan.accumulation)


@pytest.mark.parametrize("strategy", ["shard", "group_shard:2", "secondary_shard:2", "replicate"])
def test_layers_outside_of_blocks(strategy: str) -> None:
    """What runs once more is no unit with the others: it would stay gathered until the forward is over."""
    (source, graph), machine = traced(None), cluster(2, 2)
    plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, micro_batch=4)
    assert -0.002 <= compare(plan, source, graph, machine, with_data=False).error <= 0.05


@pytest.mark.parametrize(
    ("order", "together"),
    [((0, 1, 2), True), ((0, 0, 1, 2), True), ((2, 0, 1, 0, 1), True), ((0, 1, 0, 2), False), ((2, 0, 1, 1), False)],
)
def test_what_is_wrapped_together(order: tuple[int, ...], together: bool) -> None:
    """Of two layers beside a third, those that have both run when the block ends; all three are the block."""
    blocks = (Repeats(order, adds=True) for _ in range(2))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    graph = trace_model(ModelSource("order", lambda: module, inputs, LENGTH))
    known = {str(one): one for one in known_strategies(cluster(2, 2))}
    shard, replicate = known["shard"], known["replicate"]
    alike = units_of(cut(graph), dict.fromkeys(range(len(graph.operators)), (shard,)))
    assert [len(unit.operators) for unit in alike if unit.whole_block is not None] == [3, 3]
    mixed = {index: (replicate if "layers.2" in one.name else shard,) for index, one in enumerate(graph.operators)}
    sizes = [len(unit.operators) for unit in units_of(cut(graph), mixed)]
    assert sorted(sizes) == ([1, 1, 1, 2, 2] if together else [1] * 7)


@pytest.mark.parametrize("strategy", ["shard", "shard_grad", "secondary_shard:2"])
def test_each_call_is_gathered_for(strategy: str) -> None:
    """By hand, where nothing overlaps: two calls more are two gathers with copies, and two back if nothing is kept."""
    machine, latency_s, bandwidth = cluster(1, 4, overlaps=False), 20e-6, 10e9
    seconds = []
    for heads in (1, 3):
        module = Drawn(0)
        module.heads = heads
        source = ModelSource(f"heads {heads}", lambda module=module: deepcopy(module), inputs, LENGTH)  # type: ignore[misc]
        graph = trace_model(source)
        plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, micro_batch=4)
        seconds.append(open_plan(plan, graph, machine).prediction.time_by_term["exposed_communication_s"])
    size_bytes = 4 * WIDTH * (WIDTH + 1)
    gather_s, again_s = (
        (ranks - 1) * latency_s + (ranks - 1) / ranks * size_bytes / bandwidth
        for ranks in (4, 2 if "secondary" in strategy else 4)
    )
    copy_s = 2 * size_bytes / machine.device.memory_bytes_per_s.value  # is read and written
    more_s = 0.0 if strategy == "shard_grad" else 2 * (gather_s + again_s + 2 * copy_s)
    assert seconds[1] - seconds[0] == pytest.approx(more_s, rel=1e-6, abs=1e-12)
