"""Blocks that are called several times: a plan names them once, and says what the runtime does."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from rehearsals import plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from osdp.planning.request import BEST, Request, plan_graph
from osdp.zoo import load_cluster
from planner.analysis.explain import open_plan
from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.options.search_space import Space
from planner.problem import Task
from planner.search.least_memory import smallest_of
from planner.search.search import loads_of
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from runtime.compile_plan import compile_plan
from runtime.observe.dry_run import Script, dry_run

TOKENS, WIDTH = 32, 64


class Mlp(nn.Module):
    """A norm, two products and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, TOKENS, WIDTH) -> the same."""
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Repeated(nn.Module):
    """Three blocks that run twice each, as ALBERT's do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Mlp(), Mlp(), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, TOKENS, WIDTH) -> a loss."""
        x = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x.square().mean()


@cache
def graph() -> ModelGraph:
    """Return its trace."""
    model = Repeated()
    return trace_model(
        ModelSource("repeated", lambda: model, lambda _, n: ((torch.randn(n, TOKENS, WIDTH),), {}), TOKENS)
    )


FACTORS = 1.0005, 1.001, 1.003, 1.01, 1.05, 1.1
"""Limits, in smallest ones."""


@cache
def smallest_bytes() -> float:
    """Return the least that a plan needs."""
    task = Task(graph(), load_cluster("titan-rtx-8"), 10**10)
    space = Space(graph())
    return smallest_of(space, loads_of(task, space), float("inf")).peak.total_bytes


@pytest.mark.parametrize(("style", "factor"), some([*product(["", BEST], FACTORS)], 6, first=4))
def test_what_is_recomputed_of_a_block_is_so_in_all_its_calls(factor: float, style: str) -> None:
    machine = load_cluster("titan-rtx-8")
    plan = plan_graph(graph(), machine, Request(int(smallest_bytes() * factor) + 1, style=style)).plan
    named = plan.recomputed_blocks + plan.selectively_recomputed_blocks
    assert len(named) == len(set(named))
    view = open_plan(plan, graph(), machine)
    options = view.decided.options(view.space, view.load, plan.usable_bytes)
    again = {stage.name: set[int]() for stage in view.space.model.stages}
    for stage, option in zip(view.space.model.stages, options, strict=True):
        again[stage.name].add(option.recompute)
    assert all(len(kinds) == 1 for kinds in again.values())
    # What the file predicts is what its reading is priced at.
    assert step_time(options, view.load).total_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert peak_memory(options, view.load).total_bytes == pytest.approx(plan.predicted.peak_memory_bytes, abs=1)


class Counted(Repeated):
    """Counts how often its first block's forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.blocks[0].up.register_forward_pre_hook(self.count)

    def count(self, *_: object) -> None:
        self.runs += 1


@pytest.mark.parametrize("selective", [False, True])
def test_each_call_runs_again_once(selective: bool) -> None:
    """And not as often as the block is called: each would then run again within the other."""
    machine = cluster(1, 2)
    names = [block.name for block in graph().blocks]
    assert len(names) == 2 * len(set(names))
    lists = ([], names) if selective else (names, [])
    plan = plan_of(graph(), machine, {operator.name: "shard" for operator in graph().operators}, *lists)
    schedule = compile_plan(plan, graph(), machine)
    assert sorted(schedule.recomputed) == sorted(set(names))
    model = Counted()
    script = Script(lambda: model, lambda _, n: ((torch.randn(n, TOKENS, WIDTH),), {}), lambda loss: loss, "adam", 2)
    dry_run(script, schedule, with_data=True)
    assert model.runs == 2 * 2 * 2  # steps, calls, and each forward and again
