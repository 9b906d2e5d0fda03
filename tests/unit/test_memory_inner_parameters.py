"""Memory of modules that read the parameters of modules inside, and hand on parts of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, STEPS = 48, 40

PARTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "whole": lambda weight, batch: weight,
    "rows": lambda weight, batch: weight[:STEPS],
    "one row for all": lambda weight, batch: weight[:1].view(1, 1, WIDTH).expand(batch, STEPS, WIDTH),
    "rows for all": lambda weight, batch: weight[:STEPS].expand(batch, STEPS, WIDTH),
    "repeated": lambda weight, batch: weight[:STEPS].repeat(batch, 1, 1),
    "a map for all": lambda weight, batch: weight[0].view(1, WIDTH, 1, 1).expand(batch, WIDTH, STEPS, STEPS),
    "transposed": lambda weight, batch: weight[:STEPS].t(),
}
"""What a module makes of the weight of an embedding in it, of STEPS + 2 rows, for its caller."""


class Prompts(nn.Module):
    """Owns no parameters itself; returns its input's projection and a part of an embedding's weight."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.table, self.shift = nn.Embedding(STEPS + 2, WIDTH), nn.Embedding(1, WIDTH)
        self.part, self.project = part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, STEPS, WIDTH) -> the same, and the part."""
        return self.project(x) + self.shift.weight[0], PARTS[self.part](self.table.weight, len(x))


class Prompted(nn.Module):
    """Reads what the prompts hand on in the middle and at the end."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.embed, self.prompts, self.head = nn.Linear(WIDTH, WIDTH), Prompts(part), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x, part = self.prompts(self.embed(x))
        for block in self.blocks:
            x = x + block(x) * part.mean()
        loss: Tensor = self.head(x).pow(2).mean() + part.sin().mean()
        return loss


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("part", PARTS)
def test_memory_is_predicted(part: str, precision: str) -> None:
    """The trace once had such modules hand on their parameters themselves, and a rank a copy as large as the view."""
    inputs = lambda _, batch: ((torch.randn(batch, STEPS, WIDTH),), {})  # noqa: E731
    source, machine = ModelSource(part, lambda: Prompted(part), inputs, 1), cluster(2, 2)
    graph = trace_model(source, precision)
    for strategy, batch in (("shard", 1), ("replicate", 1), ("shard_grad", 5)):
        plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, micro_batch=batch)
        assert -0.001 <= compare(plan, source, graph, machine).error <= 0.02, strategy


class Body(nn.Module):
    """Owns a scale, or not, and multiplies with weights of its caller."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None

    def forward(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        """(batch, STEPS, WIDTH) -> the same."""
        x = torch.tanh(x)
        for weight in weights:
            x = x @ weight
        return x if self.scale is None else x * self.scale


class Between(nn.Module):
    """Two layers, of which the model reads parameters, so that both are one operator, around a body with another."""

    def __init__(self, times: int, scaled: bool, normed: bool) -> None:
        super().__init__()
        self.embed, self.head, self.body = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Body(scaled)
        self.times, self.normed = times, normed

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.embed(x), [self.embed.weight] * self.times))
        return (y / (1 + self.head.bias.pow(2).mean()) if self.normed else y).pow(2).mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_that_wait_are_those_of_the_parameters_that_are_read_again(
    times: int, scaled: bool, precision: str
) -> None:
    """All of an operator's were once taken to wait in autograd while one of them did: up to 12 % too low."""
    inputs = lambda _, batch: ((torch.randn(batch, STEPS, WIDTH),), {})  # noqa: E731
    machine = cluster(2, 2)
    for normed in (True, False):
        source = ModelSource(f"{normed}", lambda: Between(times, scaled, normed), inputs, 1)  # noqa: B023
        graph = trace_model(source, precision)
        plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, micro_batch=1)
        assert -0.002 <= compare(plan, source, graph, machine).error <= 0.05, normed
