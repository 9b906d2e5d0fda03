"""Modules that are rare, but PyTorch's own: batch norm over ranks, ensembles by vmap, empty parameters, TorchScript."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ensembles import LENGTH, WIDTH, Between, Ensemble
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn
from toys import refusal

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model


class Normed(nn.Module):
    """(batch, LENGTH, WIDTH) -> the same, normed over the samples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2)
        return y


class Empty(nn.Module):
    """Has prompts, of which there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.prompts = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.cat([self.prompts.expand(len(x), -1, -1), self.layer(x)], 1)
        return y


class Scripted(nn.Module):
    """Runs a layer that TorchScript has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layer(x)
        return y


def traced(block: Callable[[], nn.Module]) -> tuple[ModelSource, ModelGraph]:
    source = ModelSource("unusual", lambda: Between(block), lambda model, batch: model.example_inputs(batch), LENGTH)
    return source, trace_model(source)


@pytest.mark.parametrize(
    ("block", "strategies"),
    [(Normed, ("shard", "replicate")), (Ensemble, ("shard", "replicate")), (Empty, ("shard", "group_shard:2"))],
)
def test_their_memory_is_predicted(block: Callable[[], nn.Module], strategies: tuple[str, ...]) -> None:
    source, graph = traced(block)
    machine, blocks = cluster(2, 2), [one.name for one in graph.blocks]
    for strategy in strategies:
        for again in ((), blocks):
            plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, again, micro_batch=2)
            assert -0.002 <= compare(plan, source, graph, machine, with_data=False).error <= 0.05


def test_what_torchscript_has_compiled_is_refused() -> None:
    """Hooks, which it does not take, are how layers are gathered."""
    assert "`blocks.0.layer`" in refusal(lambda: traced(Scripted))


class _Table(nn.Module):
    """Fills a table that is there from the beginning, and computes with its parameter only where that is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies, self.known = nn.Parameter(torch.rand(8)), 0
        self.register_buffer("table", torch.zeros(32, 8), persistent=False)

    def forward(self, length: int) -> Tensor:
        if length > self.known:
            made = torch.arange(length, dtype=torch.float32)[:, None] * self.frequencies
            self.table[:length] = made.cos().detach()
            self.known = length
        return self.table[:length]


class _WithTable(nn.Module):
    """Adds a table's rows to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(8, 8), _Table(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.table(x.shape[1])).pow(2).mean()


def test_a_table_that_the_first_forward_fills_is_full_in_the_trace() -> None:
    """The first pass alone computes with the table's parameter: no two passes were alike, and the model refused."""
    inputs = lambda _, batch: ((torch.randn(batch, 16, 8),), {})  # noqa: E731
    graph = trace_model(ModelSource("with a table", _WithTable, inputs, 16))
    assert [graph.operators[call.operator].name for call in graph.calls] == ["first", "last"]
