"""Random plans, and plans that the search finds, in a dry run: not more than was predicted, and not far less."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rehearsals import compare, graph_of, plan_of, source
from synthetic import cluster
from thoroughness import THOROUGH, draws

from planner.cost.workload import Workload
from planner.model.fsdp_units import check_split
from planner.options.search_space import Space
from planner.plan import Plan
from planner.pricing import make_plan
from planner.problem import Task
from planner.search.least_memory import smallest_plan
from planner.search.search import search
from planner.strategies.notation import format_choice
from planner.strategies.registry import known_strategies
from profiler.affine import Affine
from profiler.byte_sizes import whole_mib
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Operator, Recompute

VOCABULARY, LENGTH = {"gpt2": 512, "llama": 4096, "bert": 2048}, 128
"""Chains only: in an encoder and decoder, blocks with slices that run again are priced up to 3.4 % from above."""
EVERY_KIND = [*product(VOCABULARY, ("fp32", "bf16"))]
KINDS = EVERY_KIND if THOROUGH else [("gpt2", "fp32"), ("llama", "bf16"), ("bert", "bf16")]
"""Families and precisions that are drawn from: a trace takes as long as a plan."""
UNSEEN = 0.002
"""Of models this small; what the tracer leaves out: inputs that FSDP2 casts, the batch and the loss as the last units
are reduced."""


def can_split(operator: Operator, count: int) -> bool:
    with suppress(OsdpError):
        check_split(operator, count)
        return True
    return False


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, str, ModelGraph, Cluster]:
    """Draw a plan, the family of its model, its graph and its cluster."""
    family, precision = draw(st.sampled_from(KINDS))
    graph = graph_of(family, VOCABULARY[family], LENGTH, precision)
    machine = cluster(*draw(st.sampled_from([(1, 4), (1, 8), (2, 4), (8, 8), (32, 8)])))
    known = known_strategies(machine)
    pool = st.sampled_from(draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True)))
    splits = draw(st.booleans())
    choices = {}
    for operator in graph.operators:
        most = draw(st.sampled_from([1, 1, 1, 2, 4])) if splits else 1
        count = most if can_split(operator, most) else 1
        choices[operator.name] = format_choice([draw(pool) for _ in range(count)])
    how = draw(st.sampled_from([*Recompute, None]))
    again = {block.name: draw(st.sampled_from(Recompute)) if how is None else how for block in graph.blocks}
    for operator in graph.operators:  # blocks with split operators cannot be recomputed selectively
        block = None if operator.block is None else graph.blocks[operator.block].name
        if block and choices[operator.name].startswith("split") and again[block] is Recompute.SELECTIVE:
            again[block] = Recompute.EVERYTHING
    for one in graph.blocks:
        if one.offloadable_bytes == Affine():
            again[one.name] = min(again[one.name], Recompute.EVERYTHING)
    plan = plan_of(
        graph,
        machine,
        choices,
        *(
            [name for name, how in again.items() if how is wanted]
            for wanted in (Recompute.EVERYTHING, Recompute.SELECTIVE, Recompute.OFFLOADED)
        ),
        micro_batch=draw(st.integers(2, 4)),
        accumulation=draw(st.sampled_from([1, 1, 2, 3])),
        optimizer=draw(st.sampled_from(["adam", "adamw", "sgd"])),
    )
    return plan, family, graph, machine


@settings(max_examples=draws(3, thorough=120), suppress_health_check=list(HealthCheck))
@given(plans())
def test_random_plans_hold_what_is_predicted(drawn: tuple[Plan, str, ModelGraph, Cluster]) -> None:
    plan, family, graph, machine = drawn
    found = compare(plan, source(family, VOCABULARY[family], LENGTH), graph, machine)
    assert -0.01 <= found.error <= 0.03


@settings(max_examples=draws(2), suppress_health_check=list(HealthCheck))
@given(st.sampled_from(KINDS), st.sampled_from([(1, 4), (2, 4), (4, 8)]), st.floats(1.0, 2.0), st.integers(1, 4))
def test_no_plan_that_is_accepted_exceeds_its_limit(
    kind: tuple[str, str], shape: tuple[int, int], factor: float, micro_batch: int
) -> None:
    family, precision = kind
    graph, machine = graph_of(family, VOCABULARY[family], LENGTH, precision), cluster(*shape)
    load = Workload(machine, "adam", precision, micro_batch)
    space = Space(graph)
    limit_bytes = round(factor * whole_mib(smallest_plan(space, load).peak.total_bytes))
    found = search(Task(graph, machine, limit_bytes, micro_batch=micro_batch), space=space)
    plan = make_plan(found.options, found.spanning, found.space, found.load, limit_bytes=limit_bytes, gap=found.gap)
    held = compare(plan, source(family, VOCABULARY[family], LENGTH), graph, machine)
    peak_bytes = sum(held.tracked.values()) + machine.reserve_bytes
    assert plan.predicted.peak_memory_bytes <= limit_bytes
    assert peak_bytes <= (1 + UNSEEN) * limit_bytes
    assert -0.01 <= held.error <= 0.03


@pytest.mark.parametrize(("first", "rest"), [("shard_grad", "shard"), ("shard", "shard_grad"), ("replicate", "shard")])
def test_what_is_below_a_block_that_runs_again_is_gathered_as_its_parts_run_back(first: str, rest: str) -> None:
    """What a hierarchical gather holds as it runs was missing: 3.7 to 6.5 % here, 16 % of a drawn plan."""
    graph, machine = graph_of("gpt2", VOCABULARY["gpt2"], LENGTH, "fp32"), cluster(2, 4)
    choices = {one.name: "hierarchical" if one.name.startswith("blocks.0.") else "shard" for one in graph.operators}
    for name in choices:
        if name.startswith("blocks.1."):
            choices[name] = first if name.endswith(("attention_norm", "query_key_value")) else rest
    plan = plan_of(graph, machine, choices, ["blocks.1"], micro_batch=1)
    found = compare(plan, source("gpt2", VOCABULARY["gpt2"], LENGTH), graph, machine)
    assert -0.001 <= found.error <= 0.01
