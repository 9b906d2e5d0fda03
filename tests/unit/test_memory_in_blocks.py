"""Tensors that live within one block, changed in place or after its modules, in a dry run: what was predicted."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import nn
from trace_models import source

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model


class Changing(nn.Module):
    """Two layers, and between them an activation in place: the output of the first is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 128), nn.ReLU(inplace=True), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Changes(nn.Sequential):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__(*(Changing() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 64, 32) -> a loss."""
        return super().forward(x).square().mean()


@cache
def changes() -> tuple[ModelSource, ModelGraph]:
    """Return the model and its graph."""
    model = source(Changes, (64, 32))
    return model, trace_model(model)


@pytest.mark.parametrize(
    ("up", "down", "recomputes"),
    [
        ("shard", "shard", False),
        ("shard", "shard", True),
        ("shard", "replicate", False),
        ("shard", "replicate", True),
        ("replicate", "shard", False),
        ("replicate", "replicate", True),
    ],
)
def test_what_is_changed_in_place_has_no_copy_under_any_plan(up: str, down: str, recomputes: bool) -> None:
    """Whether a layer is wrapped alone, with its block, or not at all: 0.5 MiB of 1.1 to 2.3."""
    model, graph = changes()
    choices = {operator.name: up if operator.name.endswith("up") else down for operator in graph.operators}
    again = {block.name for block in graph.blocks} if recomputes else ()
    found = compare(plan_of(graph, cluster(1, 8), choices, again, micro_batch=8), model, graph, cluster(1, 8))
    assert abs(found.error) <= 0.002
    hidden, wide = (4 * 8 * 64 * width for width in (32, 128))
    # As the topmost activation runs back: its output, and two gradients of it; what is saved below it; the gradient of
    # the loss is gone.  Recomputed, only inputs are saved below.
    below = 4 * hidden + (0 if recomputes else 3 * wide)
    assert found.tracked["activations"] <= below + 3 * wide + 2048


class Gated(nn.Module):
    """A block that goes on after the last of its modules, and has two units in bf16, as batch norm keeps fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        return x + y.tanh() * y.sigmoid() * (2.0 * y).tanh() * (3.0 * y).tanh()


class GatedStack(nn.Module):
    """Three of them, and little after."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Gated() for _ in range(3)), nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 512) -> a loss."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_rest_of_a_block_comes_before_its_last_unit_is_gathered(precision: str) -> None:
    """And what lies below is prefetched then: 508 KiB in bf16, of 15.7 MiB."""
    model = source(GatedStack, (512,))
    graph = trace_model(model, precision)
    plan = plan_of(graph, cluster(1, 8), {o.name: "shard" for o in graph.operators}, micro_batch=512)
    assert abs(compare(plan, model, graph, cluster(1, 8)).error) <= 0.002
