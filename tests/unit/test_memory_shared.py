"""Memory of models with modules that lie outside of the blocks that run them, in a dry run: what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from rehearsals import compare, plan_of
from shared_modules import Handed, InAll, InOne
from synthetic import cluster
from torch import nn
from trace_models import source

from planner.model.stages import cut
from profiler.trace.trace import trace_model

WIDE: list[Callable[[], nn.Module]] = [partial(InAll, 64), partial(InOne, 64), partial(Handed, 64)]


@pytest.mark.parametrize("build", WIDE)
def test_what_shared_modules_hold_is_predicted(build: Callable[[], nn.Module]) -> None:
    model = source(build, (64, 64))
    graph, machine = trace_model(model), cluster(1, 4)
    blocks = [block.name for block in graph.blocks]
    for choice, recomputed in (("shard", []), ("shard", blocks), ("shard_grad", [])):
        plan = plan_of(graph, machine, {one.name: choice for one in graph.operators}, recomputed)
        assert 0 <= compare(plan, model, graph, machine).error < 0.05, (choice, recomputed)


def test_only_what_no_block_holds_is_a_unit_of_its_own() -> None:
    assert cut(trace_model(source(partial(InOne, 64), (64, 64)))).spanning == ()
    for build in (partial(InAll, 64), partial(Handed, 64)):
        model = cut(trace_model(source(build, (64, 64))))
        assert [model.graph.operators[index].name.split(".")[0] for index in model.spanning] == ["shared"]
