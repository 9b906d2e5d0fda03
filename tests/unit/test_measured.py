"""What was measured on a cluster takes the place of what its links and rates say: by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain, cluster, transformer

from osdp.cli.reports.figures import figures_of
from osdp.profile.profile_diff import compare_profiles
from planner.analysis.what_if import what_if
from planner.collectives import collective_s
from planner.cost.ddp import buckets
from planner.cost.simulator import simulated_s
from planner.cost.step_time import step_time
from planner.cost.unit_communication import unit_traffic
from planner.cost.workload import Workload
from planner.model.operator_split import slice_operators
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pins import parse_pin, resolve
from planner.plan import cluster_fingerprint
from planner.pricing import fixed
from planner.problem import Task
from planner.search.baselines import uniform
from planner.search.search import search
from planner.strategies.spec import Strategy
from planner.strategies.unit_collectives import unit_collectives
from profiler.cluster.cluster import Cluster
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import (
    CallTimes,
    CollectiveTimes,
    FitSegment,
    Measured,
    OptimizerTimes,
    RingRule,
    call_key,
    interpolated,
)
from profiler.cluster.read_cluster import read_cluster
from profiler.model_graph import Parameter, Recompute
from profiler.yaml_files import write_yaml


def curve(
    operation: str, ranks: int, pieces: tuple[FitSegment, ...], stride: int = 1, algorithm: str = "native"
) -> CollectiveTimes:
    return CollectiveTimes(operation, algorithm, ranks, stride, pieces, 0.0, ())


def measured(machine: Cluster, **parts: object) -> Cluster:
    nothing = Measured("2026-01-01", "none", 1)
    return replace(machine, measured=replace(nothing, **parts))  # type: ignore[arg-type]


# --- collectives -----------------------------------------------------------------------------


def test_a_measured_group_wins_over_the_links_and_others_keep_them() -> None:
    plain = cluster(2, 4)
    gather = curve("all_gather", 8, (FitSegment(0, 1e-3, 1e-9), FitSegment(1e6, 2e-3, 0.5e-9)))
    machine = measured(plain, collectives=(gather,))
    assert collective_s("all_gather", 1e5, machine, 8) == pytest.approx(1e-3 + 1e-4)
    assert collective_s("all_gather", 1e6, machine, 8) == pytest.approx(2e-3 + 0.5e-3)
    assert collective_s("all_gather", 1e9, machine, 8) == pytest.approx(2e-3 + 0.5)
    # Another operation, and a group inside a node where only one across was measured: as without.
    for operation, ranks, stride in (("all_gather", 4, 1), ("reduce_scatter", 8, 1), ("all_reduce", 2, 4)):
        found = collective_s(operation, 1e6, machine, ranks, stride)  # type: ignore[arg-type]
        assert found == collective_s(operation, 1e6, plain, ranks, stride)  # type: ignore[arg-type]
    assert collective_s("all_gather", 0, machine, 8) == 0.0


@pytest.mark.parametrize(("one_sided_s", "of_pulls_s"), [(1e-4, 1e-4), (None, 3e-3)])
def test_units_take_longer_than_what_they_send(one_sided_s: float | None, of_pulls_s: float) -> None:
    plain = cluster(1, 4)
    machine = measured(plain, unit_overhead_s=3e-3, one_sided_overhead_s=one_sided_s)
    parameters = [Parameter("weight", (64, 64), True)]
    for name, overhead_s in (("shard", 3e-3), ("odc", of_pulls_s)):
        before, after = (unit_traffic(parameters, Strategy(name, 4), "fp32", one) for one in (plain, machine))
        for phase in ("forward_gather_s", "backward_gather_s", "reduce_s"):
            assert getattr(after, phase) == pytest.approx(getattr(before, phase) + overhead_s)
        # FSDP2's copies are in what was measured.
        assert (after.copy_out_s, after.copy_out_again_s, after.copy_in_s) == (0, 0, 0)
        assert (
            before.copy_out_s == before.copy_out_again_s == before.copy_in_s == pytest.approx(4 * 64 * 64 * 2 / 600e9)
        )
        assert after.step_reduce_s == before.step_reduce_s


def test_a_group_that_was_not_measured_is_off_as_the_nearest_one_was() -> None:
    plain = cluster(2, 4)
    derived_s = collective_s("all_gather", 1e6, plain, 8)
    machine = measured(plain, collectives=(curve("all_gather", 8, (FitSegment(0, 0.0, 3 * derived_s / 1e6),)),))
    # Across nodes, three times what the links say; inside a node nothing is known.
    assert collective_s("all_gather", 1e6, machine, 2, stride=4) == pytest.approx(
        3 * collective_s("all_gather", 1e6, plain, 2, stride=4)
    )
    assert collective_s("all_gather", 1e6, machine, 4) == collective_s("all_gather", 1e6, plain, 4)
    larger = machine.with_ranks(4, 4)
    assert collective_s("all_gather", 1e6, larger, 16) == pytest.approx(
        3 * collective_s("all_gather", 1e6, cluster(4, 4), 16)
    )


def test_what_was_measured_holds_for_as_many_ranks_on_a_node_only() -> None:
    gather = curve("all_gather", 2, (FitSegment(0, 1.0, 0.0),))
    machine = replace(measured(cluster(2, 2), collectives=(gather,)), ring=(RingRule(2, 1, 0.0),))
    assert collective_s("all_gather", 1e6, machine.with_ranks(3, 2), 2) == 1.0
    other = machine.with_ranks(4, 1)
    assert (other.measured, other.ring) == (machine.measured.of_one_rank, ())  # type: ignore[union-attr]
    # The same two ranks are on two nodes then.
    assert collective_s("all_gather", 1e6, other, 2) == collective_s("all_gather", 1e6, cluster(4, 1), 2)
    assert (machine.nodes, machine.gpus_per_node) == (2, 2)


def test_what_one_gpu_computes_holds_for_any_number_of_them() -> None:
    """Calls and optimizer, and with them FSDP2's copies from the rates: one GPU alone has measured no units."""
    times = CallTimes("key", "first", (1,), (0.5,), (0.7,), (0.0,))
    alone = measured(cluster(1, 1), calls=(times,))
    eight = alone.with_ranks(1, 8)
    assert eight.measured == replace(alone.measured, unit_overhead_s=None)  # type: ignore[type-var]
    parameters = [Parameter("w", (64, 64))]
    shard = Strategy("shard", 8)
    assert unit_traffic(parameters, shard, "fp32", eight) == unit_traffic(
        parameters, shard, "fp32", replace(eight, measured=None)
    )
    assert unit_traffic(parameters, shard, "fp32", eight).copy_out_s > 0
    # Of collectives nothing holds: other ranks share what they share.
    gather = curve("all_gather", 2, (FitSegment(0, 1.0, 0.0),))
    two = replace(measured(cluster(1, 2), collectives=(gather,), calls=(times,)), device=alone.device)
    assert two.with_ranks(1, 8).measured == eight.measured
    cores = replace(two, device=replace(two.device, kind="cpu"))
    assert cores.with_ranks(1, 8).measured is None
    # Ranks that are alone on their nodes have cores of their own, but one alone has measured no units.
    alone = replace(alone, device=cores.device, inter=alone.intra)
    assert alone.with_ranks(4, 1).measured == eight.measured
    # What a file has no measurements of does not hold either.
    ringed = replace(cluster(1, 1), ring=(RingRule(2, 1, 0.0),))
    assert ringed.with_ranks(1, 2).ring == ()


def test_units_that_were_not_measured_have_no_figure(tmp_path: Path) -> None:
    times = CallTimes("key", "first", (1,), (0.5,), (0.7,), (0.0,))
    for overhead_s in (None, 0.0):  # as files of one rank had it before
        alone = measured(cluster(1, 1), calls=(times,), unit_overhead_s=overhead_s)
        told = [what for what, *_ in figures_of(alone)]
        assert "times of operators" in told
        assert "overhead of an FSDP unit" not in told
        path = tmp_path / "alone.yaml"
        write_yaml(path, alone, "measured by hand")
        assert read_cluster(path) == alone
        rows = [row for row in compare_profiles(alone, alone) if row.what == "each gather and reduction"]
        assert len(rows) == (overhead_s is not None)


def test_a_reduce_scatter_goes_round_the_ring_from_the_size_where_that_is_faster() -> None:
    native = curve("reduce_scatter", 4, (FitSegment(0, 1e-3, 2e-9),))
    ring = curve("reduce_scatter", 4, (FitSegment(0, 3e-3, 1e-9),), algorithm="ring")
    machine = replace(measured(cluster(2, 2), collectives=(native, ring)), ring=(RingRule(4, 1, 2e6),))
    assert collective_s("reduce_scatter", 1e6, machine, 4) == pytest.approx(1e-3 + 2e-3)
    assert collective_s("reduce_scatter", 4e6, machine, 4) == pytest.approx(3e-3 + 4e-3)

    def algorithms(rows: int, strategy: Strategy) -> dict[str, str]:
        sent = unit_collectives([Parameter("w", (rows, 1000))], strategy, "fp32", machine)
        return {f"{c.operation}:{c.ranks}x{c.stride}": c.algorithm for c in sent if c.phase in ("reduce", "step")}

    shard = Strategy("shard", 4)
    assert algorithms(100, shard) == {"reduce_scatter:4x1": "native"}  # 0.4 MB
    assert algorithms(1000, shard) == {"reduce_scatter:4x1": "ring"}  # 4 MB
    # Rules are for a group of that size and stride alone.
    assert algorithms(1000, Strategy("group_shard", 2)) == {"reduce_scatter:2x1": "native", "all_reduce:2x2": "native"}
    traffic = unit_traffic([Parameter("w", (1000, 1000))], shard, "fp32", machine)
    assert traffic.reduce_s == pytest.approx(7e-3)


# --- computation -----------------------------------------------------------------------------


def test_a_measured_call_takes_what_was_measured_and_grows_as_the_roofline_says() -> None:
    graph = chain([(10, 10), (20, 20)], gflops=[1.0, 3.0], saved_mb=[1.0, 1.0])
    key = call_key(graph, graph.calls[0])
    assert key != call_key(graph, graph.calls[1])
    found = CallTimes(key, "chain op0", (1, 4), (3e-4, 8e-4), (4e-4, 16e-4), (0.0, 0.0))
    machine = measured(cluster(flops=1e13), calls=(found,))

    def seconds(micro_batch: int, call: int) -> tuple[float, float]:
        return Workload(machine, "adam", "fp32", micro_batch).call_s(graph, graph.calls[call])

    # The roofline of op0: 1e-4 s a sample forward and 2e-4 backward; ratios 3 and 2 at b = 1 and at 4.
    assert seconds(1, 0) == pytest.approx((3e-4, 4e-4))
    assert seconds(4, 0) == pytest.approx((8e-4, 16e-4))
    assert seconds(2, 0) == pytest.approx((2e-4 * (3 - 1 / 3), 4e-4 * 2))
    assert seconds(8, 0) == pytest.approx((8e-4 * 2, 16e-4 * 2))
    assert seconds(2, 1) == pytest.approx((6e-4, 12e-4))  # not measured


def test_slices_are_as_slow_as_what_they_are_cut_from() -> None:
    graph = transformer(2, 512)
    sliced, slices = slice_operators(graph, {2: 4})
    plain = Workload(cluster(), "adam", "fp32", 2)
    calls = tuple(
        CallTimes(
            call_key(graph, call),
            "call",
            (2,),
            (5 * plain.compute_s(call.forward),),
            (3 * plain.compute_s(call.backward),),
            (0.0,),
        )
        for call in graph.calls
    )
    load = Workload(measured(cluster(), calls=calls), "adam", "fp32", 2)
    found = [call for call in sliced.calls if call.operator in slices]
    assert len(found) == 4
    for call in found:
        expected = 5 * plain.compute_s(call.forward), 3 * plain.compute_s(call.backward)
        assert load.call_s(sliced, call) == pytest.approx(expected)
    # So nothing is split where memory does not ask for it.
    best = search(Task(graph, replace(load.cluster, overlaps=False), 2**40, micro_batch=2))
    assert not best.space.counts


def test_calls_without_work_are_interpolated() -> None:
    graph = chain([(10, 10)], gflops=[0.0], saved_mb=[1.0])
    found = CallTimes(call_key(graph, graph.calls[0]), "op0", (2, 4), (1e-3, 3e-3), (0.0, 0.0), (0.0, 0.0))
    machine = measured(cluster(), calls=(found,))
    assert Workload(machine, "adam", "fp32", 3).call_s(graph, graph.calls[0]) == pytest.approx((2e-3, 0.0))


def test_alike_calls_have_one_key_whatever_the_depth() -> None:
    shallow, deep = transformer(1, 64), transformer(3, 64)
    assert {call_key(shallow, call) for call in shallow.calls} == {call_key(deep, call) for call in deep.calls}
    assert call_key(deep, deep.calls[1]) != call_key(replace(deep, precision="bf16"), deep.calls[1])


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 10)), min_size=1, max_size=5, unique_by=lambda p: p[0]),
    st.integers(1, 60),
)
def test_interpolation_meets_its_points_and_stays_between_neighbours(
    points: list[tuple[int, float]], size: int
) -> None:
    points = sorted(points)
    sizes, values = [p[0] for p in points], [p[1] for p in points]
    for point, value in points:
        assert interpolated(sizes, values, point) == pytest.approx(value)
    assert min(values) - 1e-9 <= interpolated(sizes, values, size) <= max(values) + 1e-9


def test_a_measured_optimizer() -> None:
    times = OptimizerTimes("adam", Figure(1e-5, "measured: a test"), Figure(2e-9, "measured: a test"))
    machine = measured(cluster(), optimizers=(times,))
    assert Workload(machine, "adam", "fp32", 1).optimizer_s(1e6) == pytest.approx(2e-3)
    assert Workload(machine, "adam", "fp32", 1).optimizer_s(1e6, tensors=30) == pytest.approx(2e-3 + 3e-4)
    # Another rank owns them: empty tensors are stepped, too.
    assert Workload(machine, "adam", "fp32", 1).optimizer_s(0, tensors=30) == pytest.approx(3e-4)
    # A plan: every tensor once, whether units or buckets carry it.
    graph = transformer(2, 64)
    tensors = sum(len(operator.parameters) for operator in graph.operators)
    load = Workload(machine, "adam", "fp32", 1)
    sharded = uniform(Space(graph), load, Strategy("shard", 8), recompute=Recompute.NOTHING)
    size_bytes = sum(option.gradients for option in sharded)
    assert step_time(sharded, load).optimizer_s == pytest.approx(tensors * 1e-5 + size_bytes * 2e-9)
    whole = Space(graph).replica(load).options([False] * len(sharded))
    assert step_time(whole, load).optimizer_s == pytest.approx(tensors * 1e-5 + 4 * graph.numel * 2e-9, rel=0.01)
    derived_s = Workload(cluster(), "sgd", "fp32", 1).optimizer_s(1e6)
    assert Workload(machine, "sgd", "fp32", 1).optimizer_s(1e6) == derived_s


def test_one_rank_that_was_measured_is_charged_for_copies() -> None:
    """No collective was measured there that could have them in its time."""
    graph, machine, strategy = transformer(2, 64), cluster(1, 1), Strategy("replicate", 1)
    parameters = [parameter for operator in graph.operators for parameter in operator.parameters]
    derived = unit_traffic(parameters, strategy, "bf16", machine)
    assert derived.copy_out_s > 0
    assert unit_traffic(parameters, strategy, "bf16", measured(machine, unit_overhead_s=1e-3)) == derived


# --- overlap ---------------------------------------------------------------------------------


def test_computation_slows_down_under_communication() -> None:
    # Two units whose communication takes a and whose computation c; computation at a third of its speed under it.
    graph = chain([(4096, 1024)] * 2, gflops=[40.0, 40.0], saved_mb=[1.0, 1.0])
    links = cluster(1, 8, intra=4e9, latency_s=0.0)
    plain, slowed = measured(links), measured(links, overlapped_slowdown=3.0)

    def step_s(machine: Cluster) -> float:
        space, load = Space(graph), Workload(machine, "sgd", "fp32", 1)
        return step_time(uniform(space, load, Strategy("shard", 8), recompute=Recompute.NOTHING), load).total_s

    a = 7 / 8 * 4096 * 1024 * 4 / 4e9
    c, b = 40e9 / 10e12, 80e9 / 10e12
    optimizer = step_s(plain) - ((a + max(c, a) + max(c, a)) + (max(b, a) + max(b, a) + a))
    under = 2 * a / 3  # of each communication
    expected = (a + max(c + under, a) + max(c + under, a)) + (max(b + under, a) + max(b + under, a) + a)
    assert step_s(slowed) == pytest.approx(expected + optimizer, rel=1e-9)
    assert step_s(slowed) > 1.05 * step_s(plain)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_simulator_and_the_search_agree_with_a_slowdown(accumulation: int) -> None:
    machine = measured(cluster(1, 8, intra=2e9), overlapped_slowdown=1.7)
    graph = transformer(4, 512)
    found = search(Task(graph, machine, 2**30, micro_batch=2, global_batch=16 * accumulation))
    total_s = step_time(found.options, found.load).total_s
    assert simulated_s(found.options, found.load) == pytest.approx(total_s, rel=1e-9)
    assert 0 <= found.gap < 0.05
    # The same plan, priced without the slowdown.
    plain = Workload(measured(cluster(1, 8, intra=2e9)), "adam", "fp32", found.load.micro_batch, accumulation)
    picks = [StageDecision(option.strategies, option.recompute) for option in found.options]
    assert step_time(fixed(found.space, plain, tuple(picks), found.spanning), plain).total_s < total_s


def test_buckets_hide_where_only_they_run_in_the_background() -> None:
    graph = transformer(6, 768)
    plain = cluster(1, 4, intra=5e9, overlaps=False)
    background = measured(plain, asynchronous=True, overlapped_slowdown=1.25)

    def step_s(machine: Cluster) -> float:
        ddp = Space(graph).replica(Workload(machine, "adam", "fp32", 1))
        return step_time(ddp.options([False] * len(ddp.stages)), ddp.load).total_s

    # By hand: two queues, the computation 1 / 5 of the time of each bucket later.
    load = Workload(plain, "adam", "fp32", 1)
    forward_s = sum(load.compute_s(call.forward) for call in graph.calls)
    clock, done_s = 0.0, dict[int, float]()
    for call in reversed(graph.calls):
        clock += load.compute_s(call.backward)
        done_s[call.operator] = clock
    free_s = sent_s = 0.0
    for bucket in buckets(graph):
        seconds = collective_s("all_reduce", bucket.size_bytes, plain, 4)
        free_s = max(free_s, max(done_s[o] for o in bucket.operators)) + 0.8 * seconds
        sent_s += seconds
    optimizer_s = step_s(plain) - forward_s - clock - sent_s
    assert step_s(background) == pytest.approx(forward_s + max(clock, free_s) + 0.2 * sent_s + optimizer_s, rel=1e-9)
    assert step_s(background) < step_s(plain)


# --- what more would buy ---------------------------------------------------------------------


def test_twice_as_much_of_what_was_measured_is_twice_as_fast() -> None:
    graph = transformer(2, 256)
    keys = {call_key(graph, call): call for call in graph.calls}
    plain = cluster(2, 2, overlaps=False)
    load = Workload(plain, "adam", "fp32", 1)
    calls = tuple(
        CallTimes(key, "call", (1,), (3 * load.compute_s(call.forward),), (3 * load.compute_s(call.backward),), (0.0,))
        for key, call in keys.items()
    )
    world = tuple(
        curve(name, 4, (FitSegment(0, 1e-4, 2e-9), FitSegment(1e6, 1.1e-3, 1e-9)))
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    )
    machine = measured(plain, calls=calls, collectives=world)
    pins = resolve([parse_pin("*=shard")], graph, machine)
    task = Task(graph, machine, 2**32, micro_batch=1, pins=pins)
    found = search(task)
    now = step_time(found.options, found.load)
    answers = {answer.resource: answer for answer in what_if(task, found).answers}

    def step_s(resource: str) -> float:
        speed = answers[resource].samples_per_s
        assert speed is not None
        return 4 / speed

    latencies = sum(1e-4 for option in found.options for s in option.segments if s.forward_gather_s) * 3
    communication = now.exposed_communication_s
    assert step_s("link between nodes") == pytest.approx(now.total_s - (communication - latencies) / 2, rel=1e-6)
    assert step_s("link in a node") == pytest.approx(now.total_s, rel=1e-6)
    assert step_s("compute") == pytest.approx(now.total_s - now.compute_s / 2, rel=1e-6)
    assert "measured" in answers["compute"].change


# --- the file --------------------------------------------------------------------------------


def test_a_cluster_that_was_not_measured_keeps_its_fingerprint() -> None:
    machine = cluster()
    assert cluster_fingerprint(machine) == cluster_fingerprint(replace(machine, ring=(), measured=None))
    assert cluster_fingerprint(machine) != cluster_fingerprint(measured(machine))
    assert cluster_fingerprint(machine) != cluster_fingerprint(replace(machine, ring=(RingRule(8, 1, 0.0),)))
