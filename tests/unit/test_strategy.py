"""Memory, collectives and time of a unit, worked out by hand; names that are read back as printed."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import cluster

from planner.collectives import collective_s
from planner.cost.unit_communication import unit_traffic
from planner.cost.unit_memory import unit_bytes
from planner.optimizers import OPTIMIZERS, optimizer_of
from planner.strategies.notation import MAX_SLICES, format_choice, parse_choice, parse_strategy
from planner.strategies.owner_assignment import assign_owners
from planner.strategies.registry import known_strategies, strategies_on
from planner.strategies.spec import SPECS, Strategy
from planner.strategies.unit_collectives import unit_collectives
from profiler.errors import OsdpError
from profiler.model_graph import Parameter

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
    copy = 2 * size / 600e9
    shard = unit_traffic([WEIGHT], Strategy("shard", 8), "fp32", machine)
    assert (shard.forward_gather_s, shard.backward_gather_s, shard.reduce_s) == pytest.approx((gather,) * 3)
    assert (shard.copy_out_s, shard.copy_out_again_s, shard.copy_in_s) == pytest.approx((copy,) * 3)
    assert shard.step_reduce_s == 0.0
    kept = unit_traffic([WEIGHT], Strategy("shard_grad", 8), "fp32", machine)
    assert (kept.forward_gather_s, kept.backward_gather_s) == pytest.approx((gather, 0.0))
    assert (kept.copy_out_s, kept.copy_out_again_s, kept.copy_in_s) == pytest.approx((copy, 0.0, copy))
    group = unit_traffic([WEIGHT], Strategy("group_shard", 4), "fp32", machine)
    assert group.forward_gather_s == pytest.approx(0.75 * size / 8e9)
    assert group.step_reduce_s == pytest.approx(2 * 0.5 * (size / 4) / 1e9)
    copies = unit_traffic([WEIGHT], Strategy("replicate", 1), "fp32", machine)
    assert (copies.forward_gather_s, copies.reduce_s) == (0.0, 0.0)
    # Copies between what rests and what computes, and what is reduced.
    assert (copies.copy_out_s, copies.copy_out_again_s, copies.copy_in_s) == pytest.approx((copy,) * 3)
    assert copies.step_reduce_s == pytest.approx(2 * 7 / 8 * size / 4e9)


def test_copies_cast_under_mixed_precision() -> None:
    machine, numel, memory = cluster(1, 8, latency_s=0.0), 300_000, 600e9
    shard = unit_traffic([WEIGHT], Strategy("shard", 8), "bf16", machine)
    assert shard.copy_out_s == shard.copy_out_again_s == pytest.approx((2 + 2) * numel / memory)
    assert shard.copy_in_s == pytest.approx((2 + 4) * numel / memory)
    whole = unit_traffic([WEIGHT], Strategy("replicate", 1), "bf16", machine)
    assert (whole.copy_out_s, whole.copy_in_s) == pytest.approx((shard.copy_in_s,) * 2)
    frozen = unit_traffic([replace(WEIGHT, trainable=False)], Strategy("shard", 8), "bf16", machine)
    assert (frozen.copy_out_s, frozen.copy_in_s) == (shard.copy_out_s, 0.0)


# Ten rows of four and ten alone, in bf16 on 2 nodes of 4: over 8 ranks 2 rows each, 16 in all, so that
# 16 x 4 + 16 = 80 elements are gathered, of 2 bytes, and reduced, of 4.
ROWS = [Parameter("w", (10, 4)), Parameter("b", (10,))]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            Strategy("shard", 8),
            [
                ("all_gather", 8, 1, 160, "forward"),
                ("all_gather", 8, 1, 160, "backward"),
                ("reduce_scatter", 8, 1, 320, "reduce"),
            ],
        ),
        (Strategy("shard_grad", 8), [("all_gather", 8, 1, 160, "forward"), ("reduce_scatter", 8, 1, 320, "reduce")]),
        # Over 4 ranks 3 rows each, 12 in all: 60 elements.  A shard of 15 goes to the other node.
        (
            Strategy("group_shard", 4),
            [
                ("all_gather", 4, 1, 120, "forward"),
                ("all_gather", 4, 1, 120, "backward"),
                ("reduce_scatter", 4, 1, 240, "reduce"),
                ("all_reduce", 2, 4, 60, "step"),
            ],
        ),
        # 50 elements, not padded.
        (Strategy("replicate", 1), [("all_reduce", 8, 1, 200, "step")]),
        # Two nodes gather what the ranks of equal place have, a quarter; then the four of a node the whole.
        (
            Strategy("hierarchical", 8),
            [
                ("all_gather", 2, 4, 40, "forward"),
                ("all_gather", 4, 1, 160, "forward"),
                ("all_gather", 2, 4, 40, "backward"),
                ("all_gather", 4, 1, 160, "backward"),
                ("reduce_scatter", 4, 1, 320, "reduce"),
                ("reduce_scatter", 2, 4, 80, "reduce"),
            ],
        ),
        (
            Strategy("secondary_shard", 8, secondary=2),
            [
                ("all_gather", 8, 1, 160, "forward"),
                ("all_gather", 2, 1, 160, "backward"),
                ("reduce_scatter", 8, 1, 320, "reduce"),
            ],
        ),
        (
            Strategy("owner", 8),
            [
                ("broadcast", 8, 1, 100, "forward"),
                ("broadcast", 8, 1, 100, "backward"),
                ("reduce", 8, 1, 200, "reduce"),
            ],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Strategy) else "",
)
def test_collectives_of_each_strategy_by_hand(strategy: Strategy, expected: list[tuple[object, ...]]) -> None:
    machine = cluster(2, 4)
    sent = unit_collectives(ROWS, strategy, "bf16", machine)
    assert [(c.operation, c.ranks, c.stride, c.size_bytes, c.phase) for c in sent] == expected
    assert unit_collectives(ROWS, replace(strategy, offload=True), "bf16", machine) == sent


def test_only_trainable_parameters_are_reduced() -> None:
    frozen = [ROWS[0], Parameter("b", (10,), trainable=False)]
    gathered, _, reduced = unit_collectives(frozen, Strategy("shard", 8), "fp32", cluster(2, 4))
    assert (gathered.size_bytes, reduced.size_bytes) == (4 * 80, 4 * 64)
    assert all(
        c.phase in ("forward", "backward")
        for c in unit_collectives(frozen[1:], Strategy("shard", 8), "fp32", cluster(2, 4))
    )


def test_one_rank_sends_nothing() -> None:
    assert unit_collectives(ROWS, Strategy("replicate", 1), "fp32", cluster(1, 1)) == ()


def test_chains_carry_the_whole_tensor() -> None:
    machine = cluster(1, 8, intra=10e9, latency_s=1e-5)
    # 7 hops of 10 us, and 80 MB at 10 GB/s over every link.
    assert collective_s("broadcast", 80e6, machine, 8) == pytest.approx(7e-5 + 8e-3)
    assert collective_s("reduce", 80e6, machine, 8) == pytest.approx(7e-5 + 8e-3)


def test_traffic_of_strategies_by_hand() -> None:
    machine = cluster(2, 4, intra=8e9, inter=1e9, latency_s=0.0)
    size = 4 * 300_000
    phases = unit_traffic([WEIGHT], Strategy("hierarchical", 8), "fp32", machine)
    # Half of a quarter crosses at 1 GB/s a rank (one of each node, while all others do so too), then 3/4 at 8 GB/s;
    # the permutation reads and writes everything at the device's 600 GB/s.
    assert phases.forward_gather_s == pytest.approx(0.5 * (size / 4) / 1e9 + 0.75 * size / 8e9 + 2 * size / 600e9)
    assert phases.reduce_s == pytest.approx(phases.forward_gather_s)
    copy = unit_traffic([WEIGHT], Strategy("secondary_shard", 8, secondary=4), "fp32", machine)
    assert copy.forward_gather_s == pytest.approx(7 / 8 * size / 4e9)
    assert copy.backward_gather_s == pytest.approx(0.75 * size / 8e9)
    owner = unit_traffic([WEIGHT], Strategy("owner", 8), "fp32", machine)
    assert (owner.forward_gather_s, owner.backward_gather_s, owner.reduce_s) == pytest.approx((size / 4e9,) * 3)


def test_two_phases_hold_more_buffers() -> None:
    one = unit_bytes([WEIGHT], Strategy("shard", 8), "bf16", ADAM)
    two = unit_bytes([WEIGHT], Strategy("hierarchical", 8), "bf16", ADAM, node=4)
    # Only while it runs: what a rank sends, 37,500 elements in bf16, 75,000 -> 147 x 512 bytes, which in fp32 is what
    # rests; and of two phases 600,000 bytes again, -> 1172 x 512, and what the two nodes exchange, that of one of the
    # four ranks of a node: 150,000 -> 293 x 512.  In fp32 1,200,000 -> 2344 x 512 and 300,000 -> 586 x 512.
    assert two.gather_temporary == 75_264 + 600_064 + 150_016
    assert two.reduce_temporary == 1_200_128 + 300_032
    assert (one.gather_temporary, one.reduce_temporary) == (75_264, 0)
    assert unit_bytes([WEIGHT], Strategy("shard", 8), "fp32", ADAM).gather_temporary == 0
    assert two.regather_temporary == two.gather_temporary
    assert replace(two, gather_temporary=75_264, regather_temporary=75_264, reduce_temporary=0) == one


def test_each_tensor_of_what_the_optimizer_makes_is_rounded() -> None:
    names = ("adam", "sgd", "states of 4 bytes per parameter")
    adam, sgd, other = (unit_bytes([WEIGHT, BIAS, BIAS], Strategy("shard", 8), "bf16", optimizer_of(n)) for n in names)
    # 37,500 and 125 elements in fp32: 150,000 -> 293 x 512; 500 -> 512.  Gradients are one buffer of 151,000.
    assert (adam.updates, adam.stepped) == (150_016 + 2 * 512, 151_040)
    assert (sgd.updates, other.updates) == (0, adam.updates)
    offloaded = unit_bytes([WEIGHT, BIAS], Strategy("shard", 8, offload=True), "bf16", ADAM)
    assert offloaded.updates == 0


def test_secondary_copy_by_hand() -> None:
    unit = unit_bytes([WEIGHT, BIAS], Strategy("secondary_shard", 8, secondary=4), "bf16", ADAM)
    # 300,000 x 2 / 4 = 150,000 -> 293 x 512; 1,000 x 2 / 4 = 500 -> 512.
    assert unit.secondary == 150_016 + 512
    # What is sent: 37,625 elements before forward, 75,250 before backward -> 147 and 294 x 512.
    assert (unit.gather_temporary, unit.regather_temporary) == (75_264, 150_528)
    once = replace(unit, secondary=0, regather_temporary=75_264)
    assert once == unit_bytes([WEIGHT, BIAS], Strategy("shard", 8), "bf16", ADAM)


def test_an_owner_holds_all_and_others_nothing() -> None:
    owner = unit_bytes([WEIGHT], Strategy("owner", 8), "bf16", ADAM)
    # 300,000 in fp32 at rest -> 2344 x 512; the broadcast buffer in bf16, 600,000 -> 1172 x 512.
    assert (owner.parameters, owner.gradients, owner.optimizer) == (1_200_128, 1_200_128, 2 * 1_200_128 + 512)
    assert (owner.unsharded, owner.gathered, owner.reduce_input) == (600_064, 0, 1_200_128)
    other = unit_bytes([WEIGHT], Strategy("owner", 8), "bf16", ADAM, elsewhere=True)
    # Adam counts the steps of an empty shard too: 512.
    nothing = {"parameters": 0, "gradients": 0, "stepped": 0, "updates": 0, "largest": 0, "second": 0}
    assert other == replace(owner, **nothing, optimizer=512)
    plain = unit_bytes([WEIGHT], Strategy("owner", 8), "bf16", OPTIMIZERS["sgd"], elsewhere=True)
    assert plain.optimizer == 0


def test_offload_leaves_nothing_at_rest() -> None:
    here = unit_bytes([WEIGHT], Strategy("shard", 8), "bf16", ADAM)
    there = unit_bytes([WEIGHT], Strategy("shard", 8, offload=True), "bf16", ADAM)
    assert (there.parameters, there.gradients, there.optimizer) == (0, 0, 0)
    # Shards pass the device on their way, while their collective runs: 75,000 bytes in bf16, as they are sent ->
    # 75,264; 150,000 in fp32 -> 150,016.
    assert (there.gather_temporary, there.reduce_temporary) == (75_264, 150_016)
    assert there.offloaded == here.gradients == 150_016
    running = ("unsharded", "gathered", "reduce_input", "full_gradients", "last_gradient")
    assert all(getattr(there, name) == getattr(here, name) for name in running)


def test_an_offloaded_owner_copies_what_it_sends_itself() -> None:
    unit = unit_bytes([WEIGHT], Strategy("owner", 8, offload=True), "bf16", ADAM)
    assert (unit.parameters, unit.gradients, unit.optimizer) == (0, 0, 0)
    assert (unit.gather_temporary, unit.reduce_temporary) == (0, 0)
    other = unit_bytes([WEIGHT], Strategy("owner", 8, offload=True), "bf16", ADAM, elsewhere=True)
    assert other == replace(unit, offloaded=0)


def test_owners_by_hand() -> None:
    # 8 to rank 0, 7 to rank 1, 6 to rank 2; 5 to rank 2, which has least; 4 to rank 1, which has 7 by then.
    assert assign_owners([4, 8, 7, 5, 6], 3) == (1, 0, 1, 2, 2)
    assert assign_owners([1, 1, 1], 2) == (0, 1, 0)
    assert assign_owners([], 4) == ()


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_owners_are_balanced(sizes: list[int], ranks: int) -> None:
    owned = Counter[int]()
    for size, rank in zip(sizes, assign_owners(sizes, ranks), strict=True):
        owned[rank] += size
    assert set(owned) <= set(range(ranks))
    # Whoever got a unit last had the least then, and so at most the mean.
    assert max(owned.values(), default=0) <= sum(sizes) / ranks + max(sizes, default=0)


def test_strategies_of_a_cluster() -> None:
    names = [str(strategy) for strategy in strategies_on(cluster(2, 4))]
    assert names == [
        "replicate",
        "shard",
        "shard_grad",
        "group_shard:2",
        "group_shard:4",
        "hierarchical",
        "secondary_shard:2",
        "secondary_shard:4",
        "owner",
    ]
    # What lets ranks run ahead of each other is offered only where they do not wait anyway; never the costlier twin.
    uneven = [str(strategy) for strategy in strategies_on(cluster(2, 4), uneven=True)]
    assert uneven == [*names, "odc:2", "odc:4"]
    assert [str(strategy) for strategy in strategies_on(cluster(1, 1))] == ["replicate"]
    # 3 nodes of 2: groups of 3 would split nodes unevenly; 2 is a node, 6 is the world.
    assert [str(s) for s in strategies_on(cluster(3, 2)) if s.name == "group_shard"] == ["group_shard:2"]
    # A window lies in one node, all of which it may span.
    assert [str(s) for s in strategies_on(cluster(1, 6), uneven=True) if s.name == "odc"] == ["odc:2", "odc:3", "odc:6"]


def test_known_strategies_of_a_cluster() -> None:
    names = [str(strategy) for strategy in known_strategies(cluster(2, 2))]
    plain = [
        "replicate",
        "shard",
        "shard_grad",
        "group_shard:2",
        "hierarchical",
        "secondary_shard:2",
        "owner",
        "odc:2",
        "odc_ordered:2",
    ]
    assert names == [*plain, *(f"{name}+offload" for name in plain)]
    # One node has no network to spare; one rank has nobody to share with.
    assert "hierarchical" not in [str(strategy) for strategy in known_strategies(cluster(1, 4))]
    assert "hierarchical" not in [str(strategy) for strategy in known_strategies(cluster(4, 1))]
    assert [str(strategy) for strategy in known_strategies(cluster(1, 1))] == ["replicate", "replicate+offload"]
    assert {strategy.name for strategy in known_strategies(cluster(2, 4))} == set(SPECS)


def test_what_fully_shard_is_told() -> None:
    told = {str(s): s.reshard_after_forward for s in known_strategies(cluster(1, 4)) if not s.offload}
    assert told["shard"] is told["replicate"] is told["group_shard:2"] is True
    assert told["shard_grad"] is False
    assert told["secondary_shard:2"] == 2


SHAPES = st.sampled_from([(1, 1), (1, 2), (1, 8), (2, 4), (4, 8), (3, 2)])


@given(SHAPES)
def test_strategies_are_read_back_as_printed(shape: tuple[int, int]) -> None:
    machine = cluster(*shape)
    for strategy in known_strategies(machine):
        assert parse_strategy(str(strategy), machine) == strategy


@given(SHAPES, st.data())
def test_choices_are_read_back_as_printed(shape: tuple[int, int], data: st.DataObject) -> None:
    machine = cluster(*shape)
    slices = tuple(data.draw(st.lists(st.sampled_from(known_strategies(machine)), min_size=1, max_size=12)))
    text = format_choice(slices)
    assert parse_choice(text, machine) == slices
    assert parse_choice(f" {text.replace(',', ' , ').replace('*', ' * ')} ", machine) == slices


def test_choices_as_they_are_written() -> None:
    shard, copy = Strategy("shard", 8), Strategy("replicate", 1)
    assert format_choice([shard]) == "shard"
    assert format_choice([shard, shard, copy, shard]) == "split(2*shard, replicate, shard)"
    assert format_choice([replace(shard, offload=True)] * 2) == "split(2*shard+offload)"
    assert parse_choice("split(shard, shard)", cluster(1, 8)) == (shard, shard)


@given(st.text(alphabet="split(shardowne+f:*,) 0123456789\n", max_size=40))
def test_no_text_is_more_than_refused(text: str) -> None:
    with suppress(OsdpError):
        slices = parse_choice(text, cluster(1, 8))
        assert parse_choice(format_choice(slices), cluster(1, 8)) == slices


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("split(shard)", "two slices"),
        ("split()", "no such strategy"),
        ("split(shard, )", "no such strategy"),
        ("split(shard, nothing)", "got: nothing"),
        ("split(0*shard, 2*shard)", "count"),
        (f"split({MAX_SLICES}*shard, shard)", f"{MAX_SLICES} slices in all"),
        ("split(999999*shard)", "count"),
        ("split(9999999999*shard)", "no such strategy"),
        ("split(split(2*shard), shard)", "no such strategy"),
        ("shard+", "no such strategy"),
        ("hierarchical", "no such strategy on 1 x 8"),
        ("", "got: nothing"),
    ],
)
def test_choices_that_mean_nothing_are_refused(text: str, reason: str) -> None:
    with pytest.raises(OsdpError, match=f"(?s){reason}"):
        parse_choice(text, cluster(1, 8))


def test_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OsdpError, match=r"(?s)got: group_shard:5.*group_shard:4.*owner.*offload"):
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
