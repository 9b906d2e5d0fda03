"""Memory as a part of a block is reduced whose input another part has too: gradients are counted once.

The gradient of a residual, which waits meanwhile, is in `test_dtype_costs.py`, the bytes by hand in
`test_trace_memory.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, WIDE, LENGTH, TOKENS = 64, 4096, 4, 100


class Gated(nn.Module):
    """Two layers have the norm's output, of which the wider one runs back last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDE, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        y: Tensor = x + self.gate(hidden).unflatten(-1, (WIDTH, -1)).mean(-1) * self.down(hidden)
        return y


class Net(nn.Module):
    """Tokens (batch, length) -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.blocks = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def inputs(module: nn.Module, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    return (torch.randint(TOKENS, (batch, LENGTH)),), {}


SOURCE = ModelSource("gated", Net, inputs, LENGTH)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gate", ["shard", "group_shard:2"])
def test_gradients_of_the_part_that_is_reduced_are_counted_once(gate: str, precision: str) -> None:
    graph, machine = trace_model(SOURCE, precision), cluster(1, 4)
    choices = {one.name: gate if one.name.endswith("gate") else "shard+offload" for one in graph.operators}
    found = compare(plan_of(graph, machine, choices, micro_batch=2), SOURCE, graph, machine)
    assert found.predicted_phase == "reduce of blocks.0.gate"
    assert -0.001 <= found.error <= 0.01
