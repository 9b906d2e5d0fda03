"""Memory that is left free under the limit: parsed, kept by the search, remembered by the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import cluster, transformer

from osdp.planning.allocator_headroom import default_headroom
from osdp.planning.clusters import allocatable_bytes, load_cluster, workspaces_bytes
from osdp.planning.memory_options import NO_HEADROOM, Headroom, check_headroom, parse_headroom
from osdp.planning.plan_file import read_plan, write_plan
from osdp.planning.request import Request, task_of, written
from planner.analysis.explain import alternatives, find_target, open_plan
from planner.plan import Plan
from planner.pricing import runs_by_ddp
from planner.search.search import search
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster
from profiler.cluster.figure import Figure
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.yaml_files import write_yaml


def test_amounts_and_shares() -> None:
    assert parse_headroom("512MB") == Headroom(size_bytes=512 * MIB)
    assert parse_headroom(" 5 %").of(8 * GIB) == -(-8 * GIB // 20)
    assert parse_headroom("0%") == NO_HEADROOM


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("100%", "less than the memory limit"),
        ("250%", "less than the memory limit"),
        ("-5%", "not a headroom"),
        ("much", "not a headroom"),
        ("", "not a headroom"),
        ("%", "not a headroom"),
    ],
)
def test_what_is_no_headroom_is_told(text: str, part: str) -> None:
    with pytest.raises(OsdpError, match=part):
        parse_headroom(text)


def test_by_default_room_is_left_for_fragments_where_there_is_cudas_allocator() -> None:
    gpus, cpus = load_cluster("titan-rtx-8"), load_cluster("cpu-gloo")
    assert default_headroom(gpus).of(8 * GIB) == -(-8 * GIB * 15 // 1000)
    assert default_headroom(cpus) == NO_HEADROOM
    # 300 MiB of context and 80 of communicators are beside the allocator; workspaces and its rounding are in it.
    assert allocatable_bytes(gpus, 8 * GIB) == 8 * GIB - 380 * MIB
    assert workspaces_bytes(gpus) == (16.25 * MIB / 2,) * 2
    assert workspaces_bytes(cpus) == ()


def reserving(reserve_bytes: float) -> Cluster:
    plain = cluster(1, 4)
    reserve = {"context": Figure(reserve_bytes, "assumed: for a test")}
    return replace(plain, device=replace(plain.device, reserve_bytes=reserve))


def test_a_headroom_leaves_something_beside_the_reserve() -> None:
    machine = reserving(GIB)
    check_headroom(Headroom(size_bytes=3 * GIB - 1), 4 * GIB, machine)
    with pytest.raises(OsdpError, match="leaves no memory for tensors"):
        check_headroom(Headroom(size_bytes=3 * GIB), 4 * GIB, machine)
    with pytest.raises(OsdpError, match=r"less than 3.00 GiB"):
        check_headroom(Headroom(share=0.75), 4 * GIB, machine)
    # Whether a limit below the reserve will do is the search's to say.
    check_headroom(NO_HEADROOM, GIB // 2, machine)


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 36), st.floats(0, 0.99))
def test_over_is_the_smallest_whole_limit_that_leaves_enough(usable: int, size: int, share: float) -> None:
    headroom = Headroom(size, share)
    limit = headroom.over(usable)
    assert limit % MIB == 0
    assert limit - headroom.of(limit) >= usable
    # One MiB less is not enough, but for the rounding of a share.
    less = limit - 2 * MIB
    assert less - headroom.of(less) < usable


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return transformer(2, 512)


def planned(graph: ModelGraph, limit: int, headroom: Headroom = NO_HEADROOM) -> Plan:
    request = Request(limit, headroom=headroom)
    return written(search(task_of(request, graph, cluster(1, 4))), request)


def test_the_search_stays_below_the_limit_by_the_headroom(graph: ModelGraph, tmp_path: Path) -> None:
    limit, headroom = 500 * MIB, Headroom(size_bytes=100 * MIB)
    free, tight = planned(graph, limit, headroom), planned(graph, limit - 100 * MIB)
    assert (free.limit_bytes, free.headroom_bytes, free.usable_bytes) == (limit, 100 * MIB, 400 * MIB)
    assert free.predicted.peak_memory_bytes <= 400 * MIB
    # The same plan as under the smaller limit.
    assert (free.choices, free.predicted) == (tight.choices, tight.predicted)
    write_plan(tmp_path / "plan.yaml", free)
    assert read_plan(tmp_path / "plan.yaml") == free


def test_plans_without_the_field_have_no_headroom(graph: ModelGraph, tmp_path: Path) -> None:
    plan = planned(graph, 500 * MIB)
    path = tmp_path / "plan.yaml"
    write_plan(path, plan)
    text = path.read_text()
    assert "headroom_bytes: 0\n" in text
    path.write_text(text.replace("headroom_bytes: 0\n", ""))
    assert read_plan(path) == plan
    write_yaml(path, replace(plan, headroom_bytes=plan.limit_bytes))
    with pytest.raises(OsdpError, match="headroom_bytes"):
        read_plan(path)


def test_what_fits_only_into_the_headroom_is_said_not_to_fit(graph: ModelGraph) -> None:
    machine = cluster(1, 4)
    plan = planned(graph, 500 * MIB)
    all_of_it = replace(plan, headroom_bytes=plan.limit_bytes - plan.predicted.peak_memory_bytes)
    changes = alternatives(open_plan(all_of_it, graph, machine), find_target(open_plan(plan, graph, machine), "embed"))
    for change in changes:
        assert change.excess_bytes == change.peak_bytes - plan.predicted.peak_memory_bytes
        assert change.fits == (change.peak_bytes <= plan.predicted.peak_memory_bytes)


def test_ddp_runs_a_plan_only_below_the_headroom(graph: ModelGraph) -> None:
    machine = cluster(1, 4)
    plan = planned(graph, 20 * GIB)
    copies = replace(plan, micro_batch=1, choices=dict.fromkeys(plan.choices, "replicate"), recomputed_blocks=[])
    assert runs_by_ddp(copies, graph, machine)
    # It rests on more than a gibibyte of parameters, states and gradients: 4 MB x 4 x ...
    assert not runs_by_ddp(replace(copies, headroom_bytes=copies.limit_bytes - 50 * MIB), graph, machine)
