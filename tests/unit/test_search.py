"""The integer program, the bound and the search: what they promise, and brute force over every plan."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import cache
from itertools import count, pairwise, product
from typing import Any
from unittest.mock import patch

import numpy as np
import pulp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import chain, cluster, transformer
from thoroughness import THOROUGH, draws

from planner.cost.peak_memory import peak_memory
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidate_set import CandidateSet
from planner.options.search_space import Space
from planner.pricing import PricedPlan
from planner.problem import Task, micro_batches
from planner.search.least_memory import smallest_of, smallest_plan
from planner.search.search import Effort, Found, _Above, _Point, _Sweep, search
from planner.solve.counting_ilp import MANY_OPTIONS, SECONDS, CountingProgram, fastest, make_solver, supported
from planner.solve.lagrangian_bound import ChainBound, events_near
from planner.solve.solve_candidates import MUCH, has_runs, programmed
from planner.strategies.registry import strategies_on
from profiler.byte_sizes import whole_mib
from profiler.cluster.cluster import Cluster
from profiler.cluster.figure import Figure
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph

GIB = 2**30

SLOW = settings(max_examples=draws(4, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def chains(draw: st.DrawFn, most: int = 5) -> ModelGraph:
    """Chains of operators of at least a million parameters (each its own stage), in any order."""
    count = draw(st.integers(2, most))
    rows = draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    gflops = draw(st.lists(st.floats(1, 100), min_size=count, max_size=count))
    saved = draw(st.lists(st.floats(1, 200), min_size=count, max_size=count))
    return chain([(1024 * r, 1024) for r in rows], gflops, saved)


machines = st.builds(
    cluster,
    nodes=st.sampled_from([1, 2]),
    gpus=st.sampled_from([2, 4]),
    intra=st.floats(1e9, 50e9),
    inter=st.floats(0.5e9, 5e9),
    overlaps=st.booleans(),
    launch_s=st.sampled_from([0.0, 0.0, 3e-4]),
)


def some_of(menu: CandidateSet, seed: int, most: int = 4) -> CandidateSet:
    """Return the menu with a few options of each kind, taken at random, so that all plans can be tried."""
    random = np.random.default_rng(seed)
    return menu.only([sorted(random.permutation(len(options))[:most]) for options in menu.options])


seeds = st.integers(0, 10**6)


def every_plan(menu: CandidateSet) -> list[tuple[StageCandidate, ...]]:
    return list(product(*(menu.options[kind] for kind in menu.stage_classes)))


def brute_force(menu: CandidateSet, limit: float) -> float | None:
    """Return the least step time of any plan that fits, by trying all."""
    times = [
        step_time(options, menu.load).total_s
        for options in every_plan(menu)
        if peak_memory(options, menu.load).total_bytes <= limit
    ]
    return min(times, default=None)


def a_limit(menu: CandidateSet, fraction: float) -> float:
    """Return a limit between what the smallest and the largest plan need."""
    peaks = [peak_memory(options, menu.load).total_bytes for options in every_plan(menu)]
    return min(peaks) + fraction * (max(peaks) - min(peaks))


@SLOW
@given(chains(most=4), machines, st.integers(1, 3), st.floats(0, 1), seeds)
def test_bound_holds_for_every_plan(
    graph: ModelGraph, machine: Cluster, accumulation: int, fraction: float, seed: int
) -> None:
    menu = some_of(Space(graph).candidates(Workload(machine, "adam", "fp32", 1, accumulation), None), seed)
    limit = a_limit(menu, fraction)
    best = brute_force(menu, limit)
    assert best is not None
    for stage in (None, *range(len(menu.stage_classes))):
        assert ChainBound(menu).bound(limit, events_near(menu, stage))[0] <= best * (1 + 1e-9)


@SLOW
@given(chains(most=4), machines, st.floats(0, 1), seeds)
def test_dynamic_program_is_the_minimum_over_sequences(
    graph: ModelGraph, machine: Cluster, price: float, seed: int
) -> None:
    menu = some_of(Space(graph).candidates(Workload(machine, "adam", "fp32", 1, 2), None), seed)
    chain_bound, place = ChainBound(menu), events_near(menu, None)[0]
    memory, per_byte = chain_bound.memory(place), price * 1e-10

    def priced(picks: tuple[int, ...]) -> float:
        options = [menu.options[kind][k] for kind, k in zip(menu.stage_classes, picks, strict=True)]
        held = sum(memory[i][k] for i, k in enumerate(picks))
        return step_time(options, menu.load).total_s + per_byte * float(held)

    every = product(*(range(len(menu.options[kind])) for kind in menu.stage_classes))
    least = min(priced(picks) for picks in every)
    found = float(chain_bound.least(chain_bound.stage_bytes(place), np.array([per_byte]))[0])
    assert found == pytest.approx(least, rel=1e-9)
    assert priced(chain_bound.sequence(memory, per_byte)) == pytest.approx(least, rel=1e-9)


def steady_s(option: StageCandidate, load: Workload) -> float:
    """Return what one more stage adds to a long run of an option: of four, the one that three do not have."""
    return step_time([option] * 4, load).total_s - step_time([option] * 3, load).total_s


@settings(SLOW, max_examples=draws(3, 40))
@given(st.integers(11, 14), st.floats(0.1, 0.9), st.booleans())
def test_counted_objective_is_the_pure_function(layers: int, fraction: float, overlaps: bool) -> None:
    graph = transformer(layers, 256)
    load = Workload(cluster(1, 4, overlaps=overlaps), "adam", "fp32", 1)
    menu = Space(graph).candidates(load, strategies_on(load.cluster)[1])
    small = peak_memory(CountingProgram.smallest(menu).options, menu.load).total_bytes
    limit = small * (1 + fraction)
    solution = fastest(menu, limit)
    assert solution is not None
    counted_s = sum(steady_s(option, load) for option in solution.options)
    assert solution.objective_s == pytest.approx(counted_s, rel=1e-6)
    assert peak_memory(solution.options, menu.load).total_bytes <= limit


@pytest.mark.parametrize(("layers", "tied"), [(1, False), (2, True)])
def test_the_program_finds_nothing_below_what_any_plan_needs(layers: int, tied: bool) -> None:
    load = Workload(cluster(1, 4), "adam", "fp32", 1)
    menu = Space(transformer(layers, 256, tied=tied)).candidates(load, strategies_on(load.cluster)[1])
    every = product(*(menu.options[kind] for kind in menu.stage_classes))
    least = min(peak_memory(options, load).total_bytes for options in every)
    found = CountingProgram.smallest(menu, least * (1 + 1e-4))
    assert found is not None
    assert peak_memory(found.options, load).total_bytes == least
    assert CountingProgram.smallest(menu, least / 2) is None


def test_a_process_that_forks_after_a_search_can_search() -> None:
    load = Workload(cluster(1, 4), "adam", "fp32", 1)
    menu = Space(transformer(14, 256)).candidates(load, strategies_on(load.cluster)[1])
    CountingProgram.smallest(menu)
    child = multiprocessing.get_context("fork").Process(target=CountingProgram.smallest, args=(menu,))
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert child.exitcode == 0


def test_the_program_keeps_what_is_cheapest_at_any_price_of_memory() -> None:
    machine = cluster(nodes=2, gpus=8, intra=300e9)
    load = Workload(machine, "adam", "fp32", micro_batch=8)
    candidates = Space(transformer(12, 1024, tied=False)).candidates(load, None)
    options = max(candidates.options, key=len)
    assert len(options) > MANY_OPTIONS
    kept = supported(max(candidates.columns, key=len), load)
    assert len(kept) < MANY_OPTIONS

    def costs(option: StageCandidate) -> list[float]:
        top = max(option.bytes_at(moment) for moment in option.moments)
        held = [option.saved + option.kept, option.gradients + option.reduced_after_backward]
        return [steady_s(option, load), *(option.rest + part for part in held), top]

    spread = [(min(column), max(column)) for column in zip(*map(costs, options), strict=True)]
    for prices in product((0.1, 1.0), repeat=3):
        totals = [
            sum(w * (c - low) / (high - low) for w, c, (low, high) in zip((1, *prices), costs(o), spread, strict=True))
            for o in options
        ]
        assert min(totals) == pytest.approx(min(totals[k] for k in kept))
    # On a model of many blocks the plan is the one that the program finds with all options.
    limit = 0.5 * peak_memory([options[0]] * len(candidates.stage_classes), load).total_bytes
    program = CountingProgram(candidates, limit)
    program.minimise_time()
    whole, few = program.solve(limit), fastest(candidates, limit)
    assert whole is not None
    assert few is not None
    assert few.objective_s == pytest.approx(whole.objective_s, rel=2e-3)
    assert few.options == candidates.picked(few.picks)


@settings(SLOW, max_examples=draws(2))
@given(
    st.integers(2, 6 if THOROUGH else 3), st.floats(1.02, 2.0), st.sampled_from([Effort(labels=0), Effort(seconds=0.0)])
)
def test_a_search_with_less_effort_finds_a_plan_and_a_bound_that_hold(
    layers: int, factor: float, effort: Effort
) -> None:
    graph, machine = transformer(layers, 512), cluster(1, 4, intra=2e9)
    task = Task(graph, machine, int(smallest_limit(graph, machine) * factor), micro_batch=1)
    found, whole = search(task, effort=effort), search(task)
    assert peak_memory(found.options, found.load).total_bytes <= task.limit_bytes
    assert found.bound_samples_per_s >= whole.samples_per_s >= found.samples_per_s * (1 - 1e-12)


def test_a_time_limit_ends_the_search() -> None:
    # Layers of which no two are alike take seconds within a tight limit.
    graph, machine = transformer(10 if THOROUGH else 3, 512, distinct=True), cluster(2, 4, intra=2e9)
    task = Task(graph, machine, int(1.1 * smallest_limit(graph, machine)))
    space = Space(graph)
    search(task, space=space, effort=Effort(seconds=0.0))  # what bounds need is made once
    with patch("planner.search.search.time.perf_counter", side_effect=count(0.0, 0.25)):
        looked = search(task, space=space, effort=Effort(seconds=1.0))
    assert looked.search_s <= 3.0  # in looks at the clock of a quarter of a second each
    assert looked.bound_samples_per_s > looked.samples_per_s


def test_the_solver_has_no_longer_than_the_search() -> None:
    graph, machine, given_s = transformer(2, 512), cluster(1, 4, intra=2e9), list[float]()
    task = Task(graph, machine, int(1.2 * smallest_limit(graph, machine)), micro_batch=1)

    def noted(gap: float, seconds: float) -> pulp.LpSolver:
        given_s.append(seconds)
        return make_solver(gap, seconds)

    with patch("planner.solve.counting_ilp.make_solver", side_effect=noted):
        search(task, effort=Effort(labels=0, seconds=9.0))
        assert given_s
        assert all(0.0 < seconds <= 9.0 for seconds in given_s)
        given_s.clear()
        search(task, effort=Effort(labels=0))
        assert set(given_s) == {SECONDS}
    space = Space(graph)
    load = Workload.of(graph, machine, task.optimizer, 1)
    candidates = space.candidates(load, space.spanning_offered(load)[0])
    assert fastest(candidates, 1 << 40)
    assert not fastest(candidates, 1 << 40, ends_at=0.0)


@cache
def known_search() -> tuple[Task, Found]:
    """Return a question and what a search finds for it."""
    graph, machine = transformer(4, 512, selective=0.5), cluster(1, 4, intra=2e9)
    task = Task(graph, machine, int(1.2 * smallest_limit(graph, machine)), micro_batch=1)
    return task, search(task)


@pytest.mark.parametrize(("unproven", "lacks_labels", "times"), [(0.9, True, 1), (1.1, True, 2), (1.1, False, 1)])
def test_few_options_are_searched_only_where_labels_lacked_and_much_is_unproven(
    unproven: float, lacks_labels: bool, times: int
) -> None:
    (task, known), of_core, top = known_search(), list[bool](), 1 + unproven * MUCH

    def noted(sweep: _Sweep, queue: object, space: Space, incumbent: PricedPlan | None) -> object:
        plan = PricedPlan(known.load, known.space, known.spanning, known.options)
        of_core.append(sweep.core)
        return plan, plan.samples_per_s * top, lacks_labels

    with patch.object(_Sweep, "best_first", noted):
        assert search(task).bound_samples_per_s == pytest.approx(known.samples_per_s * top)
    assert of_core == [False, True][:times]


@settings(SLOW, max_examples=draws(2))
@given(st.integers(2, 14 if THOROUGH else 4), st.floats(1.02, 3.0), st.booleans())
def test_found_plan_fits_and_beats_every_baseline(layers: int, factor: float, overlaps: bool) -> None:
    graph, machine = transformer(layers, 512), cluster(1, 4, intra=2e9, overlaps=overlaps)
    limit = int(smallest_limit(graph, machine) * factor)
    found = search(Task(graph, machine, limit))
    assert peak_memory(found.options, found.load).total_bytes <= limit
    speed = found.load.samples_per_step / step_time(found.options, found.load).total_s
    assert speed == pytest.approx(found.samples_per_s, rel=1e-12)
    for baseline in found.baselines:
        assert not baseline.feasible or baseline.samples_per_s <= found.samples_per_s
    assert found.bound_samples_per_s >= found.samples_per_s


def smallest_limit(graph: ModelGraph, machine: Cluster) -> int:
    """Return the whole MiB that the plan of least memory needs, in bytes."""
    return whole_mib(smallest_plan(Space(graph), Workload(machine, "adam", "fp32", 1)).peak.total_bytes)


@pytest.mark.parametrize("layers", [2, *([3, 12] if THOROUGH else [])])
def test_the_smallest_limit_that_a_refusal_names_is_enough(layers: int) -> None:
    graph, machine = transformer(layers, 512), cluster(1, 4)
    with pytest.raises(OsdpError, match="no plan fits") as refused:
        search(Task(graph, machine, 1 << 20), effort=Effort(remedies=False))
    limit = int(refused.value.advice.split("MB")[0].split()[-1]) * 2**20
    assert limit == smallest_limit(graph, machine)
    assert search(Task(graph, machine, limit)).load.micro_batch == 1
    with pytest.raises(OsdpError, match="no plan fits"):
        search(Task(graph, machine, int(limit * 0.97)), effort=Effort(remedies=False))


@settings(SLOW, max_examples=draws(2, 30))
@given(chains(most=4), st.booleans(), st.lists(st.floats(1.0, 4.0), min_size=3, max_size=3))
def test_more_memory_is_never_slower(graph: ModelGraph, overlaps: bool, factors: list[float]) -> None:
    machine = cluster(1, 4, intra=2e9, overlaps=overlaps)
    least = smallest_limit(graph, machine)
    speeds = [search(Task(graph, machine, int(least * factor))).samples_per_s for factor in sorted(factors)]
    assert all(before <= after * (1 + 1e-6) for before, after in pairwise(speeds))


@settings(SLOW, max_examples=draws(3))
@given(chains(most=4), st.booleans(), st.floats(1.0, 20.0))
def test_more_bandwidth_is_never_slower(graph: ModelGraph, overlaps: bool, factor: float) -> None:
    slow = cluster(1, 4, intra=1e9, overlaps=overlaps)
    link = replace(slow.intra, bytes_per_s=Figure(1e9 * factor, "assumed: test"))
    limit = int(smallest_limit(graph, slow) * 1.3)
    first = search(Task(graph, slow, limit))
    second = search(Task(graph, replace(slow, intra=link), limit))
    assert second.samples_per_s >= first.samples_per_s * (1 - 1e-6)


def test_memory_limits_of_a_real_size_are_monotone() -> None:
    graph, machine = transformer(24 if THOROUGH else 4, 1024), cluster(1, 8, intra=5e9)
    least = smallest_limit(graph, machine) if THOROUGH else 400 * 2**20  # which to find takes longest
    found = [
        search(Task(graph, machine, int(least * factor)))
        for factor in ((1.0, 1.5, 2.5, 4.0) if THOROUGH else (1.25, 4.0))
    ]
    for smaller, larger in pairwise(found):
        # A certified gap is what the search may be off by.
        assert larger.samples_per_s >= smaller.samples_per_s * (1 - larger.gap) - 1e-9


def test_fixed_micro_batch_is_kept() -> None:
    found = search(Task(transformer(4, 512), cluster(1, 4), 8 * GIB, micro_batch=3))
    assert (found.load.micro_batch, found.load.accumulation) == (3, 1)


def test_global_batch_is_split_exactly() -> None:
    machine = cluster(1, 4)
    graph = transformer(4, 512)
    pairs = micro_batches(Task(graph, machine, GIB, global_batch=48))
    assert pairs == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    found = search(Task(graph, machine, 8 * GIB, global_batch=48))
    assert found.load.samples_per_step == 48
    with pytest.raises(OsdpError, match="multiple of 4"):
        micro_batches(Task(graph, machine, GIB, global_batch=50))
    with pytest.raises(OsdpError, match="does not divide"):
        micro_batches(Task(graph, machine, GIB, global_batch=48, micro_batch=5))


def test_one_rank_has_nothing_to_shard() -> None:
    found = search(Task(transformer(3, 256), cluster(1, 1), 8 * GIB))
    assert {str(s) for option in found.options for s in option.strategies} == {"replicate"}


def test_uneven_blocks_are_told_apart() -> None:
    graph = transformer(4, 256, distinct=True)
    space = Space(graph)
    pairs = zip(space.stage_classes, space.model.stages, strict=True)
    assert len({kind for kind, stage in pairs if stage.block is not None}) == 4
    assert search(Task(graph, cluster(1, 4), 2 * GIB)).gap < 0.01


UNLIKE = chain([(512 + 64 * k, 576 + 64 * k) for k in range(8)], [0.5] * 8, [6.0] * 8)


@pytest.mark.parametrize(("graph", "solved"), [(transformer(4, 512), [True]), (UNLIKE, [])])
def test_the_program_comes_first_where_stages_are_alike(
    graph: ModelGraph, solved: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere a beam of labels finds a plan without it."""
    noted = list[bool]()

    def programmed_and_noted(*arguments: Any) -> Any:
        noted.append(has_runs(arguments[0]))
        return programmed(*arguments)

    monkeypatch.setattr("planner.search.search.programmed", programmed_and_noted)
    space, machine = Space(graph), cluster(1, 4)
    smallest = smallest_of(space, [Workload(machine, "adam", "fp32", 1)], float("inf"))
    found = search(Task(graph, machine, int(1.1 * smallest.peak.total_bytes), micro_batch=1), space=space)
    assert found.gap < 1e-3
    assert noted == solved


@pytest.mark.parametrize("known", [4.0, 6.0])
def test_a_search_that_ends_uses_what_it_knows_of_all_strategies_together(known: float) -> None:
    """No plan of a strategy of tied operators is faster than the fastest of all strategies."""
    space = Space(transformer(1, 64, tied=False))
    load = Workload(cluster(), "adam", "fp32", 1)
    candidates = space.candidates(load, None, True)
    strategies = [
        _Point(ChainBound(candidates), bound, full=True, prices=(0.0,), relaxed=False, above=_Above(known))
        for bound in (9.0, 5.0)
    ]
    sweep = _Sweep((load,), 1 << 40, 0.0, ends_at=0.0, labels=1, progress=lambda what, fraction: None)
    assert sweep.best_first([*strategies], space, None)[1] == known
    assert sweep.best_first([replace(point, above=None) for point in strategies], space, None)[1] == 9.0
