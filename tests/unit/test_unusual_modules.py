"""Modules that are rare, but PyTorch's own: batch norm over ranks, ensembles by vmap, empty parameters, TorchScript."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn
from torch.func import functional_call
from toys import refusal

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, LENGTH = 32, 64


class Normed(nn.Module):
    """(batch, LENGTH, WIDTH) -> the same, normed over the samples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2)
        return y


class Ensemble(nn.Module):
    """The mean of three layers that run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parameters = {
            name: torch.stack([one.get_parameter(name) for one in self.layers]) for name in ("weight", "bias")
        }
        y: Tensor = torch.vmap(lambda one: functional_call(self.layers[0], one, (x,)))(parameters).mean(0)
        return x + y


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


class Stack(nn.Module):
    """Two blocks between linear layers."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).pow(2).mean()
        return loss


def traced(block: Callable[[], nn.Module]) -> tuple[ModelSource, ModelGraph]:
    inputs = lambda _, batch: ((torch.randn(batch, LENGTH, WIDTH),), {})  # noqa: E731
    source = ModelSource("unusual", lambda: Stack(block), inputs, LENGTH)
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
