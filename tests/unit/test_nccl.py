"""NCCL's own model of its algorithms: by hand from its tuning table, and beside published figures."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from synthetic import cluster, transformer
from thoroughness import draws

from osdp.cli.reports.explain import print_plan_reasons
from osdp.planning.clusters import load_cluster
from planner.analysis.explain import OpenPlan, open_plan
from planner.analysis.sent_collectives import sent_collectives
from planner.collectives import Operation, algorithm_of, collective_s
from planner.cost.ddp import buckets
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.pricing import make_plan
from planner.search.baselines import uniform
from planner.strategies.notation import parse_strategy
from profiler.cluster.cluster import Cluster, Nccl
from profiler.cluster.measurements import CollectiveTimes, FitSegment, Measured

US = 1e-6
OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")


def busbw(operation: Operation, size_bytes: float, name: str, nodes: int, ranks: int, stride: int = 1) -> float:
    """Return the bus bandwidth in GB/s, as nccl-tests defines it."""
    passes = 2 if operation == "all_reduce" else 1
    seconds = collective_s(operation, size_bytes, load_cluster(name, nodes), ranks, stride)
    return passes * (ranks - 1) / ranks * size_bytes / seconds / 1e9


@pytest.mark.parametrize(
    ("operation", "size_bytes", "nodes", "ranks", "stride", "expected_s", "name"),
    [
        # In a node of H100: 7 steps; LL has half of 360 GB/s, but not more than 141.
        ("all_gather", 1 << 30, 1, 8, 1, 8.4 * US + 7 * 3.4 * US + 7 / 8 * 2**30 / 360e9, "ring, Simple"),
        ("all_gather", 1 << 16, 1, 8, 1, 6.6 * US + 7 * 0.6 * US + 7 / 8 * 2**16 / 141e9, "ring, LL"),
        # Its switches: 480 / 370 of a ring's bandwidth, at a latency of 25 us.
        ("all_reduce", 1 << 30, 1, 8, 1, 25 * US + 2 * 7 / 8 * 2**30 / (360e9 * 480 / 370), "NVLS, Simple"),
        # 4 nodes of 8: 28 steps inside and 3 between nodes, at the lower of 360 GB/s and 8 x 46.
        ("reduce_scatter", 1 << 33, 4, 32, 1, (8.4 + 28 * 3.4 + 3 * 14) * US + 31 / 32 * 2**33 / 360e9, "ring, Simple"),
        # Twice up and down a tree of 4 nodes, at what the network gives.
        ("all_reduce", 1 << 30, 4, 32, 1, (25 + 4 * 14) * US + 2 * 31 / 32 * 2**30 / 368e9, "NVLS tree, Simple"),
        # One rank on each of 128 nodes: 7 doublings, each a 3.5th of 14 us, and 2.8 us for each rank.
        ("all_gather", 1 << 20, 128, 128, 8, (8 + 7 * 4 + 128 * 2.8) * US + 2**20 / (0.75 * 46e9), "PAT, Simple"),
        # A chain of 16 ranks on 2 nodes.
        ("broadcast", 1 << 30, 2, 16, 1, (8.4 + 16 * 14) * US + 2**30 / 360e9, "ring, Simple"),
    ],
)
def test_choices_by_hand(
    operation: Operation, size_bytes: int, nodes: int, ranks: int, stride: int, expected_s: float, name: str
) -> None:
    machine = load_cluster("h100-4x8", nodes)
    assert collective_s(operation, size_bytes, machine, ranks, stride) == pytest.approx(expected_s, rel=1e-12)
    assert algorithm_of(operation, size_bytes, machine, ranks, stride) == name


def test_a_tree_by_hand() -> None:
    machine = load_cluster("a100-2x8", 16)
    # 128 ranks: 7 steps inside and 4 between nodes, up and down.  Of 8 x 24 GB/s a tree has 0.92, LL128 120/128 of it
    # and at 64 KiB (2^10 x 64 B) a correction of 0.6.
    tree_s = (14 + 2 * (7 * 1.25 + 4 * 8.5)) * US + 2**16 / (0.92 * 192e9 * 120 / 128 / 2 * 0.6)
    # LL: latencies of 6.8, 0.6 and 5 us; between nodes at most 19 GB/s.
    low_s = (6.8 + 2 * (7 * 0.6 + 4 * 5.0)) * US + 2**16 / (19e9 / 2 * 0.6)
    assert low_s < tree_s
    assert collective_s("all_reduce", 2**16, machine, 128) == pytest.approx(low_s, rel=1e-12)
    assert algorithm_of("all_reduce", 2**16, machine, 128) == "tree, LL"
    assert algorithm_of("all_reduce", 2**22, machine, 128) == "tree, LL128"
    # Far larger tensors go round a ring, whose 2 x (112 + 15) steps then take 1.4 times as long.
    ring_s = 1.4 * (8.4 + 2 * (112 * 3.4 + 15 * 14)) * US + 2 * 127 / 128 * 2**33 / 192e9
    assert collective_s("all_reduce", 2**33, machine, 128) == pytest.approx(ring_s, rel=1e-12)


@pytest.mark.parametrize(
    ("operation", "nodes", "size_bytes", "published", "within"),
    [
        ("all_gather", 1, 2**33, 370, 0.03),  # nccl-tests #212
        ("all_reduce", 1, 2**33, 480, 0.03),  # nccl-tests #212
        ("all_reduce", 2, 2**33, 430, 0.1),  # nccl #1221
        ("all_reduce", 248, 2**29, 350, 0.03),  # nccl-tests #283, H200
        # nccl #1229: reduce-scatter on 4, 8, .. 128 nodes, of a size that is not given.
        ("reduce_scatter", 4, 2**31, 360, 0.1),
        ("reduce_scatter", 8, 2**31, 345, 0.1),
        ("reduce_scatter", 16, 2**31, 320, 0.1),
        ("reduce_scatter", 32, 2**31, 300, 0.1),
        ("reduce_scatter", 64, 2**31, 280, 0.1),
        ("reduce_scatter", 128, 2**31, 260, 0.1),
    ],
)
def test_bandwidths_are_near_published_ones(
    operation: Operation, nodes: int, size_bytes: int, published: float, within: float
) -> None:
    assert busbw(operation, size_bytes, "h100-4x8", nodes, 8 * nodes) == pytest.approx(published, rel=within)


@settings(max_examples=draws(40))
@given(st.sampled_from(OPERATIONS), st.floats(1.0, 2.0**34), st.floats(1.0, 4.0), st.sampled_from([1, 2, 3, 16, 128]))
def test_more_bytes_never_take_less_time(operation: Operation, size: float, factor: float, nodes: int) -> None:
    for name, ranks, stride in (("h100-4x8", 8 * nodes, 1), ("a100-2x8", 8 * nodes, 1), ("a100-2x8", 4 * nodes, 2)):
        machine = load_cluster(name, nodes)
        less, more = (collective_s(operation, one, machine, ranks, stride) for one in (size, size * factor))
        assert 0 < less <= more * (1 + 1e-12)


def test_latencies_of_the_file_scale_those_of_the_table() -> None:
    machine = load_cluster("h100-8")
    slow = replace(machine.intra, latency_s=replace(machine.intra.latency_s, value=6.8e-6))
    found = [collective_s("all_gather", 1.0, one, 8) for one in (machine, replace(machine, intra=slow))]
    assert found == pytest.approx([(6.6 + 7 * 0.6) * US, (6.6 + 7 * 1.2) * US], rel=1e-6)


def test_only_nccl_is_priced_so_and_measurements_come_first() -> None:
    plain = cluster(1, 8, intra=10e9, latency_s=1e-5)
    assert algorithm_of("all_reduce", 80e6, plain, 8) == "ring"
    known = replace(plain, nccl=Nccl("hopper", nvlink=True, nvls=True, source="assumed: for a test"))
    assert collective_s("all_reduce", 80e6, known, 8) < collective_s("all_reduce", 80e6, plain, 8)
    for operation in ("pull", "push"):
        assert collective_s(operation, 1e6, known, 8) == collective_s(operation, 1e6, plain, 8)  # type: ignore[arg-type]
        assert algorithm_of(operation, 1e6, known, 8) == "one-sided"  # type: ignore[arg-type]
    times = CollectiveTimes("all_gather", "native", 8, 1, (FitSegment(0, 1e-3, 1e-9),), 0.0, ())
    timed = replace(known, measured=replace(Measured("2026-01-01", "none", 1), collectives=(times,)))
    assert collective_s("all_gather", 1e6, timed, 8) == pytest.approx(2e-3)
    assert algorithm_of("all_gather", 1e6, timed, 8) == "measured"


# --- what `osdp explain` says -----------------------------------------------------------------


def explained(strategy_name: str, precision: str, machine: Cluster) -> tuple[OpenPlan, str]:
    graph = replace(transformer(2, 256), precision=precision)
    space, strategy = Space(graph), parse_strategy(strategy_name, machine)
    load = Workload(machine, "adam", precision, 1)
    spanning = strategy if space.model.spanning else None
    plan = make_plan(uniform(space, load, strategy, False), spanning, space, load, limit_bytes=2**33, gap=0.0)
    view, target = open_plan(plan, graph, machine), io.StringIO()
    print_plan_reasons(Console(file=target, width=200), view)
    return view, target.getvalue()


def test_explain_says_which_algorithm_is_priced() -> None:
    machine = load_cluster("h100-4x8")
    view, text = explained("group_shard:8", "fp32", machine)
    sent = sent_collectives(view)
    assert {(one.operation, one.ranks, one.stride) for one in sent} == {
        ("all_gather", 8, 1),
        ("reduce_scatter", 8, 1),
        ("all_reduce", 4, 8),
    }
    for one in sent:
        assert one.priced_as == algorithm_of(one.operation, one.largest_bytes, machine, one.ranks, one.stride)
        assert one.largest_s == collective_s(one.operation, one.largest_bytes, machine, one.ranks, one.stride)
        assert f"{one.count}" in text
        assert one.priced_as in text
    # Four units, each gathered twice, reduced and all-reduced.
    assert sum(one.count for one in sent if one.operation == "all_gather") == 2 * 4
    assert sum(one.count for one in sent if one.operation == "all_reduce") == 4
    assert "Collectives" not in explained("shard", "fp32", cluster(1, 8))[1]


def test_explain_counts_what_units_send_together_once() -> None:
    sent = {one.operation: one for one in sent_collectives(explained("odc:8", "fp32", load_cluster("h100-4x8"))[0])}
    each = sent_collectives(explained("group_shard:8", "fp32", load_cluster("h100-4x8"))[0])
    assert (sent["barrier"].count, sent["all_reduce"].count, sent["publish"].count) == (2, 1, 4)
    parameters = sum(p.numel for operator in transformer(2, 256).operators for p in operator.parameters)
    assert sent["all_reduce"].largest_bytes == 4 * parameters // 8  # every tensor's rows are a multiple of eight
    assert sent["all_reduce"].largest_bytes > next(one for one in each if one.operation == "all_reduce").largest_bytes


def test_explain_says_why_copies_in_bf16_are_units() -> None:
    machine = load_cluster("h100-8")
    assert (
        "no mixed precision that computes in bf16 what units of FSDP2 compute"
        in explained("replicate", "bf16", machine)[1]
    )
    view, text = explained("replicate", "fp32", machine)
    assert "units of FSDP2" not in text
    # DistributedDataParallel's buckets.
    assert [one.operation for one in sent_collectives(view)] == ["all_reduce"] * len(sent_collectives(view))
    assert sum(one.count for one in sent_collectives(view)) == len(buckets(view.space.graph))
