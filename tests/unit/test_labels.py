"""Label setting against brute force over every plan, and its parts against what whole plans cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from synthetic import chain, cluster, transformer
from thoroughness import draws

from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidate_set import CandidateSet
from planner.options.dominance import Rows, undominated_rows
from planner.options.search_space import Space
from planner.solve.label_memory import HIGHEST, NOTHING_PLACED, OPTIMIZER, PEAKS, StageMemory, resources
from planner.solve.labels import LabelSetting
from planner.solve.lagrangian_bound import ChainBound, events_near
from planner.strategies.registry import strategies_on
from profiler.model_graph import ModelGraph

SLOW = settings(
    max_examples=draws(12, 250),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)

graphs = st.one_of(
    st.lists(st.tuples(st.integers(1, 6), st.floats(1, 100), st.floats(1, 200)), min_size=2, max_size=6).map(
        lambda rows: chain([(1024 * r, 1024) for r, _, _ in rows], [g for _, g, _ in rows], [s for _, _, s in rows])
    ),
    st.builds(
        lambda layers, tied, distinct: transformer(layers, 512, tied=tied, distinct=distinct),
        st.integers(1, 4),
        st.booleans(),
        st.booleans(),
    ),
)
machines = st.builds(
    cluster,
    nodes=st.sampled_from([1, 2]),
    gpus=st.sampled_from([2, 4]),
    intra=st.floats(1e9, 50e9),
    overlaps=st.sampled_from([True, True, False]),
    launch_s=st.sampled_from([0.0, 0.0, 3e-4]),
)


def some_candidates(graph: ModelGraph, load: Workload, seed: int) -> CandidateSet:
    """Return candidates with a few options of each class, taken at random, so that all plans can be tried."""
    random, space = np.random.default_rng(seed), Space(graph)
    spanning = random.choice(len(offered := space.spanning_offered(load)))
    found = space.candidates(load, offered[spanning])
    most = 2 if len(found.stage_classes) > 5 else 3
    # Owners, past whose stages buffers live on, are in a third of all.
    owned = [[any(s.spec.has_owner for s in choice.strategies) for choice in some] for some in found.choices]
    rows = []
    for is_owned in owned:
        order = random.permutation(len(is_owned))
        allowed = [int(k) for k in order if seed % 3 == 0 or not is_owned[k]]
        rows.append(sorted(allowed[:most]))
    found = found.only(rows)
    if seed % 5:
        return found
    # What stages share that are not recomputed, such as a mask: all kinds of stages alike.
    shared = float(random.integers(1, 50)) * 2**20

    def with_shared(one: CandidateSet) -> CandidateSet:
        options = tuple(
            tuple(option if option.recompute else replace(option, saved=option.saved + shared) for option in some)
            for some in one.options
        )
        return replace(one, options=options)

    return replace(with_shared(found), on_owners=tuple(map(with_shared, found.on_owners)))


def every_plan(candidates: CandidateSet) -> list[tuple[float, float, tuple[int, ...]]]:
    """Return (peak bytes, seconds, picks) of every plan, of the higher and slower of its ranks."""
    found, ranks = [], [candidates, *candidates.on_owners]
    for picks in product(*(range(len(candidates.options[c])) for c in candidates.stage_classes)):
        peak = max(peak_memory(one.picked(picks), one.load).total_bytes for one in ranks)
        found.append((peak, max(step_time(one.picked(picks), one.load).total_s + one.owned_s for one in ranks), picks))
    return found


def label_setting(candidates: CandidateSet, limit_bytes: float) -> tuple[LabelSetting, float]:
    """Return the label setting of candidates, and the bound that it begins with."""
    chain, stages = ChainBound(candidates), (0, len(candidates.stage_classes) // 2)
    bounds = [on_rank.bound(limit_bytes, events_near(candidates, 0)) for on_rank in chain.on_ranks]
    return LabelSetting(chain, limit_bytes, [price for _, price in bounds], stages), max(bound for bound, _ in bounds)


@SLOW
@given(graphs, machines, st.integers(1, 3), st.sampled_from([0.0, 0.02, 0.2, 0.6]), st.integers(0, 10**6))
def test_labels_equal_brute_force(
    graph: ModelGraph, machine: object, accumulation: int, fraction: float, seed: int
) -> None:
    load = Workload(machine, "adam", "fp32", 1 + seed % 3, accumulation)  # type: ignore[arg-type]
    candidates = some_candidates(graph, load, seed)
    plans = every_plan(candidates)
    limit = float(np.quantile([peak for peak, _, _ in plans], fraction)) * (1 + 1e-9)
    best_s = min(seconds for peak, seconds, _ in plans if peak <= limit)
    labels, bound_s = label_setting(candidates, limit)
    assert bound_s <= best_s * (1 + 1e-9)
    for width, tightened in ((1e-6, False), (0.5, False), (1e-6, True), (0.5, True)):
        if tightened:
            assert labels.tightened_s() <= best_s * (1 + 1e-9)
        run = labels.run(best_s * (1 + width))
        of_picks = {picks: (peak, seconds) for peak, seconds, picks in plans}
        fitting = [of_picks[picks][1] for picks in run.plans if of_picks[picks][0] <= limit]
        assert fitting[0] == pytest.approx(best_s, rel=1e-9)
        assert run.least_s == pytest.approx(best_s, rel=1e-8)
    # Nothing is found below the optimum, and what is rounded or left out makes the bound no higher than it.
    below = labels.run(best_s * (1 - 1e-6))
    assert best_s * (1 - 1e-6) * (1 - 1e-8) <= below.least_s <= best_s
    assert not list(below.plans)
    assert labels.run(best_s * 1.2, limit / 50).least_s <= best_s


@SLOW
@given(graphs, st.integers(1, 3), st.integers(0, 10**6))
def test_columns_of_a_whole_plan_are_its_peak(graph: ModelGraph, accumulation: int, seed: int) -> None:
    load = Workload(cluster(1, 4), "adam", "fp32", 1, accumulation)
    candidates = some_candidates(graph, load, seed)
    random = np.random.default_rng(seed)
    picks = tuple(int(random.integers(len(candidates.options[c]))) for c in candidates.stage_classes)
    held = NOTHING_PLACED
    for stage_class, pick in reversed(list(zip(candidates.stage_classes, picks, strict=True))):
        memory, option = StageMemory(candidates.columns[stage_class], load), np.array([pick])
        sums, held = memory.summed(held, np.zeros(1, dtype=np.intp), option), memory.extended(held, option)
        assert sums.pop(HIGHEST) <= resources(held).pop(HIGHEST)
        assert sums == {column: held[:, column] for column in sums}
    highest = max(held[0, PEAKS].max(), held[0, OPTIMIZER]) + load.fixed_bytes
    options = [replace(option, shared=0.0) for option in candidates.picked(picks)]
    assert highest == pytest.approx(peak_memory(options, load).total_bytes, rel=1e-12)


@SLOW
@given(graphs, st.integers(1, 3), st.floats(0.9, 1.1), st.integers(0, 10**6))
def test_pairs_that_are_ruled_out_at_once_do_not_fit(
    graph: ModelGraph, accumulation: int, factor: float, seed: int
) -> None:
    load = Workload(cluster(1, 4), "adam", "fp32", 1, accumulation)
    candidates = some_candidates(graph, load, seed)
    random = np.random.default_rng(seed)
    picks = tuple(int(random.integers(len(candidates.options[c]))) for c in candidates.stage_classes)
    on_ranks = candidates, *candidates.on_owners
    peak_bytes = max(peak_memory(one.picked(picks), load).total_bytes for one in on_ranks)
    labels, _ = label_setting(candidates, peak_bytes * max(factor, 1 + 1e-9))
    tight, _ = label_setting(candidates, peak_bytes * factor)
    for within, beyond in zip(labels.ranks, tight.ranks, strict=True):
        held = NOTHING_PLACED
        for index in reversed(range(len(picks))):
            every = np.arange(len(candidates.options[candidates.stage_classes[index]]))
            extended = beyond.memory[index].extended(np.repeat(held, len(every), axis=0), every)
            assert not (beyond.bounds.fits(index, extended) & ~beyond.bounds.may_fit(index, held)[0]).any()
            assert within.bounds.may_fit(index, held)[0, picks[index]]
            held = extended[[picks[index]]]


@cache
def of_unlike_blocks() -> tuple[Workload, CandidateSet]:
    """Return candidates for a model of blocks of which no two are alike."""
    load = Workload(cluster(1, 4, intra=2e9), "adam", "fp32", 2)
    return load, Space(transformer(4, 512, distinct=True)).candidates(load, strategies_on(load.cluster)[1])


def test_too_many_labels_lower_what_is_certified_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    load, candidates = of_unlike_blocks()
    limit = 0.5 * peak_memory(candidates.picked([0] * len(candidates.stage_classes)), load).total_bytes
    labels, bound_s = label_setting(candidates, limit)
    whole = labels.run(bound_s * 1.1)
    best = next(picks for picks in whole.plans if peak_memory(candidates.picked(picks), load).total_bytes <= limit)
    monkeypatch.setattr("planner.solve.labels.BEAM_KEPT", 2)
    few = labels.beam(bound_s * 1.1)
    assert few.made < whole.made
    assert few.dropped
    assert few.least_s <= step_time(candidates.picked(best), load).total_s


def test_few_stages_may_make_most_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    load, candidates = of_unlike_blocks()
    limit = 0.5 * peak_memory(candidates.picked([0] * len(candidates.stage_classes)), load).total_bytes
    labels, bound_s = label_setting(candidates, limit)
    best_s = labels.run(bound_s * 1.1).least_s
    for least in ("LEAST_MADE", "LEAST_KEPT"):
        monkeypatch.setattr(f"planner.solve.labels.{least}", 1)
    whole = labels.run(best_s * 1.02)
    half = whole.made // 2
    evenly, unevenly = (labels.run(best_s * 1.02, most_made=half, unevenly=some) for some in (False, True))
    assert evenly.dropped
    assert evenly.least_s < best_s * (1 - 1e-3)
    assert unevenly.least_s == pytest.approx(best_s)
    # Not more in sum, but for what every stage may have.
    assert evenly.made < unevenly.made <= half + len(candidates.stage_classes)


def test_plans_that_recompute_nothing_do_not_keep_what_stages_share() -> None:
    load = Workload(cluster(1, 2), "adam", "fp32", 2)
    found = Space(transformer(2, 512, tied=False)).candidates(load, None)
    shared = 64.0 * 2**20
    options = tuple(
        tuple(
            replace(o, takes=(0,)) if o.recompute else replace(o, saved=o.saved + shared, shared=shared, block=0)
            for o in some[:3] + some[-3:]
        )
        for some in found.options
    )
    choices = tuple(some[:3] + some[-3:] for some in found.choices)
    with_shared = replace(found, options=options, choices=choices)
    alone = with_shared.sharing(())
    assert with_shared.shared_by == (0,)
    assert alone.shared_by == ()
    assert with_shared.sharing((0,)) is with_shared
    plans = [(*costs, with_shared.picked(picks)) for *costs, picks in every_plan(with_shared)]
    kept = [(peak, seconds) for peak, seconds, options in plans if not any(option.recompute for option in options)]
    those = [(peak, seconds) for peak, seconds, _ in every_plan(alone)]
    np.testing.assert_allclose(sorted(kept), sorted(those), rtol=1e-12)
    # Where the smallest of them fits just so, the bound of the set is its time.
    limit, best_s = min((peak, seconds) for peak, seconds, _ in every_plan(alone))
    labels, _ = label_setting(alone, limit * (1 + 1e-9))
    assert labels.run(best_s * (1 + 1e-6)).least_s == pytest.approx(best_s, rel=1e-8)


def test_rows_that_are_equal_or_worse_are_dominated() -> None:
    rows = np.array([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [0.0, 9.0]])
    assert sorted(undominated_rows(rows)) == [0, 2, 4]
    many = np.random.default_rng(0).integers(0, 9, (400, 4)).astype(float)
    kept = {tuple(row) for row in many[undominated_rows(many)]}
    better = {tuple(row) for row in many if not any((other <= row).all() and (other != row).any() for other in many)}
    assert kept == better


@pytest.mark.parametrize("count", [1, 100, 129, 1024, 1500, 2600])
def test_undominated_rows_are_those_of_all_pairs(count: int) -> None:
    draw = np.random.default_rng(count)
    rows = draw.integers(0, 12, (count, 4)).astype(float)
    rows[draw.random(rows.shape) < 0.05] = -np.inf
    at_most = (rows[:, None] <= rows).all(axis=2)
    is_first = np.arange(count)[:, None] < np.arange(count)
    beaten = at_most & (~at_most.T | is_first)  # by one that is better, or equal and earlier
    assert sorted(undominated_rows(rows)) == [*np.flatnonzero(~beaten.any(axis=0))]
    sets = Rows(rows).at_most(rows)
    bits = (sets[:, np.arange(count) // 64] >> (np.arange(count) % 64).astype(np.uint64)) & np.uint64(1)
    assert (bits.astype(bool) == at_most.T).all()
