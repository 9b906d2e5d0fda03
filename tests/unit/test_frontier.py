"""The frontier: what separate searches find, and never slower with more memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain, cluster, transformer
from thoroughness import THOROUGH, draws

import planner.analysis.frontier
from planner.analysis.frontier import frontier
from planner.pricing import make_plan
from planner.problem import Task
from planner.search.search import Found, search
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph

LIMITS = (60 * MIB, 120 * MIB, *([200 * MIB] if THOROUGH else []), 320 * MIB, *([1 * GIB] if THOROUGH else []), 4 * GIB)


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return transformer(2, 512)


@pytest.fixture(scope="module")
def machine() -> Cluster:
    return cluster(1, 4)


def test_every_point_is_what_a_search_of_its_own_finds(graph: ModelGraph, machine: Cluster) -> None:
    """Of four limits; of six with --thorough."""
    task = Task(graph, machine, 0)
    points = frontier(task, [*reversed(LIMITS), 320 * MIB])
    assert [point.limit_bytes for point in points] == list(LIMITS)
    speed = 0.0
    for point in points:
        alone = replace(task, limit_bytes=point.limit_bytes)
        if point.found is None:
            assert point.refusal is not None
            with pytest.raises(OsdpError) as refused:
                search(alone)
            assert str(refused.value) == str(point.refusal)
            continue
        own = search(alone)
        # Taken over only if faster, and never faster than any bound allows.
        assert point.found.samples_per_s >= own.samples_per_s
        assert point.found.samples_per_s <= own.bound_samples_per_s * (1 + 1e-9)
        if point.taken_from_bytes is None:
            assert point.found.samples_per_s == own.samples_per_s
        assert point.found.bound_samples_per_s <= own.bound_samples_per_s * (1 + 1e-9)
        plan = make_plan(
            point.found.options,
            point.found.spanning,
            point.found.space,
            point.found.load,
            limit_bytes=point.limit_bytes,
            gap=point.found.gap,
        )
        assert plan.predicted.peak_memory_bytes <= point.limit_bytes
        assert plan.predicted.samples_per_s == pytest.approx(point.found.samples_per_s)
        assert point.found.samples_per_s >= speed
        speed = point.found.samples_per_s
    # Something of both kinds was seen.
    assert points[0].found is None
    assert points[-1].found is not None


def test_a_faster_plan_of_a_smaller_limit_is_taken_over(
    graph: ModelGraph, machine: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = search(Task(graph, machine, 1 * GIB))
    bad = search(Task(graph, machine, 320 * MIB))
    assert bad.samples_per_s < good.samples_per_s

    def unlucky(task: Task, *_: object, **__: object) -> Found:
        # Found for the smaller limit what is good, and for the larger one what is bad with an honest bound.
        return good if task.limit_bytes == 1 * GIB else replace(bad, bound_samples_per_s=2 * good.samples_per_s)

    monkeypatch.setattr(planner.analysis.frontier, "search", unlucky)
    points = frontier(Task(graph, machine, 0), [1 * GIB, 2 * GIB, 3 * GIB])
    assert [point.taken_from_bytes for point in points] == [None, 1 * GIB, 1 * GIB]
    taken = [point.found.samples_per_s for point in points if point.found]
    assert taken == pytest.approx([good.samples_per_s] * 3, rel=1e-12)
    assert points[2].found is not None
    assert points[2].found.bound_samples_per_s == 2 * good.samples_per_s
    assert points[2].found.gap == pytest.approx(0.5)
    assert points[2].found.options == good.options


def test_a_bound_of_a_larger_limit_holds_for_smaller_ones(
    graph: ModelGraph, machine: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search(Task(graph, machine, 400 * MIB))
    bounds = {400 * MIB: 3.0, 500 * MIB: 1.5, 600 * MIB: 2.0}

    def loose(task: Task, *_: object, **__: object) -> Found:
        return replace(found, bound_samples_per_s=bounds[task.limit_bytes] * found.samples_per_s)

    monkeypatch.setattr(planner.analysis.frontier, "search", loose)
    points = frontier(Task(graph, machine, 0), list(bounds))
    told = [point.found.bound_samples_per_s / found.samples_per_s for point in points if point.found]
    assert told == pytest.approx([1.5, 1.5, 2.0])


def test_progress_grows_over_all_limits(graph: ModelGraph, machine: Cluster) -> None:
    told: list[float] = []
    frontier(Task(graph, machine, 0), LIMITS, lambda what, fraction: told.append(fraction))
    assert told
    assert all(0 <= fraction <= 1 for fraction in told)
    assert max(told) > 0.9


@settings(max_examples=draws(3, 60), deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.lists(st.integers(60, 900), min_size=2, max_size=4, unique=True),
    st.booleans(),
)
def test_more_memory_is_never_slower(rows: list[int], limits_mb: list[int], overlaps: bool) -> None:
    count = len(rows)
    graph = chain([(1024 * r, 1024) for r in rows], [20.0 * r for r in rows], [30.0] * count)
    task = Task(graph, cluster(2, 2, overlaps=overlaps), 0)
    points = frontier(task, [size * MIB for size in limits_mb])
    speeds = [point.found.samples_per_s if point.found else 0.0 for point in points]
    assert speeds == sorted(speeds)
    assert all(point.found.gap < 1 for point in points if point.found)
