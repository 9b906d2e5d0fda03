"""Memory of blocks that go through a sequence step by step, and of what they return beside their outputs."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, STEPS = 64, 4


class Cell(nn.Module):
    """Projects all inputs at once, and the state at every step; the norm of that, too, runs at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.of_inputs, self.of_state = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, STEPS, WIDTH) -> the same."""
        state, states = x.new_zeros(len(x), WIDTH), []
        for one in self.of_inputs(x).unbind(1):
            state = torch.tanh(self.norm(one + self.of_state(state)))
            states.append(state)
        y: Tensor = x + self.out(torch.stack(states, 1))
        return y


class Recurrent(nn.Module):
    """A hand-written recurrent network: wide gates and a narrow output, in turn at every step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.gates, self.out = steps, nn.Linear(4 * WIDTH, 8 * WIDTH), nn.Linear(2 * WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, STEPS, 2 WIDTH) -> a loss."""
        state = cell = torch.zeros_like(x)
        losses = []
        for _ in range(self.steps):
            keep, add, show, new = self.gates(torch.cat([x, state], -1)).chunk(4, -1)
            cell = keep.sigmoid() * cell + add.sigmoid() * new.tanh()
            state = show.sigmoid() * cell.tanh()
            losses.append(self.out(state).square().mean())
        return torch.stack(losses).sum()


class Penalised(nn.Module):
    """A block that returns a loss of its own, which is a constant as long as there is nothing to penalise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, STEPS, WIDTH) -> the same, and a loss."""
        return x + self.down(torch.tanh(self.up(x))), torch.zeros(1, requires_grad=True)


class Stack(nn.Module):
    """Three blocks between linear layers; losses of blocks are added to its own when all have run."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, losses = self.embed(x), []
        for block in self.blocks:
            out = block(x)
            x, *more = out if isinstance(out, tuple) else (out,)
            losses += more
        return torch.cat([self.head(x).pow(2).mean()[None], *losses]).sum()


@cache
def traced(kind: type[nn.Module]) -> tuple[ModelSource, ModelGraph]:
    inputs = lambda _, batch: ((torch.randn(batch, STEPS, WIDTH),), {})  # noqa: E731
    source = ModelSource(kind.__name__, lambda: Stack(kind), inputs, 1)
    return source, trace_model(source)


@pytest.mark.parametrize(
    ("recomputed", "strategy"),
    some([*product([("blocks.1",), ()], ["group_shard:2", "shard_grad", "secondary_shard:2"])], 2),
)
def test_what_runs_at_every_step_is_gathered_for_itself(strategy: str, recomputed: tuple[str, ...]) -> None:
    """Wrapped together with what runs once it would stay gathered, as FSDP2 shards modules when all have run.

    Once predicted up to 7.2 % too low.
    """
    (source, graph), machine = traced(Cell), cluster(2, 2)
    together = {one.name: strategy for one in graph.operators if one.name.endswith(("of_inputs", "of_state"))}
    choices = {one.name: "shard" for one in graph.operators} | together
    for accumulation in (1, 2):
        plan = plan_of(graph, machine, choices, recomputed, micro_batch=4, accumulation=accumulation)
        assert -0.002 <= compare(plan, source, graph, machine).error <= 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("steps", "strategy"), [(2, "shard"), (4, "group_shard:2")])
def test_the_gather_of_a_later_step_counts_beside_what_is_kept(steps: int, strategy: str, precision: str) -> None:
    """Where activations are as large as parameters the peak is there; once predicted up to 7.8 % too low."""
    inputs = lambda _, batch: ((torch.randn(batch, STEPS, 2 * WIDTH),), {})  # noqa: E731
    source, machine = ModelSource("recurrent", lambda: Recurrent(steps), inputs, 1), cluster(1, 4)
    graph = trace_model(source, precision)
    choices = {one.name: strategy for one in graph.operators}
    for micro_batch in (32, 64):
        found = compare(plan_of(graph, machine, choices, micro_batch=micro_batch), source, graph, machine)
        assert -0.002 <= found.error <= 0.1


@pytest.mark.parametrize("recomputed", [(), ("blocks.0", "blocks.1", "blocks.2")], ids=["kept", "recomputed"])
@pytest.mark.parametrize("strategy", ["shard", "group_shard:2", "secondary_shard:2"])
def test_a_block_that_returns_a_leaf_is_gathered_in_its_turn(strategy: str, recomputed: tuple[str, ...]) -> None:
    """Autograd runs hooks of a leaf before all else: its block's parameters were gathered with those of blocks above.

    Once predicted up to 5 % too low.
    """
    (source, graph), machine = traced(Penalised), cluster(2, 2)
    choices = {one.name: strategy for one in graph.operators}
    for accumulation in (1, 2):
        plan = plan_of(graph, machine, choices, recomputed, micro_batch=4, accumulation=accumulation)
        assert -0.002 <= compare(plan, source, graph, machine).error <= 0.005
