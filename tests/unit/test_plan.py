"""Plans: what is written is what was found, and a damaged file never gets further than an `OsdpError`."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pulp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import chain, cluster, options_of, transformer

from osdp.planning.plan_file import read_plan, write_plan
from planner.cost.peak_memory import peak_memory
from planner.cost.simulator import simulated_s
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.plan import Plan, check_model
from planner.pricing import decisions_of, make_plan, predict, space_of
from planner.problem import Task
from planner.search.baselines import uniform
from planner.search.search import Found, search
from planner.strategies.registry import known_strategies
from planner.strategies.spec import Strategy
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute

GRAPH = transformer(12, 256)
LIMIT = 192 << 20


def planned(graph: ModelGraph = GRAPH) -> tuple[Found, Plan]:
    found = search(Task(graph, cluster(1, 4), LIMIT))
    return found, make_plan(found.options, found.spanning, found.space, found.load, limit_bytes=LIMIT, gap=found.gap)


def test_choices_read_back_are_the_options_that_were_found() -> None:
    found, plan = planned()
    load = Workload(cluster(1, 4), plan.optimizer, plan.model.precision, plan.micro_batch, plan.accumulation)
    options, spanning = options_of(plan, Space(GRAPH), load)
    assert spanning == (found.spanning,)
    assert [(o.strategies, o.recompute) for o in options] == [(o.strategies, o.recompute) for o in found.options]
    # The prediction is what the pure functions say of the choices, from a fresh start.
    assert plan.predicted.peak_memory_bytes == pytest.approx(peak_memory(options, load).total_bytes, abs=4)
    assert plan.predicted.step_time_s == simulated_s(options, load) == pytest.approx(step_time(options, load).total_s)
    assert plan.predicted.samples_per_s == pytest.approx(4 * plan.micro_batch / plan.predicted.step_time_s)
    assert sum(plan.predicted.memory_by_category.values()) == plan.predicted.peak_memory_bytes <= LIMIT


def test_every_operator_has_a_strategy_and_every_recomputed_block_is_one() -> None:
    found, plan = planned()
    assert Counter(plan.choices.keys()) == Counter(operator.name for operator in GRAPH.operators)
    assert set(plan.recomputed_blocks) <= {block.name for block in GRAPH.blocks}
    assert len(plan.recomputed_blocks) == sum(bool(option.recompute) for option in found.options)


def test_a_plan_for_another_model_says_what_differs() -> None:
    _, plan = planned()
    check_model(plan, GRAPH)
    other = replace(transformer(3, 256), fingerprint="other")
    with pytest.raises(OsdpError, match=r"(?s)another model.*blocks\.10"):
        check_model(plan, other)


def test_choices_that_do_not_cover_the_model_are_refused() -> None:
    _, plan = planned()
    load = Workload(cluster(1, 4), "adam", "fp32", 1)
    choices = {name: strategy for name, strategy in plan.choices.items() if name != "blocks.3.up"}
    with pytest.raises(OsdpError, match=r"also blocks\.3\.up"):
        options_of(replace(plan, choices=choices), Space(GRAPH), load)
    with pytest.raises(OsdpError, match="no such strategy"):
        options_of(replace(plan, choices={**plan.choices, "norm": "group_shard:3"}), Space(GRAPH), load)
    with pytest.raises(OsdpError, match=r"blocks\.99"):
        options_of(replace(plan, recomputed_blocks=["blocks.99"]), Space(GRAPH), load)


def test_a_block_may_mix_strategies_in_a_file() -> None:
    _, plan = planned()
    load = Workload(cluster(1, 4), "adam", "fp32", 1)
    mixed = {**plan.choices, "blocks.3.up": "replicate", "blocks.3.down": "replicate"}
    options, _ = options_of(replace(plan, choices=mixed, recomputed_blocks=[]), Space(GRAPH), load)
    mixed_option = options[4]
    # Two units: norm1, qkv, out, norm2 as they were, and the two that were changed.
    assert len(mixed_option.segments) == 2
    assert mixed_option.segments[1].forward_gather_s == 0.0
    assert mixed_option.segments[1].step_reduce_s > 0.0


def test_operators_that_are_never_called_rest_sharded() -> None:
    used = chain([(2048, 1024)], gflops=[1], saved_mb=[1])
    idle = replace(used.operators[0], name="idle", modules=("idle",))
    graph = replace(used, operators=(used.operators[0], idle))
    with_idle, plan = planned(graph)
    without, _ = planned(used)
    # Another 2048 x 1024 parameters in fp32, over four ranks; no gradients, so no moments.
    extra = with_idle.options[0].parameters - without.options[0].parameters
    assert extra == 2048 * 1024 * 4 // 4
    assert plan.choices["idle"] == "shard"


def test_an_idle_operator_takes_what_the_file_says() -> None:
    used = chain([(2048, 1024)], gflops=[1], saved_mb=[1])
    graph = replace(used, operators=(*used.operators, replace(used.operators[0], name="idle", modules=("idle",))))
    _, plan = planned(graph)
    load = Workload(cluster(1, 4), "adam", "fp32", 1)
    sharded, _ = options_of(plan, Space(graph), load)
    copied, _ = options_of(replace(plan, choices={**plan.choices, "idle": "replicate"}), Space(graph), load)
    assert copied[0].parameters - sharded[0].parameters == 2048 * 1024 * (4 - 1)


def test_every_strategy_can_be_read_and_evaluated() -> None:
    _, plan = planned()
    machine = cluster(2, 2)
    load = Workload(machine, "adam", "fp32", 1)
    for strategy in known_strategies(machine):
        alike = replace(plan, choices=dict.fromkeys(plan.choices, str(strategy)), recomputed_blocks=[])
        space = space_of(alike, GRAPH, machine)
        options, spanning = options_of(alike, space, load)
        assert spanning == (strategy,)
        predicted = predict(options, space, load)
        assert predicted.peak_memory_bytes > 0
        written = make_plan(options, strategy, space, load, limit_bytes=LIMIT, gap=0.0)
        assert written.choices == alike.choices


def test_split_operators_are_evaluated_in_a_space_of_their_own() -> None:
    graph, machine = transformer(2, 256, vocabulary=65536, tied=False), cluster(1, 4)
    load = Workload(machine, "adam", "fp32", 1)
    fsdp = uniform(Space(graph), load, Strategy("shard", 4), recompute=Recompute.NOTHING)
    sharded = make_plan(fsdp, None, Space(graph), load, limit_bytes=LIMIT, gap=0.0)
    split = replace(sharded, choices=sharded.choices | {"head": "split(4*shard)"})
    with pytest.raises(OsdpError, match="splits other operators"):
        options_of(split, Space(graph), load)
    whole, _ = options_of(sharded, Space(graph), load)
    space = space_of(split, graph, machine)
    sliced, _ = options_of(split, space, load)
    # What rests is the same; a quarter of the head is gathered at a time.
    assert sum(o.parameters for o in sliced) == sum(o.parameters for o in whole)
    head = 4 * 65536 * 256
    assert whole[-1].prefetched == head + 4 * 256  # gathered with the norm before it
    assert len(sliced) == len(whole)
    assert sliced[-1].prefetched == head // 4
    # Three sums of the logits read two tensors and write one; the gradient of the input is put together.
    extra_bytes = 3 * 3 * (4 * 1024 * 65536) + 2 * (4 * 1024 * 256)
    extra_s = step_time(sliced, load).compute_s - step_time(whole, load).compute_s
    assert extra_s == pytest.approx(extra_bytes / 600e9)
    written = make_plan(sliced, None, space, load, limit_bytes=LIMIT, gap=0.0)
    assert written.choices == split.choices


def test_slices_may_differ() -> None:
    graph = transformer(2, 256, tied=False)
    _, plan = planned(graph)
    text = "split(shard, replicate, shard)"
    split = replace(plan, choices=dict.fromkeys(plan.choices, "shard") | {"blocks.1.up": text}, recomputed_blocks=[])
    space = space_of(split, graph, cluster(1, 4))
    decisions = decisions_of(split, space, cluster(1, 4))
    (_, stage) = (stage for stage in space.model.stages if stage.block is not None)
    taken = decisions.choices[space.model.stages.index(stage)].strategies
    assert [str(strategy) for strategy in taken] == ["shard"] * 5 + ["replicate", "shard", "shard"]
    options = decisions.options(space, Workload(cluster(1, 4), "adam", "fp32", 1), LIMIT)
    option = options[space.model.stages.index(stage)]
    # norm1 to norm2, three slices, and down.
    assert len(option.segments) == 5


def test_what_cannot_be_split_is_refused() -> None:
    _, plan = planned()
    with pytest.raises(OsdpError, match="embed cannot be split"):
        space_of(replace(plan, choices=plan.choices | {"embed": "split(2*shard)"}), tied(), cluster(1, 4))


def tied() -> ModelGraph:
    """As traced, the tied operator has the modules of both its uses."""
    embed = replace(GRAPH.operators[0], modules=("embed", "head"))
    return replace(GRAPH, operators=(embed, *GRAPH.operators[1:]))


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated")
def test_cbc_takes_over_where_highs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_highs, _ = planned()
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    with_cbc, _ = planned()
    assert with_cbc.samples_per_s == pytest.approx(with_highs.samples_per_s, rel=1e-3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_plan_file_is_refused_or_read_and_never_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "plan.yaml"
    if not path.exists():
        write_plan(path, planned()[1], "for a test")
        (tmp_path / "whole").write_text(path.read_text())
    lines = (tmp_path / "whole").read_text().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    damage = data.draw(st.sampled_from(["drop", "repeat", "cut", "replace"]))
    if damage == "drop":
        del lines[at]
    elif damage == "repeat":
        lines.insert(at, lines[at])
    elif damage == "cut":
        del lines[at:]
    else:
        values = ["", "[1", "nan", "-1", "{}", "*x", "!!python/name:os.system"]
        lines[at] = f"{lines[at].split(':')[0]}: {data.draw(st.sampled_from(values))}"
    path.write_text("\n".join(lines))
    with suppress(OsdpError):
        assert isinstance(read_plan(path), Plan)
