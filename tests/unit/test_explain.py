"""What every other choice would cost: against arithmetic by hand and against edited plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from synthetic import MB, chain, cluster, options_of, transformer

from osdp.cli.reports.explain import print_plan_reasons
from planner.analysis.explain import Alternative, OpenPlan, Target, alternatives, find_target, open_plan, parts
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.plan import Plan
from planner.pricing import make_plan, predict
from planner.search.baselines import uniform
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute

SHARD = Strategy("shard", 4)
STAGES = 24
RATE = 10e9
"""Bytes per second of the link."""
MEMORY_RATE = 600e9
"""Bytes per second of device memory, as `synthetic.cluster` has it."""
WEIGHT = 4 * MB
"""Bytes of one weight of `long_chain`, 1024 x 1024 in fp32."""
COPY_S = 2 * WEIGHT / MEMORY_RATE
"""Copying it once, as FSDP2 does after a gather and before a reduction."""


def slow_cluster(gpus: int = 4, overlaps: bool = False) -> Cluster:
    """No latency and, unless asked for, no overlap: times are sums that can be done by hand."""
    return cluster(gpus=gpus, intra=RATE, latency_s=0.0, overlaps=overlaps)


def long_chain() -> ModelGraph:
    """So many weights and so few activations that the optimizer step is the peak."""
    return chain([(1024, 1024)] * STAGES, [0.1] * STAGES, [0.001] * STAGES)


def uniform_plan(
    graph: ModelGraph, machine: Cluster, strategy: Strategy = SHARD, *, recompute: bool = False, room_bytes: int = 0
) -> Plan:
    """One strategy everywhere, with so much room above its peak."""
    space, load = Space(graph), Workload(machine, "adam", "fp32", 1)
    options = uniform(space, load, strategy, recompute)
    spanning = strategy if space.model.spanning else None
    plan = make_plan(options, spanning, space, load, limit_bytes=1, gap=0.0)
    return replace(plan, limit_bytes=plan.predicted.peak_memory_bytes + room_bytes)


def opened(graph: ModelGraph, machine: Cluster, room_bytes: int = 0) -> OpenPlan:
    return open_plan(uniform_plan(graph, machine, room_bytes=room_bytes), graph, machine)


def by_name(changes: list[Alternative]) -> dict[tuple[str, bool | None], Alternative]:
    return {(change.strategy, change.recompute): change for change in changes}


# --- arithmetic by hand ----------------------------------------------------------------------


@pytest.mark.parametrize("launch_s", [1e-3, 1e-9])
def test_what_a_step_takes_where_the_host_gets_ahead_is_told(
    launch_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four layers that take a slow host longer to launch than to compute, below one that takes the device longer."""
    graph = chain([(1024, 1024)] * 5, [0.1] * 4 + [100.0], [0.001] * 5)
    view = opened(graph, replace(cluster(gpus=4, launch_s=launch_s), name="slow host"))
    print_plan_reasons(Console(width=200), view)
    is_told = "launches ahead of the device" in capsys.readouterr().out
    assert is_told == (launch_s == 1e-3)
    if is_told:
        assert view.step_with_host_ahead_s < 0.99 * view.prediction.step_time_s
    else:
        assert view.step_with_host_ahead_s == pytest.approx(view.prediction.step_time_s)


def test_deltas_by_hand_without_overlap() -> None:
    view = opened(long_chain(), slow_cluster(), room_bytes=14 * MB)
    found = by_name(alternatives(view, find_target(view, "op5")))
    others = ("replicate", "shard_grad", "group_shard:2", "secondary_shard:2", "owner")
    assert set(found) == {(name, None) for name in others}
    pass_s = 3 / 4 * WEIGHT / RATE  # one ring pass over four ranks

    kept = found["shard_grad", None]  # saves the second gather, and copying out of it
    assert kept.delta_by_term_s["exposed_communication_s"] == pytest.approx(-pass_s - COPY_S)
    assert kept.delta_s == pytest.approx(-pass_s - COPY_S)

    full = found["replicate", None]  # one all-reduce of two passes instead of three passes
    # Foreach Adam reads and writes 18 tensors: lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4.
    step_s = 18 * (1 - 1 / 4) * WEIGHT / MEMORY_RATE
    assert full.delta_by_term_s["exposed_communication_s"] == pytest.approx(-pass_s)
    assert full.delta_by_term_s["optimizer_s"] == pytest.approx(step_s)
    assert full.delta_s == pytest.approx(step_s - pass_s)

    pairs = found["group_shard:2", None]  # three half passes in pairs, an all-reduce of half the weight
    pairs_s = 3 * (1 / 2 * WEIGHT / RATE) + 2 * (1 / 2 * (WEIGHT / 2) / RATE)
    assert pairs.delta_by_term_s["exposed_communication_s"] == pytest.approx(pairs_s - 3 * pass_s)


def test_memory_by_hand_in_the_optimizer_step() -> None:
    view = opened(long_chain(), slow_cluster(), room_bytes=14 * MB)
    assert view.prediction.peak_phase == "optimizer"
    # Weight, gradient, two moments and Adam's temporary: 5 shards, and a step counter of 512 bytes.
    assert view.prediction.peak_memory_bytes == STAGES * (5 * WEIGHT // 4 + 512)
    full = by_name(alternatives(view, find_target(view, "op5")))["replicate", None]
    assert full.phase == "optimizer"
    assert full.delta_bytes == 5 * (WEIGHT - WEIGHT // 4) == 15 * MB
    assert full.excess_bytes == 1 * MB
    assert not full.fits
    assert full.peak_bytes == view.prediction.peak_memory_bytes + 15 * MB


def test_a_pattern_changes_all_that_it_matches() -> None:
    view = opened(long_chain(), slow_cluster())
    target = find_target(view, "op1?")
    assert target == Target(frozenset(range(10, 20)))
    kept = by_name(alternatives(view, target))["shard_grad", None]
    assert kept.delta_s == pytest.approx(-10 * (3 / 4 * WEIGHT / RATE + COPY_S))


def test_alternatives_come_fastest_first() -> None:
    view = opened(long_chain(), slow_cluster())
    deltas = [change.delta_s for change in alternatives(view, find_target(view, "op5"))]
    assert deltas == sorted(deltas)


# --- against plans that say the same by their choices ------------------------------------------


@pytest.mark.parametrize("name", ["embed", "norm", "blocks.2", "blocks.*", "*"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_every_alternative_is_what_the_edited_plan_predicts(name: str, overlaps: bool) -> None:
    graph, machine = transformer(4, 512), slow_cluster(overlaps=overlaps)
    view = opened(graph, machine)
    target = find_target(view, name)
    changes = alternatives(view, target)
    matched = {
        "embed": {"embed"},
        "norm": {"norm"},
        "blocks.2": {o.name for o in graph.operators if o.block == 2},
        "blocks.*": {o.name for o in graph.operators if o.block is not None},
        "*": {o.name for o in graph.operators},
    }[name]
    blocks = {"blocks.2": ["blocks.2"]}.get(name, [b.name for b in graph.blocks] if "*" in name else [])
    assert len(changes) == (6 * 2 - 1 if blocks else 6 - 1)
    for change in changes:
        choices = view.plan.choices | dict.fromkeys(matched, change.strategy)
        edited = replace(view.plan, choices=choices, recomputed_blocks=blocks if change.recompute else [])
        options, _ = options_of(edited, view.space, view.load)
        expected = predict(options, view.space, view.load)
        assert change.step_time_s == pytest.approx(expected.step_time_s)
        assert change.peak_bytes == expected.peak_memory_bytes
        assert change.phase == expected.peak_phase
        terms = {term: s for term, s in change.delta_by_term_s.items() if term != "hidden_communication_s"}
        assert sum(terms.values()) == pytest.approx(change.delta_s)


# --- names -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def view() -> OpenPlan:
    return opened(transformer(4, 512), slow_cluster())


def stage_of(view: OpenPlan, name: str) -> int:
    return [stage.name for stage in view.space.model.stages].index(name)


def test_an_operator_stands_for_the_stage_that_it_is_decided_with(view: OpenPlan) -> None:
    block = Target(frozenset({stage_of(view, "blocks.2")}))
    assert find_target(view, "blocks.2.up") == block
    assert find_target(view, "blocks.2") == block


def test_a_module_around_operators_stands_for_all_of_them(view: OpenPlan) -> None:
    assert find_target(view, "blocks") == find_target(view, "blocks.?")
    assert len(find_target(view, "blocks").stages) == 4


def test_a_tied_operator_is_the_spanning_one(view: OpenPlan) -> None:
    assert find_target(view, "embed") == Target(frozenset(), spanning=True)


def test_an_unknown_name_gets_the_nearest(view: OpenPlan) -> None:
    with pytest.raises(OsdpError) as caught:
        find_target(view, "blocks.2.upp")
    assert "blocks.2.up" in caught.value.expected.split(", ")
    with pytest.raises(OsdpError, match="no such operator"):
        find_target(view, "layers.*")


# --- parts ---------------------------------------------------------------------------------------


def test_parts_hold_every_stage_once() -> None:
    graph, machine = transformer(4, 512), slow_cluster()
    plan = uniform_plan(graph, machine)
    view = open_plan(replace(plan, recomputed_blocks=["blocks.0", "blocks.2"]), graph, machine)
    found = {(part.label, part.recompute): part for part in parts(view)}
    assert {key: len(part.stages) for key, part in found.items()} == {
        ("Block", Recompute.EVERYTHING): 2,
        ("Block", Recompute.NOTHING): 2,
        ("norm", None): 1,
        ("tied", None): 0,
    }
    assert found["Block", Recompute.EVERYTHING].stages == (stage_of(view, "blocks.0"), stage_of(view, "blocks.2"))
    assert found["tied", None].strategies == ("shard",)


def test_memory_binds_where_the_faster_choice_does_not_fit() -> None:
    # Keeping a weight from forward to backward saves a gather, but no byte is left.
    (part, *_) = parts(opened(chain([(2048, 2048)] * 2, [0.1] * 2, [0.001] * 2), slow_cluster()))
    assert part.binds == "memory"
    assert part.tempting is not None
    assert part.tempting.excess_bytes > 0
    assert part.tempting.delta_s < 0
    assert part.better is None


def test_nothing_binds_where_a_faster_choice_fits() -> None:
    (part, *_) = parts(opened(long_chain(), slow_cluster(), room_bytes=1 << 30))
    assert part.binds == "nothing"
    assert part.better is not None
    # Replicating saves one pass too, but its optimizer step takes longer: see the first test.
    assert part.better.strategy == "shard_grad"
    assert part.tempting is None


def test_time_binds_where_nothing_is_faster() -> None:
    graph, machine = long_chain(), slow_cluster()
    plan = uniform_plan(graph, machine, Strategy("shard_grad", 4), room_bytes=1 << 30)
    (part, *_) = parts(open_plan(plan, graph, machine))
    assert part.binds == "time"
    assert part.tempting is part.better is None
    # The all-reduce takes as long as gather and scatter, so only the optimizer makes it dearer, and FSDP2's copying of
    # what is whole in any case, again before backward.
    assert part.cheapest is not None
    assert part.cheapest.strategy == "replicate"
    assert part.cheapest.delta_s == pytest.approx(18 * 3 / 4 * WEIGHT / MEMORY_RATE + COPY_S)


def test_on_one_rank_there_is_no_alternative_but_recomputation() -> None:
    graph, machine = transformer(2, 512), slow_cluster(gpus=1)
    plan = uniform_plan(graph, machine, Strategy("replicate", 1))
    view = open_plan(plan, graph, machine)
    assert alternatives(view, find_target(view, "norm")) == []
    assert [(c.strategy, c.recompute) for c in alternatives(view, find_target(view, "blocks.0"))] == [
        ("replicate", Recompute.EVERYTHING)
    ]


# --- refusals --------------------------------------------------------------------------------------


def test_a_plan_for_another_model_is_refused() -> None:
    plan = uniform_plan(transformer(4, 512), slow_cluster())
    other = replace(transformer(3, 512), fingerprint="other")
    with pytest.raises(OsdpError, match="made for another model"):
        open_plan(plan, other, slow_cluster())


def test_strategies_that_the_cluster_does_not_have_are_refused() -> None:
    graph = transformer(2, 512)
    plan = uniform_plan(graph, slow_cluster(8), Strategy("group_shard", 4))
    with pytest.raises(OsdpError, match="no such strategy on 1 x 4 ranks"):
        open_plan(plan, graph, slow_cluster(4))


def test_mixed_operators_of_one_block_are_one_part() -> None:
    graph, machine = transformer(2, 512), slow_cluster()
    plan = uniform_plan(graph, machine)
    plan = replace(plan, choices=plan.choices | {"blocks.1.up": "replicate"})
    view = open_plan(plan, graph, machine)
    mixed = next(part for part in parts(view) if len(part.strategies) > 1)
    assert mixed.strategies == ("shard", "replicate")
    assert view.decided.choices[mixed.stages[0]] == StageDecision(
        tuple(
            Strategy("replicate", 1) if name == "up" else SHARD
            for name in ("norm1", "qkv", "out", "norm2", "up", "down")
        )
    )
    # Uniform sharding is an alternative of the mixed block, not what it has.
    assert ("shard", Recompute.NOTHING) in by_name(alternatives(view, Target(frozenset(mixed.stages))))


def test_split_operators_are_one_target_with_all_their_slices() -> None:
    graph, machine = transformer(2, 512, vocabulary=16384, tied=False), slow_cluster()
    plan = uniform_plan(graph, machine)
    view = open_plan(replace(plan, choices=plan.choices | {"head": "split(2*shard, replicate)"}), graph, machine)
    target = find_target(view, "head")
    taken = [strategy for index in sorted(target.stages) for strategy in view.decided.choices[index].strategies]
    # The norm before the head is decided with it.
    assert [str(strategy) for strategy in taken] == ["shard", "shard", "shard", "replicate"]
    assert ("shard_grad", None) in by_name(alternatives(view, target))


def test_tied_operators_and_idle_ones_keep_what_the_file_says() -> None:
    graph, machine = transformer(2, 512), slow_cluster()
    idle = replace(graph.operators[1], name="idle", modules=("idle",), block=None)
    graph = replace(graph, operators=(*graph.operators, idle))
    plan = uniform_plan(graph, machine)
    view = open_plan(replace(plan, choices=plan.choices | {"embed": "owner", "idle": "replicate"}), graph, machine)
    assert view.spanning == "owner"
    assert view.decided.idle == (Strategy("replicate", 1),)
    (change, *_) = alternatives(view, find_target(view, "norm"))
    options, _ = options_of(
        replace(view.plan, choices=view.plan.choices | {"norm": change.strategy}), view.space, view.load
    )
    assert change.peak_bytes == predict(options, view.space, view.load).peak_memory_bytes
