"""Plans whose ranks differ by what they own, where the fullest of them is what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise, product
from operator import itemgetter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import cluster, transformer
from test_labels import every_plan, label_setting
from test_space_search import HOST, SLOW, small_chain
from thoroughness import THOROUGH, draws

from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.model.stages import Stage
from planner.options.candidate_set import CandidateSet
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import priced
from planner.problem import Task
from planner.search.least_memory import smallest_of
from planner.search.search import search
from planner.strategies.owner_assignment import least_of_fullest
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError

machines = st.builds(
    lambda ranks, host, intra: replace(cluster(*ranks, intra=intra, inter=intra / 3), host=HOST if host else None),
    st.sampled_from([(1, 4), (2, 2), (1, 8)]),
    st.booleans(),
    st.floats(2e9, 2e10),
)


@SLOW
@given(machines, st.booleans(), st.integers(1, 2), st.integers(0, 10**6))
def test_some_rank_of_a_plan_holds_what_it_is_said_to_own(
    machine: Cluster, tied: bool, accumulation: int, seed: int
) -> None:
    graph, draw = transformer(2, 1024, tied=tied), Random(seed)
    space, load = Space(graph), Workload(machine, "adam", "fp32", 1, accumulation)
    spanning = draw.choice(space.spanning_offered(load))
    for in_seconds in (False, True):
        ranges = [*space.owned_ranges(load, in_seconds=in_seconds)]
        assert all(one.least <= one.most < after.least for one, after in pairwise(ranges))
        assert ranges[0].least == 0
        assert (ranges[-1].most > 0) == (not in_seconds or machine.host is not None)
        for owned in ranges:
            candidates = space.owning(load, spanning, True, owned)
            given_to = [
                [space.owned(stage_class, choice, load, in_seconds)[0] for choice in some]
                for stage_class, some in enumerate(candidates.choices)
            ]
            assert all(max(some) <= owned.most for some in given_to)
            # Of each class of stages those that give most, and any others.
            most = [[k for k, given in enumerate(some) if given == max(some)] for some in given_to]
            for _ in range(8):
                picks = [draw.choice(draw.choice((most[c], range(len(given_to[c]))))) for c in candidates.stage_classes]
                if max(given_to[c][k] for c, k in zip(candidates.stage_classes, picks, strict=True)) < owned.least:
                    continue
                plan = priced(space, load, candidates.chosen(picks), spanning)
                taken_s = step_time(plan.options, load).total_s
                for on_rank in (candidates, *candidates.on_owners):
                    bound = on_rank.picked(picks)
                    assert peak_memory(bound, load).total_bytes + on_rank.owned_bytes <= plan.peak.total_bytes
                    assert step_time(bound, load).total_s + on_rank.owned_s <= taken_s * (1 + 1e-9)


@SLOW
@given(machines, st.booleans(), st.sampled_from([0.02, 0.3, 0.8]), st.integers(0, 10**6))
def test_labels_on_the_rank_that_steps_longest_equal_brute_force(
    machine: Cluster, tied: bool, fraction: float, seed: int
) -> None:
    graph, draw = transformer(1 + seed % 2, 1024, tied=tied), Random(seed)
    space, load = Space(graph), Workload(replace(machine, host=HOST), "adam", "fp32", 1 + seed % 3)
    spanning = draw.choice([None, draw.choice(space.spanning_offered(load))])
    owned = draw.choice([*space.owned_ranges(load, in_seconds=True)])
    candidates = space.owning(load, spanning, True, owned)
    given_to = [[space.owned(c, choice, load, True)[0] for choice in some] for c, some in enumerate(candidates.choices)]
    owners = [[k for k, given in enumerate(some) if given >= owned.least] for some in given_to]
    kept = [{draw.randrange(len(some)), draw.choice(own or [0])} for some, own in zip(given_to, owners, strict=True)]
    candidates = candidates.only([sorted(rows) for rows in kept])
    plans = every_plan(candidates)
    limit = sorted(peak for peak, _, _ in plans)[int(fraction * (len(plans) - 1))] * (1 + 1e-9)
    best_s = min(seconds for peak, seconds, _ in plans if peak <= limit)
    labels, bound_s = label_setting(candidates, limit)
    assert bound_s <= best_s * (1 + 1e-9)
    for is_tightened in (False, True):
        if is_tightened:
            assert labels.tightened_s() <= best_s * (1 + 1e-9)
        assert labels.run(best_s * 1.5).least_s == pytest.approx(best_s, rel=1e-8)
        assert labels.run(best_s * (1 - 1e-6)).least_s == pytest.approx(best_s, rel=2e-6)
        assert labels.run(best_s * 1.2, limit / 50).least_s <= best_s


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 3))
def test_some_rank_has_no_less_however_units_are_shared(sizes: list[int], ranks: int) -> None:
    least = min(
        max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in product(range(ranks), repeat=len(sizes))
    )
    assert max(sizes, default=0) <= least_of_fullest(sizes, ranks) <= least


def test_some_rank_has_two_of_one_unit_more_than_there_are_ranks() -> None:
    assert least_of_fullest([3, 1, 4, 2], 4) == 4
    assert least_of_fullest([3, 3, 4, 2, 1], 4) == 4
    assert least_of_fullest([3, 3, 3, 3, 2], 4) == 5
    assert least_of_fullest([3] * 9, 4) == 9


@SLOW
@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), machines, st.floats(1.0, 1.5), st.integers(1, 2))
def test_no_plan_with_owners_is_faster_than_the_bound(
    rows: list[int], machine: Cluster, factor: float, accumulation: int
) -> None:
    graph = small_chain(tuple(rows))
    space, load = Space(graph), Workload(machine, "adam", "fp32", 1, accumulation)
    offered = [s for s in strategies_on(machine) if str(s).split("+")[0] in ("owner", "shard", "replicate")]
    plans = list[tuple[float, float]]()
    for taken in product(offered, repeat=len(space.model.stages)):
        choices = [_whole(stage, strategy) for stage, strategy in zip(space.model.stages, taken, strict=True)]
        plan = priced(space, load, choices, None)
        plans.append((plan.peak.total_bytes, plan.samples_per_s))
    limit = int(min(map(itemgetter(0), plans)) * factor) + 1
    best = max(speed for peak_bytes, speed in plans if peak_bytes <= limit)
    found = search(Task(graph, machine, limit, global_batch=accumulation * machine.world_size))
    assert best <= found.bound_samples_per_s * (1 + 1e-9)
    assert found.samples_per_s >= best * (1 - found.gap) * (1 - 1e-9)


def _whole(stage: Stage, strategy: object) -> StageDecision:
    return StageDecision((strategy,) * len(stage.operators))  # type: ignore[arg-type]


@settings(SLOW, max_examples=draws(2, 40))
@given(machines, st.integers(1, 2), st.floats(1.02, 1.5), st.integers(0, 10**6))
def test_labels_of_all_strategies_of_an_embedding_bound_those_of_each(
    machine: Cluster, accumulation: int, factor: float, seed: int
) -> None:
    graph = transformer(2, 1024, tied=True, vocabulary=2048 << seed % 4)
    space, load = Space(graph), Workload(machine, "adam", "fp32", 1 + seed % 2, accumulation)
    limit = factor * smallest_of(space, (load,), float("inf")).peak.total_bytes
    together, bound_s = label_setting(space.relaxed_candidates(load), limit)
    for spanning in space.spanning_offered(load):
        candidates = space.candidates(load, spanning)
        labels, own_s = label_setting(candidates, limit)
        fitting = (picks for picks in labels.run(4 * own_s, most_made=5_000).plans if _fits(candidates, picks, limit))
        for picks in islice(fitting, 1):
            seconds = step_time(candidates.picked(picks), load).total_s
            assert bound_s <= seconds * (1 + 1e-9)
            assert together.run(seconds * (1 + 1e-6), most_made=5_000).least_s <= seconds * (1 + 1e-9)


def _fits(candidates: CandidateSet, picks: Sequence[int], limit: float) -> bool:
    on_ranks = candidates, *candidates.on_owners
    return all(peak_memory(some.picked(picks), some.load).total_bytes <= limit for some in on_ranks)


@pytest.mark.parametrize(("ranks", "factor"), [(4, 1.05), (4, 1.2), *([(8, 1.4)] if THOROUGH else [])])
def test_owners_that_do_not_fit_are_not_in_the_bound(
    ranks: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, machine = transformer(3, 512, tied=False), cluster(1, ranks, intra=5e9)
    loads = (Workload(machine, "adam", "fp32", 1),)
    limit = int(factor * smallest_of(Space(graph), loads, float("inf")).peak.total_bytes) + 1
    found = search(Task(graph, machine, limit, micro_batch=1))
    assert found.gap < 1e-3
    monkeypatch.setattr("planner.search.search._Point.exceeds_on_owner", False)
    on_mean = search(Task(graph, machine, limit, micro_batch=1))
    assert on_mean.gap > 0.03
    assert on_mean.samples_per_s <= found.samples_per_s
    assert found.bound_samples_per_s < on_mean.bound_samples_per_s


def test_a_rank_that_steps_what_it_owns_for_longer_is_in_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, machine = transformer(3, 1024, tied=False), replace(cluster(1, 8, intra=2e9), host=HOST)
    loads = (Workload(machine, "adam", "fp32", 1),)
    limit = int(1.35 * smallest_of(Space(graph), loads, float("inf")).peak.total_bytes) + 1
    found = search(Task(graph, machine, limit, micro_batch=1))
    assert found.gap < 1e-3
    monkeypatch.setattr("planner.search.search._Point.waits_for_owner", False)
    on_mean = search(Task(graph, machine, limit, micro_batch=1))
    assert on_mean.gap > 4e-3
    assert on_mean.samples_per_s <= found.samples_per_s


@SLOW
@given(st.integers(2, 4), machines)
def test_the_mean_over_ranks_is_no_more_than_the_fullest(ops: int, machine: Cluster) -> None:
    graph = small_chain(tuple(range(1, ops + 1)))
    space = Space(graph)
    load = Workload(machine, "adam", "fp32", 1)
    owner = Strategy("owner", machine.world_size)
    choices = [StageDecision((owner,)) for _ in space.stage_classes]
    mean = [space.option(kind, c, None, load, None) for kind, c in zip(space.stage_classes, choices, strict=True)]
    fullest = priced(space, load, choices, None).options
    assert peak_memory(mean, load).total_bytes <= peak_memory(fullest, load).total_bytes
    rests = 4 * 4 * graph.numel / machine.world_size  # S, OPT and SG of Adam in fp32, evenly
    held = sum(option.rest + option.gradients for option in mean)
    assert held == pytest.approx(rests, rel=1e-2)


def test_a_plan_whose_fullest_rank_does_not_fit_is_not_called_feasible() -> None:
    # One large operator and one small: on average each rank owns half, in truth one owns the large one.
    graph, machine = small_chain((4, 1)), cluster(1, 2, intra=1e9)
    for limit in range(140, 400, 20):
        try:
            found = search(Task(graph, machine, limit << 20, micro_batch=1))
        except OsdpError:
            continue
        assert peak_memory(found.options, found.load).total_bytes <= limit << 20
