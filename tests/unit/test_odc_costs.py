"""What on-demand communication costs: windows, pulls and pushes, and one rendezvous a step, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from synthetic import chain, cluster, transformer

from osdp.planning.request import Request, task_of, written
from planner.collectives import collective_s
from planner.cost.peak_memory import optimizer_moment, peak_memory
from planner.cost.shared_collectives import rest_s, trained_bytes
from planner.cost.simulator import simulated_s
from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.step_time import step_time
from planner.cost.unit_communication import unit_traffic
from planner.cost.unit_memory import unit_bytes
from planner.cost.workload import Workload
from planner.model.operator_split import slice_operators
from planner.optimizers import OPTIMIZERS
from planner.options.candidates import StageDecision
from planner.options.overlap_terms import overlap_terms
from planner.options.search_space import Space
from planner.pins import parse_pin
from planner.plan import Plan
from planner.pricing import fixed, make_plan
from planner.search.search import search
from planner.strategies.notation import parse_strategy
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from planner.strategies.unit_collectives import unit_collectives
from profiler.byte_sizes import GIB
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import Parameter
from runtime.compile_plan import compile_plan

WEIGHT = Parameter("w", (1000, 300))
ADAM = OPTIMIZERS["adam"]


def test_one_sided_operations_by_hand() -> None:
    machine = cluster(1, 8, intra=10e9, latency_s=1e-5)
    # Seven peers at 10 us, and 7/8 of 80 MB at 10 GB/s.
    assert collective_s("pull", 80e6, machine, 8) == pytest.approx(7e-5 + 7e-3)
    assert collective_s("push", 80e6, machine, 8) == pytest.approx(7e-5 + 7e-3)
    assert collective_s("barrier", 0, machine, 8) == pytest.approx(7e-5)
    # A copy on the device, whose memory the test cluster reads and writes at 600 GB/s.
    assert collective_s("publish", 6e6, machine, 8) == pytest.approx(1e-5)
    assert all(collective_s(operation, 80e6, machine, 1) == 0 for operation in ("pull", "barrier", "publish"))


def test_a_window_by_hand() -> None:
    unit = unit_bytes([WEIGHT], Strategy("odc", 8), "bf16", ADAM)
    # A shard has 125 x 300 elements: published in bf16 75,000 -> 147 x 512, accumulated in fp32 150,000 -> 293 x 512.
    assert unit.window == 75_264 + 150_016
    # It is sent from there, and needs no copy in bf16; the gradient is pushed in bf16, and zeros of a shard of it made.
    assert (unit.reduce_input, unit.reduce_temporary) == (600_064, 75_264)
    sent = {"gather_temporary": 75_264, "regather_temporary": 75_264}
    other = replace(unit, window=0, **sent, reduce_input=1_200_128, reduce_temporary=0)
    assert other == unit_bytes([WEIGHT], Strategy("group_shard", 8), "bf16", ADAM)


def test_a_window_of_ordered_sums_by_hand() -> None:
    unit = unit_bytes([WEIGHT], Strategy("odc_ordered", 8), "bf16", ADAM)
    # Eight accumulators of 125 x 300 elements: 1,200,000 -> 2344 x 512.
    assert unit.window == 75_264 + 1_200_128
    machine = cluster(1, 8, intra=10e9, latency_s=1e-5)
    traffic, other = (unit_traffic([WEIGHT], Strategy(name, 8), "bf16", machine) for name in ("odc_ordered", "odc"))
    # Seven more shards of 37,500 x 4 bytes are read, added (read and written) and cleared.
    assert traffic.step_reduce_s - other.step_reduce_s == pytest.approx(7 * 4 * 150_000 / 600e9)
    assert replace(traffic, step_reduce_s=other.step_reduce_s, parts=other.parts) == other


def test_ordered_sums_are_known_and_never_offered() -> None:
    for uneven in (False, True):
        assert all(not strategy.spec.ordered for strategy in strategies_on(cluster(2, 4), uneven))
    assert parse_strategy("odc_ordered:4", cluster(2, 4)) == Strategy("odc_ordered", 4)


def test_ordered_sums_can_be_pinned() -> None:
    graph = chain([(2048, 1024)] * 3, gflops=[1] * 3, saved_mb=[1] * 3)
    machine = cluster(1, 4)
    request = Request(GIB, pins=(parse_pin("op1=odc_ordered:4"),))
    found = written(search(task_of(request, graph, machine)), request)
    assert found.choices["op1"] == "odc_ordered:4"
    assert not {found.choices[name] for name in ("op0", "op2")} & {"odc_ordered:4", "odc:4"}


def test_a_frozen_parameter_is_published_and_not_accumulated() -> None:
    unit = unit_bytes([replace(WEIGHT, trainable=False)], Strategy("odc", 8), "fp32", ADAM)
    assert unit.window == 150_016
    kinds = [
        c.operation
        for c in unit_collectives([replace(WEIGHT, trainable=False)], Strategy("odc", 8), "fp32", cluster(1, 8))
    ]
    assert kinds == ["pull", "pull", "barrier", "publish", "barrier"]


def test_traffic_in_one_node_by_hand() -> None:
    machine = cluster(1, 4, intra=10e9, latency_s=1e-5)
    traffic = unit_traffic([WEIGHT], Strategy("odc", 4), "bf16", machine)
    # Three peers; 3/4 of 300,000 x 2 bytes, then gradients of 300,000 x 4 bytes.
    assert traffic.forward_gather_s == traffic.backward_gather_s == pytest.approx(3e-5 + 450_000 / 10e9)
    assert traffic.reduce_s == pytest.approx(3e-5 + 900_000 / 10e9)
    # Two barriers; of 75,000 elements 4 bytes are read and 2 written to publish them, and 3 x 4 moved for the gradient.
    assert traffic.step_reduce_s == pytest.approx(6e-5 + 75_000 * (4 + 2 + 12) / 600e9)


def test_groups_reduce_across_nodes_once_per_step() -> None:
    machine = cluster(2, 4, intra=10e9, inter=1e9, latency_s=1e-5)
    sent = unit_collectives([WEIGHT], Strategy("odc", 4), "fp32", machine)
    assert [(c.operation, c.ranks, c.stride, c.phase) for c in sent] == [
        ("pull", 4, 1, "forward"),
        ("pull", 4, 1, "backward"),
        ("push", 4, 1, "reduce"),
        ("barrier", 4, 1, "step"),
        ("all_reduce", 2, 4, "step"),
        ("publish", 4, 1, "step"),
        ("barrier", 4, 1, "step"),
    ]
    across = next(c for c in sent if c.operation == "all_reduce")
    assert across.size_bytes == 4 * 300_000 // 4
    # Twice half of it over the network, with two latencies of one hop.
    assert across.time_s(machine) == pytest.approx(2 * (1e-5 + 0.5 * 300_000 / 1e9))


LATENCIES_S = 2 * 3 * 1e-5 + 2 * 1e-5
"""Two barriers of four ranks, and the latencies of an all-reduce of two, on the machine below."""


def two_nodes() -> Cluster:
    """Nothing overlaps, so that a step is a sum."""
    return cluster(2, 4, intra=10e9, inter=1e9, latency_s=1e-5, overlaps=False)


def in_step_s(names: Sequence[str], rows: Sequence[int], machine: Cluster) -> tuple[float, float, float]:
    """Return what operators of 1024 x rows weights send once per step, by the closed form, the simulator and the sum
    over stages that the search looks at, in addition to `shard`."""
    known = {str(strategy): strategy for strategy in strategies_on(machine, uneven=True)}
    known["odc_ordered:4"] = Strategy("odc_ordered", 4)
    space = Space(chain([(1024 * count, 1024) for count in rows], [1] * len(rows), [1] * len(rows)))
    load, found = Workload(machine, "sgd", "fp32", 1, 2), []
    for some in (names, ["shard"] * len(rows)):
        choices = tuple(StageDecision((known[name],)) for name in some)
        options = fixed(space, load, choices, None)
        # What is gathered and reduced in every micro-batch, and the optimizer, are not the question.
        options = tuple(replace(o, segments=tuple(map(once_per_step, o.segments)), optimizer_s=0.0) for o in options)
        terms = sum(float(overlap_terms([option], load)[0, 0]) for option in options)
        found.append((step_time(options, load).total_s, simulated_s(options, load), terms))
    first, second, third = (one - other for one, other in zip(*found, strict=True))
    return first, second, third


def once_per_step(segment: Segment) -> Segment:
    return Segment(segment.forward_s, segment.backward_s, 0.0, step_exposed_s=segment.step_exposed_s)


@pytest.mark.parametrize("rows", [(1,), (1, 2), (3, 1, 4)])
def test_units_of_one_strategy_synchronize_and_all_reduce_once(rows: tuple[int, ...]) -> None:
    shards = 4 * 1024 * 1024 * sum(rows) // 4
    # All shards are all-reduced at once; of each, 2 x 4 bytes an element are moved to publish it and 3 x 4 to take it.
    expected = LATENCIES_S + 2 * 0.5 * shards / 1e9 + 5 * shards / 600e9
    assert in_step_s(["odc:4"] * len(rows), rows, two_nodes()) == pytest.approx((expected,) * 3, rel=1e-6)


def test_every_group_size_synchronizes_and_all_reduces_by_itself() -> None:
    mib = 1024 * 1024
    closed_s, simulated, terms_s = in_step_s(["odc:4", "odc:2", "shard"], (2, 1, 3), two_nodes())
    # Of four, 3 x 2 MiB bytes an element; of two: 2 barriers of 2 ranks, and all-reduces over 4 ranks, 2 on each node.
    across_s = 2 * (3 * 1e-5 + 0.75 * 2 * mib / 2e9)
    expected = LATENCIES_S + 2 * 0.5 * 2 * mib / 1e9 + 5 * 2 * mib / 600e9 + 2e-5 + across_s + 5 * 2 * mib / 600e9
    assert (closed_s, simulated) == pytest.approx((expected, expected), rel=1e-6)
    # The search sees a third and a sixth of the latencies, and so never too much.
    assert terms_s == pytest.approx(expected - (2 / 3) * LATENCIES_S - (5 / 6) * (2e-5 + 6e-5), rel=1e-6)


def test_what_is_offloaded_synchronizes_with_what_is_not() -> None:
    here, there = (
        unit_traffic([WEIGHT], Strategy("odc", 4, offload), "fp32", two_nodes()) for offload in (False, True)
    )
    assert here.parts == there.parts


def test_ordered_sums_are_all_reduced_unit_by_unit() -> None:
    one, two = (in_step_s(["odc_ordered:4"] * len(rows), rows, two_nodes())[0] for rows in ((2,), (1, 1)))
    assert two - one == pytest.approx(2e-5)  # the latencies of one more all-reduce


def test_a_model_of_which_little_trains_synchronizes_once() -> None:
    """Frozen units have no part in the all-reduce, and are published before the same barrier."""
    machine, frozen = two_nodes(), [replace(WEIGHT, trainable=False)]
    traffic = unit_traffic(frozen, Strategy("odc", 4), "fp32", machine, model_bytes=1_200_000)
    assert traffic.step_reduce_s == pytest.approx(2 * 300_000 / 600e9)
    assert rest_s([(traffic.parts, 3)]) == pytest.approx(LATENCIES_S, rel=1e-4)
    trained = unit_traffic([WEIGHT], Strategy("odc", 4), "fp32", machine, model_bytes=1_200_000)
    assert rest_s([(traffic.parts, 3), (trained.parts, 1)]) == 0


def test_slices_have_the_part_of_the_whole() -> None:
    graph = transformer(2, 256)
    split = next(index for index, operator in enumerate(graph.operators) if operator.name.endswith(".up"))
    sliced, _ = slice_operators(graph, {split: 4})
    whole, cut = (sum(trained_bytes(operator.parameters) for operator in model.operators) for model in (graph, sliced))
    assert len(sliced.operators) > len(graph.operators)
    assert whole == cut


def test_groups_lie_in_one_node() -> None:
    names = [str(strategy) for strategy in strategies_on(cluster(2, 4), uneven=True) if strategy.name == "odc"]
    assert names == ["odc:2", "odc:4"]
    with pytest.raises(OsdpError, match="no such strategy"):
        parse_strategy("odc:8", cluster(2, 4))


def options_with(strategy: Strategy, load: Workload, space: Space) -> tuple[StageCandidate, ...]:
    choices = tuple(StageDecision((strategy,) * len(stage.operators)) for stage in space.model.stages)
    return fixed(space, load, choices, None)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_windows_are_there_at_every_moment(accumulation: int) -> None:
    graph = chain([(2048, 1024)] * 3, gflops=[1] * 3, saved_mb=[30] * 3)
    space, load = Space(graph), Workload(cluster(1, 8), "sgd", "fp32", 2, accumulation)
    pushed, reduced = (options_with(Strategy(name, 8), load, space) for name in ("odc", "group_shard"))
    window = 2 * 4 * 2048 * 1024 // 8  # published and accumulated, of each operator
    one, other = peak_memory(pushed, load), peak_memory(reduced, load)
    assert (one.phase, one.stage) == (other.phase, other.stage)
    assert one.total_bytes == other.total_bytes + 3 * window
    assert one.categories["communication_buffers"] == other.categories["communication_buffers"] + 3 * window
    assert sum(one.categories.values()) == one.total_bytes


def test_windows_are_there_in_the_optimizer_step() -> None:
    space, load = Space(chain([(2048, 1024)], [1], [0.01])), Workload(cluster(1, 8), "adam", "fp32", 1)
    moment = optimizer_moment(options_with(Strategy("odc", 8), load, space), load)
    shard = 4 * 2048 * 1024 // 8
    # Weight, gradient, two moments, Adam's two temporaries of one tensor and a step counter; published shard and
    # accumulator.
    assert moment.categories["communication_buffers"] == 2 * shard
    assert moment.total_bytes == 6 * shard + 512 + 2 * shard


def planned(strategy: Strategy, nodes: int = 1) -> tuple[Plan, Space, Workload]:
    space, load = Space(chain([(64, 64)] * 2, [1, 1], [1, 1])), Workload(cluster(nodes, 4), "adam", "fp32", 1)
    options = options_with(strategy, load, space)
    return make_plan(options, None, space, load, limit_bytes=2**30, gap=0.0), space, load


def test_the_runtime_takes_all_of_them() -> None:
    for strategy in strategies_on(cluster(2, 4), uneven=True):
        plan, space, load = planned(strategy, nodes=2)
        schedule = compile_plan(plan, space.graph, load.cluster)
        assert {unit.strategy for unit in schedule.units} == {strategy}
