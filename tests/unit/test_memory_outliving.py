"""Memory where something outlives a step: states and maps that a model keeps, and what is in reference cycles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, LENGTH, LAYERS = 16, 128, 3
MAP_BYTES = 4 * LENGTH**2


class Part(nn.Module):
    """Attention of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        weights = (query @ query.transpose(1, 2)).softmax(-1)
        self.see(weights)
        return x + self.out(weights @ query)

    def see(self, weights: Tensor) -> None:
        """Do something with the map."""


class Mapped(Part):
    """Keeps its map, to be looked at, until its next forward has another."""

    def see(self, weights: Tensor) -> None:
        self.seen = weights


class Copied(Part):
    """Keeps a copy, without history."""

    def see(self, weights: Tensor) -> None:
        self.seen = weights.detach().clone()


class Reset(Mapped):
    """Keeps its map until the next forward begins."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = None
        return super().forward(x)


class Listed(Part):
    """Leaves its map in a list that holds itself."""

    def see(self, weights: Tensor) -> None:
        seen: list[Any] = [weights]
        seen.append(seen)


class Closed(Part):
    """Leaves a product of its map in a function that names itself."""

    def see(self, weights: Tensor) -> None:
        product = weights * 2

        def again() -> Any:
            return again, product


class Fed(Part):
    """Keeps what it is fed, beside its map."""

    def forward(self, x: Tensor) -> Tensor:
        self.fed = x
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(part() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def source(part: Callable[[], nn.Module]) -> ModelSource:
    return ModelSource("outliving", lambda: Model(part), lambda _, b: ((torch.randn(b, LENGTH, WIDTH),), {}), LENGTH)


@pytest.mark.parametrize("part", [Mapped, Copied, Reset, Listed, Closed])
def test_what_outlives_a_step_is_counted_to_its_end(part: Callable[[], nn.Module]) -> None:
    """Also where a block is recomputed; what is in cycles, once for every micro-batch."""
    graph, machine, is_in_cycles = trace_model(source(part)), cluster(1, 2), part in (Listed, Closed)
    assert graph.left_bytes(3) == LAYERS * 3 * MAP_BYTES
    # A block that runs again leaves its map twice, and what that was computed from.
    assert graph.cycle_bytes(3) > 2 * LAYERS * 3 * MAP_BYTES if is_in_cycles else graph.cycle_bytes(3) == 0
    blocks = [block.name for block in graph.blocks]
    assert len(blocks) == LAYERS
    plans = [
        ("shard", 1, [], 0.001),
        ("shard", 3, [], 0.001),
        ("replicate", 2, blocks[1:2], 0.03),
        ("shard", 2, blocks, 0.001),
    ]
    for strategy, accumulation, again, most in some(plans, 2, [Mapped, Copied, Reset, Listed, Closed].index(part) % 2):
        choices = {operator.name: strategy for operator in graph.operators}
        plan = plan_of(graph, machine, choices, again, accumulation=accumulation)
        found = compare(plan, source(part), graph, machine)
        most = most if accumulation == 1 or not is_in_cycles else 1.0
        assert 0 <= found.error < most, (strategy, accumulation, again)


def test_what_a_model_keeps_of_its_input_outlives_a_step() -> None:
    """The batch itself, and what two blocks hand on."""
    graph, machine = trace_model(source(Fed)), cluster(1, 2)
    assert graph.left_bytes(3) == LAYERS * 3 * 4 * LENGTH * WIDTH
    plan = plan_of(graph, machine, {operator.name: "shard" for operator in graph.operators}, accumulation=2)
    assert 0 <= compare(plan, source(Fed), graph, machine).error < 0.001


def test_what_outlives_a_step_is_there_as_the_optimizer_steps() -> None:
    """Of a model with more parameters than activations, whose peak is in the optimizer's step."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(256, 256), nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
            self.state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            before = torch.zeros_like(x) if self.state is None or self.state.shape != x.shape else self.state.detach()
            self.state = torch.tanh(self.cell(x) + before)
            return self.head(self.state).mean()

    own = ModelSource("kept", Kept, lambda _, batch: ((torch.randn(16 * batch, 256),), {}), 1)
    graph, machine = trace_model(own), cluster(1, 2)
    plan = plan_of(graph, machine, {operator.name: "replicate" for operator in graph.operators}, micro_batch=2)
    found = compare(plan, own, graph, machine)
    assert found.predicted_phase == found.tracked_phase == "optimizer"
    assert found.predicted["activations"] == found.tracked["activations"] == 4 * 32 * 256
    assert found.error == 0


def test_a_model_whose_cycles_hold_tensors_is_told() -> None:
    assert any("reference cycles hold" in note for note in trace_model(source(Listed)).notes)
    assert not any("reference cycles" in note for note in trace_model(source(Mapped)).notes)
