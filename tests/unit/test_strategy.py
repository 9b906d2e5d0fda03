"""Memory and traffic of a unit, worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import cluster

from planner.collectives import collective_s
from planner.strategy import OPTIMIZERS, Strategy, parse_strategy, strategies_on, unit_bytes, unit_traffic
from profiler.errors import OsdpError
from profiler.graph import Parameter

WEIGHT = Parameter("w", (1000, 300))
BIAS = Parameter("b", (1000,))
ADAM = OPTIMIZERS["adam"]


def test_shard_over_eight_by_hand() -> None:
    unit = unit_bytes([WEIGHT, BIAS], Strategy("shard", 8), "fp32", ADAM)
    # 1000 rows over 8 ranks: 125 each, no padding.  125 x 300 x 4 = 150,000 -> 293 x 512 = 150,016 bytes;
    # the bias 125 x 4 = 500 -> 512.
    assert unit.parameters == 150_016 + 512
    # Two moments like the parameters and a 512-byte step counter for each parameter.
    assert unit.optimizer == 2 * (150_016 + 512) + 2 * 512
    # One flat tensor: (37,500 + 125) x 4 = 150,500 -> 294 x 512.
    assert unit.gradients == 150_528
    # 300,000 x 4 = 1,200,000 -> 2344 x 512 = 1,200,128; the bias 4,000 -> 8 x 512.
    assert unit.unsharded == 1_200_128 + 4_096
    # Flat: 301,000 x 4 = 1,204,000 -> 2352 x 512.
    assert unit.gathered == unit.reduce_input == 1_204_224
    assert unit.full_gradients == unit.unsharded


def test_padding_of_the_first_dimension_by_hand() -> None:
    unit = unit_bytes([Parameter("w", (10, 512))], Strategy("shard", 8), "bf16", ADAM)
    # ceil(10 / 8) = 2 rows a rank, 16 rows in all, though only 10 exist.
    assert unit.parameters == 2 * 512 * 4
    assert unit.unsharded == unit.gathered == 16 * 512 * 2
    assert unit.reduce_input == 16 * 512 * 4
    assert unit.full_gradients == 10 * 512 * 2


def test_replicate_gathers_nothing_but_keeps_all() -> None:
    unit = unit_bytes([WEIGHT], Strategy("replicate", 1), "fp32", ADAM)
    assert unit.gathered == 0
    assert unit.parameters == 1_200_128
    assert unit.gradients == 1_200_128


def test_sgd_keeps_no_state_and_frozen_parameters_none_at_all() -> None:
    assert unit_bytes([WEIGHT], Strategy("shard", 8), "fp32", OPTIMIZERS["sgd"]).optimizer == 0
    frozen = unit_bytes([Parameter("w", (1000, 300), trainable=False)], Strategy("shard", 8), "fp32", ADAM)
    assert (frozen.optimizer, frozen.gradients, frozen.reduce_input, frozen.full_gradients) == (0, 0, 0, 0)
    assert frozen.unsharded == 1_200_128


def test_ring_times_by_hand() -> None:
    one = cluster(1, 8, intra=10e9, latency_s=1e-5)
    # 7 steps of 10 us, and 7/8 of 80 MB at 10 GB/s.
    assert collective_s("all_gather", 80e6, one, 8) == pytest.approx(7e-5 + 7e-3)
    assert collective_s("all_reduce", 80e6, one, 8) == pytest.approx(2 * (7e-5 + 7e-3))
    two = cluster(2, 8, intra=10e9, inter=1e9, latency_s=1e-5)
    # 16 ranks, 8 on a node drive 8 GB/s together.
    assert collective_s("reduce_scatter", 80e6, two, 16) == pytest.approx(15e-5 + 15 / 16 * 80e6 / 8e9)
    # One rank a node: 1 GB/s.
    assert collective_s("all_reduce", 80e6, two, 2, stride=8) == pytest.approx(2 * (1e-5 + 0.5 * 80e6 / 1e9))
    # Groups of 4 inside a node never leave it; their replicas sit two on each node.
    assert collective_s("all_gather", 80e6, two, 4) == pytest.approx(3e-5 + 0.75 * 80e6 / 10e9)
    assert collective_s("all_reduce", 80e6, two, 4, stride=4) == pytest.approx(2 * (3e-5 + 0.75 * 80e6 / 2e9))
    assert collective_s("all_gather", 80e6, one, 1) == 0.0


def test_traffic_of_each_strategy() -> None:
    machine = cluster(2, 4, intra=8e9, inter=1e9, latency_s=0.0)
    size = 4 * 300_000
    gather = 7 / 8 * size / 4e9  # 8 ranks, 4 a node: 4 GB/s between nodes
    shard = unit_traffic([WEIGHT], Strategy("shard", 8), "fp32", machine)
    assert (shard.forward_gather_s, shard.backward_gather_s, shard.reduce_s) == pytest.approx((gather,) * 3)
    assert shard.step_reduce_s == 0.0
    kept = unit_traffic([WEIGHT], Strategy("shard_grad", 8), "fp32", machine)
    assert (kept.forward_gather_s, kept.backward_gather_s) == pytest.approx((gather, 0.0))
    group = unit_traffic([WEIGHT], Strategy("group_shard", 4), "fp32", machine)
    assert group.forward_gather_s == pytest.approx(0.75 * size / 8e9)
    assert group.step_reduce_s == pytest.approx(2 * 0.5 * (size / 4) / 1e9)
    copies = unit_traffic([WEIGHT], Strategy("replicate", 1), "fp32", machine)
    assert (copies.forward_gather_s, copies.reduce_s) == (0.0, 0.0)
    assert copies.step_reduce_s == pytest.approx(2 * 7 / 8 * size / 4e9)


def test_strategies_of_a_cluster() -> None:
    names = [str(strategy) for strategy in strategies_on(cluster(2, 4))]
    assert names == ["replicate", "shard", "shard_grad", "group_shard:2", "group_shard:4"]
    assert [str(strategy) for strategy in strategies_on(cluster(1, 1))] == ["replicate"]
    # 3 nodes of 2: groups of 3 would split nodes unevenly; 2 is a node, 6 is the world.
    assert [str(s) for s in strategies_on(cluster(3, 2))][3:] == ["group_shard:2"]


@given(st.sampled_from([(1, 2), (1, 8), (2, 4), (4, 8), (3, 2)]))
def test_strategies_are_read_back_as_printed(shape: tuple[int, int]) -> None:
    machine = cluster(*shape)
    for strategy in strategies_on(machine):
        assert parse_strategy(str(strategy), machine) == strategy


def test_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OsdpError, match=r"(?s)got: group_shard:5.*group_shard:4"):
        parse_strategy("group_shard:5", cluster(1, 8))


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 50)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8, 64]),
    st.sampled_from(["fp32", "bf16"]),
)
def test_shards_of_all_ranks_cover_the_unit(shapes: list[tuple[int, int]], group: int, precision: str) -> None:
    parameters = [Parameter(f"p{i}", shape) for i, shape in enumerate(shapes)]
    strategy = Strategy("shard", group) if group > 1 else Strategy("replicate", 1)
    unit = unit_bytes(parameters, strategy, precision, ADAM)
    numel = sum(parameter.numel for parameter in parameters)
    assert unit.parameters * group >= 4 * numel
    assert unit.gradients * group >= 4 * numel
    assert unit.unsharded >= (4 if precision == "fp32" else 2) * numel
    assert all(value % 512 == 0 for value in (unit.parameters, unit.gradients, unit.optimizer, unit.unsharded))
