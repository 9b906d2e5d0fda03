"""Time that offload takes: copies over the host's link, sums and optimizer steps in its memory, by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import chain, cluster

from osdp.planning.clusters import cluster_names, load_cluster
from osdp.resources import resource_file
from planner.cost.simulator import simulated_s
from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.step_time import step_time
from planner.cost.unit_communication import unit_traffic
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import fixed
from planner.strategies.notation import parse_strategy
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster, Host
from profiler.cluster.figure import Figure
from profiler.errors import OsdpError
from profiler.model_graph import Parameter

WEIGHT = Parameter("w", (1000, 300))
LINK, MEMORY = 5e9, 20e9


def hosted(nodes: int = 1, gpus: int = 4) -> Cluster:
    """Without latency, and with a host."""
    host = Host(Figure(LINK, "assumed: for a test"), Figure(MEMORY, "assumed: for a test"))
    return replace(cluster(nodes, gpus, latency_s=0.0), host=host)


@pytest.mark.parametrize(
    ("name", "forward", "backward", "reduction", "step"),
    # How many copies of the shard, and in a reduction of its gradient, there are.
    [
        ("shard", 1, 1, 1, 0),
        ("shard_grad", 1, 0, 1, 0),
        ("secondary_shard:2", 1, 0, 1, 0),
        ("hierarchical", 1, 1, 1, 0),
        ("owner", 1, 1, 1, 0),
        ("group_shard:4", 1, 1, 0, 1),
        ("replicate", 1, 1, 0, 1),
        ("odc:4", 0, 0, 0, 2),
    ],
)
def test_copies_by_hand(name: str, forward: int, backward: int, reduction: int, step: int) -> None:
    machine = hosted(2, 4)
    strategy = parse_strategy(f"{name}+offload", machine)
    here = unit_traffic([WEIGHT], replace(strategy, offload=False), "bf16", machine)
    there = unit_traffic([WEIGHT], strategy, "bf16", machine)
    # fp32 under every precision; 300,000 parameters over 8, 4 or no ranks.
    parts = {"group_shard": 4, "odc": 4, "replicate": 1, "owner": 1}.get(strategy.name, 8)
    copy_s = 4 * 300_000 / parts / LINK
    # In a group of one rank, as the unit begins, on the compute stream.
    stalls = strategy.group == 1
    gathers_s = there.forward_gather_s - here.forward_gather_s, there.backward_gather_s - here.backward_gather_s
    stalls_s = there.copy_out_s - here.copy_out_s, there.copy_out_again_s - here.copy_out_again_s
    expected_s = pytest.approx((forward * copy_s, backward * copy_s))
    assert (stalls_s if stalls else gathers_s) == expected_s
    assert (gathers_s if stalls else stalls_s) == pytest.approx((0, 0))
    assert there.reduce_s - here.reduce_s == pytest.approx(reduction * copy_s)
    assert there.step_reduce_s - here.step_reduce_s == pytest.approx(step * copy_s)
    # Two tensors read and one written, where the host adds.
    assert there.add_s == pytest.approx(reduction * 3 * 4 * 300_000 / parts / MEMORY)
    assert here.add_s == 0


def test_frozen_parameters_have_no_gradient_to_copy() -> None:
    machine, strategy = hosted(), Strategy("shard", 4, offload=True)
    traffic = unit_traffic([replace(WEIGHT, trainable=False)], strategy, "fp32", machine)
    assert (traffic.reduce_s, traffic.add_s) == (0, 0)
    assert traffic.forward_gather_s == pytest.approx(3 / 4 * 1_200_000 / 10e9 + 300_000 / LINK)


def stage(strategy: Strategy, accumulation: int = 1) -> tuple[StageCandidate, Workload]:
    """One operator of 2 Mi parameters."""
    space = Space(chain([(2048, 1024)], gflops=[100], saved_mb=[1]))
    load = Workload(hosted(), "adam", "fp32", 1, accumulation)
    (option,) = fixed(space, load, (StageDecision((strategy,)),), None)
    return option, load


SHARD = 4 * 2048 * 1024 // 4
"""Bytes of a quarter of the operator in fp32."""
PASS_S = 3 * SHARD / 10e9
"""All-gather or reduce-scatter: three other shards at 10 GB/s."""
COPY_S = 2 * 4 * SHARD / 600e9
"""FSDP2's copy of the whole operator to or from what is sent: it is read and written."""


def only(option: StageCandidate) -> Segment:
    (segment,) = option.segments
    return segment


def test_an_offloaded_stage_by_hand() -> None:
    option, _ = stage(Strategy("shard", 4, offload=True))
    segment = only(option)
    assert segment.forward_gather_s == segment.backward_gather_s == pytest.approx(PASS_S + SHARD / LINK)
    assert segment.reduce_s == pytest.approx(PASS_S + SHARD / LINK)
    assert (segment.forward_stall_s, segment.backward_stall_s) == pytest.approx((COPY_S, 2 * COPY_S))
    # Adam reads and writes 18 tensors of the shard, in the host's memory.
    assert option.optimizer_s == pytest.approx(18 * SHARD / MEMORY)
    assert (option.gradients, option.rest) == (0, 0)


def test_the_device_steps_at_its_own_rate() -> None:
    option, _ = stage(Strategy("shard", 4))
    assert option.optimizer_s == pytest.approx(18 * SHARD / 600e9)


def test_one_rank_waits_for_its_shards() -> None:
    """At world size 1: copies to the device are on the compute stream, those back are not."""
    space = Space(chain([(2048, 1024)], gflops=[100], saved_mb=[1]))
    load = Workload(hosted(1, 1), "adam", "fp32", 1)
    (option,) = fixed(space, load, (StageDecision((Strategy("replicate", 1, offload=True),)),), None)
    segment, whole_bytes = only(option), 4 * SHARD
    copy_s = whole_bytes / LINK + COPY_S
    assert (segment.forward_gather_s, segment.backward_gather_s) == (0, 0)
    assert (segment.forward_stall_s, segment.backward_stall_s) == pytest.approx((copy_s, copy_s + COPY_S))
    assert segment.reduce_s == pytest.approx(whole_bytes / LINK)
    time = step_time([option], load)
    # Forward 10 ms and backward 20 ms at 10 TFLOP/s, neither of which hides a copy to the device.
    expected_s = 0.01 + copy_s + 0.02 + copy_s + COPY_S + whole_bytes / LINK + option.optimizer_s
    assert time.total_s == pytest.approx(expected_s)
    assert time.exposed_communication_s == pytest.approx(2 * copy_s + COPY_S + whole_bytes / LINK)
    assert simulated_s([option], load) == pytest.approx(time.total_s)


def test_sums_on_the_host_stall_the_backward() -> None:
    option, load = stage(Strategy("shard", 4, offload=True), accumulation=4)
    segment = only(option)
    # Three of four micro-batches add.
    wait_s = PASS_S + SHARD / LINK + 3 / 4 * 3 * SHARD / MEMORY
    assert (segment.reduce_s, segment.backward_stall_s) == (0, pytest.approx(wait_s + 2 * COPY_S))
    time = step_time([option], load)
    # Forward 10 ms, which hides the gather of the backward, and backward 20 ms at 10 TFLOP/s.
    forward_s, gather_s = 0.01 + COPY_S, PASS_S + SHARD / LINK
    assert gather_s < forward_s
    each_s = gather_s + forward_s + 0.02 + wait_s + 2 * COPY_S
    assert time.total_s == pytest.approx(4 * each_s + option.optimizer_s, rel=1e-3)


def test_copies_once_per_step_do_not_stall() -> None:
    segment = only(stage(Strategy("group_shard", 2, offload=True), accumulation=4)[0])
    assert segment.backward_stall_s == pytest.approx(2 * COPY_S)
    # An all-reduce of half the operator between pairs is twice a half of it; then the copy of the half.
    assert segment.step_reduce_s == pytest.approx(2 * 1 / 2 * 2 * SHARD / 10e9 + 2 * SHARD / LINK)


def test_an_owner_waits_for_its_copies() -> None:
    segment = only(stage(Strategy("owner", 4, offload=True))[0])
    broadcast_s, copy_s = 4 * SHARD / 10e9, 4 * SHARD / LINK
    assert segment.forward_stall_s == pytest.approx(broadcast_s + copy_s + COPY_S)
    assert segment.backward_stall_s == pytest.approx(2 * (broadcast_s + copy_s + COPY_S))


def test_offload_is_offered_where_the_host_is_known() -> None:
    plain = [str(strategy) for strategy in strategies_on(cluster(1, 4))]
    both = [str(strategy) for strategy in strategies_on(hosted())]
    assert both == [*plain, *(f"{name}+offload" for name in plain)]
    assert not any("offload" in name for name in plain)


def test_without_figures_of_the_host_copies_take_no_time() -> None:
    machine, strategy = replace(hosted(), host=None), Strategy("shard", 4)
    there = unit_traffic([WEIGHT], replace(strategy, offload=True), "fp32", machine)
    assert there == unit_traffic([WEIGHT], strategy, "fp32", machine)
    assert Workload(machine, "adam", "fp32", 1).optimizer_s(0, offloaded_bytes=1e9) == 0


@pytest.mark.parametrize("rate", ["link_bytes_per_s", "memory_bytes_per_s"])
def test_a_host_without_a_rate_is_refused(tmp_path: Path, rate: str) -> None:
    before, _, host = resource_file("clusters", "titan-rtx-8").read_text().partition("\nhost:\n")
    broken = re.sub(rf"({rate}:\n    value: )\S+", r"\g<1>0.0", host)
    assert broken != host
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{before}\nhost:\n{broken}")
    with pytest.raises(OsdpError, match=rate):
        load_cluster(str(path))


@pytest.mark.parametrize("name", cluster_names())
def test_presets_know_their_hosts(name: str) -> None:
    machine = load_cluster(name)
    if machine.device.kind == "cpu":
        assert machine.host is None  # There is nowhere else to put anything.
        return
    assert machine.host is not None
    # A host's link and memory are slower than the device's own.
    assert machine.host.link_bytes_per_s.value < 64e9
    assert machine.host.memory_bytes_per_s.value < machine.device.memory_bytes_per_s.value / 10
