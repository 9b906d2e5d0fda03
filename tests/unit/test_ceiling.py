"""The bound without candidates holds for every plan, baselines are the best of all micro-batches, and candidates are
the same whichever micro-batch came first.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import cluster, transformer
from thoroughness import draws

from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidate_set import CandidateSet
from planner.options.search_space import Space
from planner.search.baselines import baselines, uniform
from planner.search.ceiling import Ceiling
from planner.search.knapsack import least_cost, whole_choices
from planner.strategies.registry import strategies_on
from profiler.cluster.cluster import Cluster, Host
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CallTimes, Measured, call_key
from profiler.model_graph import ModelGraph, Recompute

PLANS = 200
items = st.tuples(st.integers(1, 9), st.integers(0, 9))


@st.composite
def graphs(draw: st.DrawFn) -> ModelGraph:
    layers, hidden = draw(st.integers(1, 4)), draw(st.sampled_from([256, 512, 1024]))
    return transformer(layers, hidden, tied=draw(st.booleans()), distinct=draw(st.booleans()))


HOST = Host(Figure(6e9, "assumed: for a test"), Figure(20e9, "assumed: for a test"))
machines = st.builds(
    cluster,
    nodes=st.sampled_from([1, 2]),
    gpus=st.sampled_from([2, 4]),
    intra=st.sampled_from([1e9, 300e9]),
    overlaps=st.booleans(),
    launch_s=st.sampled_from([0.0, 1e-4, 1e-3, 1e-2]),
)


def by_vertices(taken: list[tuple[int, int]], needed: float) -> float | None:
    """Return the least cost by trying all: of a linear program with one row, one item at most is taken in part."""
    found = []
    for count in range(len(taken) + 1):
        for whole in combinations(range(len(taken)), count):
            gain, cost = (sum(taken[i][k] for i in whole) for k in (0, 1))
            if gain >= needed:
                found.append(float(cost))
            for part in set(range(len(taken))) - set(whole):
                if gain + taken[part][0] >= needed > gain:
                    found.append(cost + (needed - gain) / taken[part][0] * taken[part][1])
    return min(found, default=None)


@settings(max_examples=draws(100), deadline=None)
@given(st.lists(items, max_size=4), st.integers(-3, 40))
def test_the_knapsack_is_the_best_of_all_corners(taken: list[tuple[int, int]], needed: int) -> None:
    found, expected = least_cost(taken, needed), by_vertices(taken, needed)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("needed", [0.1 * n for n in range(1, 31)])
def test_a_need_that_all_items_together_meet_is_never_refused(needed: float) -> None:
    assert least_cost([(0.1, 1.0)] * 30, needed) == pytest.approx(10 * needed)


points = st.tuples(st.integers(0, 9), st.integers(-2, 9))


@settings(max_examples=draws(100), deadline=None)
@given(st.lists(st.lists(points, min_size=1, max_size=3), max_size=4), st.integers(-3, 30))
def test_whole_choices_are_those_that_none_is_better_than(groups: list[list[tuple[int, int]]], needed: int) -> None:
    every = product(*(range(len(group)) for group in groups))
    picked = {numbers: [group[k] for group, k in zip(groups, numbers, strict=True)] for numbers in every}
    sums = {numbers: [sum(point[i] for point in points) for i in (0, 1)] for numbers, points in picked.items()}
    enough = {(gain, cost) for gain, cost in sums.values() if gain >= needed}
    best = {(g, c) for g, c in enough if not any(h >= g and d <= c and (h, d) != (g, c) for h, d in enough)}
    found = whole_choices(groups, needed, 1000)
    assert found is not None
    assert [cost for cost, _ in found] == sorted(cost for _, cost in best)
    assert {(sums[numbers][0], cost) for cost, numbers in found} == best
    assert all(sums[numbers][1] == cost for cost, numbers in found)


@settings(max_examples=draws(4, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), machines, st.integers(1, 40), st.sampled_from([1, 3]), st.integers(0, 99))
def test_no_plan_that_fits_is_faster_than_the_ceiling(
    graph: ModelGraph, machine: Cluster, micro_batch: int, accumulation: int, seed: int
) -> None:
    space, random = Space(graph), np.random.default_rng(seed)
    load = space.known_load(Workload(machine, "adam", "fp32", micro_batch, accumulation))
    candidates = space.relaxed_candidates(load)
    counts = [len(candidates.options[stage_class]) for stage_class in candidates.stage_classes]
    drawn = [candidates.picked([int(random.integers(count)) for count in counts]) for _ in range(PLANS)]
    free_s = Ceiling(space, float("inf")).fewest_s(load)
    for options in drawn:
        # The plan's own peak is the tightest limit that it fits.
        fits_s = Ceiling(space, peak_memory(options, load).total_bytes).fewest_s(load)
        assert free_s is not None
        assert fits_s is not None
        assert free_s * (1 - 1e-12) <= fits_s <= step_time(options, load).total_s * (1 + 1e-12)


@settings(max_examples=draws(3, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), machines, st.booleans())
def test_candidates_do_not_depend_on_which_sizes_were_first(graph: ModelGraph, machine: Cluster, hosted: bool) -> None:
    machine = replace(machine, host=HOST if hosted else None)

    def candidates(space: Space, micro_batch: int, accumulation: int) -> CandidateSet:
        load = space.known_load(Workload(machine, "adam", "fp32", micro_batch, accumulation))
        return space.relaxed_candidates(load)

    shared = Space(graph)
    for sizes in ((1, 3), (17, 1), (4, 2)):
        first, alone = candidates(shared, *sizes), candidates(Space(graph), *sizes)
        assert (first.options, first.choices) == (alone.options, alone.choices)


def test_baselines_are_the_fastest_where_larger_micro_batches_were_measured_to_take_less() -> None:
    graph, machine, sizes = transformer(2, 256), cluster(nodes=2, gpus=2), tuple(range(1, 10))
    seconds = (0.01, 0.1, 0.001, 0.01, 0.0001, 0.01, 0.03, 0.1, 0.0003)
    keys = dict.fromkeys(call_key(graph, call) for call in graph.calls)
    times = tuple(CallTimes(key, key, sizes, seconds, seconds, (0.0,) * 9) for key in keys)
    machine = replace(machine, measured=Measured("2026-01-01", "drawn", 1, calls=times))
    space = Space(graph)
    loads = tuple(space.known_load(Workload(machine, "adam", "fp32", size)) for size in sizes)
    for found in baselines(space, loads, 1 << 40):
        if found.name in {"FSDP", "HSDP", "ZeRO-2"}:
            group = [s for s in strategies_on(machine) if s.spec.baseline == found.name and not s.offload]
            speeds = [
                load.samples_per_step / step_time(uniform(space, load, strategy, found.recompute), load).total_s
                for strategy, load in product(group, loads)
            ]
            assert found.samples_per_s == pytest.approx(max(speeds)), found.name


@pytest.mark.parametrize("room", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("pairs", [[(size, 1) for size in range(1, 10)], [(1, 8), (2, 4), (4, 2), (8, 1)]])
def test_baselines_are_the_fastest_of_all_micro_batches(pairs: list[tuple[int, int]], room: float) -> None:
    machine = cluster(nodes=2, gpus=2)
    space = Space(transformer(2, 256))
    loads = tuple(space.known_load(Workload(machine, "adam", "fp32", *pair)) for pair in pairs)
    group = [s for s in strategies_on(machine) if s.spec.baseline in {"FSDP", "HSDP"} and not s.offload]
    every = list[tuple[str, Recompute, float, float]]()
    for strategy, again, load in product(group, Recompute, loads):
        options = uniform(space, load, strategy, again)
        peak, speed = peak_memory(options, load).total_bytes, load.samples_per_step / step_time(options, load).total_s
        every.append((strategy.spec.baseline, again, peak, speed))
    smallest, largest = (end(peak for *_, peak, _ in every) for end in (min, max))
    limit_bytes = smallest + room * (largest - smallest) if room else 0.5 * smallest
    found = [b for b in baselines(space, loads, limit_bytes) if b.name in {"FSDP", "HSDP"}]
    assert {(b.name, b.recompute) for b in found} == set(
        product(("FSDP", "HSDP"), (Recompute.NOTHING, Recompute.EVERYTHING))
    )
    for baseline in found:
        alike = [row for row in every if row[:2] == (baseline.name, baseline.recompute)]
        fitting = [(speed, peak) for *_, peak, speed in alike if peak <= limit_bytes]
        assert baseline.feasible == bool(fitting)
        speed, peak = max(fitting) if fitting else min(((s, p) for *_, p, s in alike), key=itemgetter(1))
        assert (baseline.samples_per_s, baseline.peak_memory_bytes) == pytest.approx((speed, peak))
