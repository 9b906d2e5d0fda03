"""Batch norm of sequences whose channels were swapped to the middle for it: CPUs return rows, and what reads them makes
other copies than of the order that came in."""

from __future__ import annotations

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.device_kernels import device_kernels
from profiler.trace.trace import trace_model

WIDTH, LENGTH = 32, 24
SHAPES = {1: (4, 6, 8), 2: (4, 5, 6, 8), 3: (4, 3, 5, 6, 8)}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("swapped", [(1, -1), (-2, -1), (1, -2), (0, 1)])
def test_without_data_a_norm_returns_what_a_cpu_does(dims: int, swapped: tuple[int, int]) -> None:
    def run(device: str) -> list[tuple[int, ...]]:
        x = torch.randn(SHAPES[dims], device=device, requires_grad=True).transpose(*swapped)
        x.retain_grad()
        norm = getattr(nn, f"BatchNorm{dims}d")(x.shape[1], device=device)
        y = norm(x)
        (gradient,) = torch.autograd.grad(y, x, torch.empty_like(y))
        return [y.stride(), gradient.stride()]

    with device_kernels("cpu", "meta"):
        found = run("meta")
    assert found == run("cpu")


class Encoder(nn.Module):
    """Layers of which each normalises over all samples and positions, as encoders of time series do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> a loss."""
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            y = norm(x.transpose(1, 2)).transpose(1, 2)
            x = x + down(torch.nn.functional.gelu(up(y)))
        return x.square().mean()


@pytest.mark.parametrize(("strategy", "with_data"), some([("shard", True), ("replicate", True), ("shard", False)], 2))
def test_a_norm_of_swapped_sequences(strategy: str, with_data: bool) -> None:
    source = ModelSource("encoder", Encoder, lambda module, batch: ((torch.randn(batch, LENGTH, WIDTH),), {}), LENGTH)
    graph = trace_model(source)
    plan = plan_of(graph, cluster(1, 4), {one.name: strategy for one in graph.operators}, micro_batch=16)
    found = compare(plan, source, graph, cluster(1, 4), with_data=with_data)
    print(strategy, with_data, f"{found.error:+.2%}")
    assert -0.005 <= found.error <= 0.02
