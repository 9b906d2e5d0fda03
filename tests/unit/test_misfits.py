"""Options that are left out are in no plan that fits, and candidates of a rank bound whole plans."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import cluster, transformer
from test_space_search import HOST, SLOW, chains, machines, menu_of, plans_of
from thoroughness import draws

from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidates import choices_of
from planner.options.search_space import Space
from planner.pricing import priced
from planner.solve.lagrangian_bound import ChainBound, MemoryEvent
from planner.solve.misfits import without_misfits
from planner.strategies.registry import strategies_on
from profiler.cluster.cluster import Cluster
from profiler.model_graph import ModelGraph


@SLOW
@given(chains, machines, st.integers(1, 2), st.floats(0.0, 0.5), st.integers(0, 10**6))
def test_options_that_are_left_out_are_in_no_plan_that_fits(
    graph: ModelGraph, machine: Cluster, accumulation: int, fraction: float, seed: int
) -> None:
    space, load = Space(graph), Workload(machine, "adam", "fp32", 1, accumulation)
    choices = [choices_of(stage, graph, strategies_on(machine), stage.recomputations) for stage in space.model.stages]
    full = menu_of(space, load, [[some[(seed // 7**i + i * 13) % len(some)] for i in range(6)] for some in choices])
    by_peak = sorted(((peak_memory(one, load).total_bytes, one) for one in plans_of(full)), key=itemgetter(0))
    limit = by_peak[0][0] + fraction * (by_peak[-1][0] - by_peak[0][0])
    left = without_misfits(ChainBound(full), limit)
    assert left is not None, "the smallest plan fits"
    kept = [set(map(id, some)) for some in left.candidates.options]
    for peak_bytes, options in by_peak:
        if peak_bytes <= limit:
            assert all(id(one) in kept[k] for one, k in zip(options, full.stage_classes, strict=True))
    assert without_misfits(ChainBound(full), 0.9 * min(ChainBound(full).least_bytes(MemoryEvent(None)), limit)) is None


@settings(SLOW, max_examples=draws(4, 80))
@given(
    st.booleans(), st.sampled_from([(1, 4), (2, 2), (2, 4)]), st.integers(0, 10**6), st.sampled_from([64, 2048, 16384])
)
def test_no_rank_of_a_plan_holds_less_or_is_sooner_done_than_its_candidates_say(
    offload: bool, ranks: tuple[int, int], seed: int, vocabulary: int
) -> None:
    """Those of the mean rank, and of the rank that owns the tied embedding and nothing else."""
    graph, machine = transformer(2, 1024, tied=True, vocabulary=vocabulary), replace(cluster(*ranks), host=HOST)
    space, load, draw = Space(graph), Workload(machine, "adam", "fp32", 1), Random(seed)
    (spanning,) = (s for s in strategies_on(machine) if s.spec.has_owner and s.offload == offload)
    on_mean = space.candidates(load, spanning)
    (on_owner,) = on_mean.on_owners
    assert on_owner.choices == on_mean.choices
    for candidates in (on_mean, on_owner):
        for _ in range(12):
            picks = [draw.randrange(len(candidates.options[k])) for k in candidates.stage_classes]
            bound, plan = candidates.picked(picks), priced(space, load, candidates.chosen(picks), spanning)
            if plan.space is space:
                assert peak_memory(bound, load).total_bytes <= plan.peak.total_bytes
            assert step_time(bound, load).optimizer_s <= step_time(plan.options, load).optimizer_s * (1 + 1e-9)
