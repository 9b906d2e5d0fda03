"""Pins: honoured by every plan of the search, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain, cluster, transformer

from osdp.planning.request import Request, pins_of, task_of, written
from planner.name_patterns import matches
from planner.pins import Pin, on_cluster, parse_pin, resolve
from planner.plan import Plan
from planner.search.search import search
from planner.strategies.notation import format_choice
from planner.strategies.spec import Strategy
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return transformer(4, 512)


@pytest.fixture(scope="module")
def machine() -> Cluster:
    return cluster(1, 4)


def names_of(graph: ModelGraph, machine: Cluster, *pins: str) -> dict[str, str]:
    """Return the choices that pins decide, by operator."""
    found = resolve([parse_pin(pin) for pin in pins], graph, machine)
    return {graph.operators[index].name: format_choice(slices) for index, slices in found.strategies.items()}


# --- the text ----------------------------------------------------------------------------------------


def test_a_pin_is_a_pattern_and_a_choice() -> None:
    assert parse_pin("blocks.*.mlp = shard") == Pin("blocks.*.mlp", "shard")
    assert str(parse_pin("h.0=split(4*shard, replicate)")) == "h.0=split(4*shard, replicate)"


@pytest.mark.parametrize("text", ["", "shard", "=shard", "blocks=", " = "])
def test_what_is_no_pin_is_told(text: str) -> None:
    with pytest.raises(OsdpError, match="not a pin"):
        parse_pin(text)


words = st.text("abc.*?[]", min_size=1, max_size=12)


@given(words, st.sampled_from(["shard", "keep", "group_shard:2+offload", "split(2*shard)"]))
def test_what_is_printed_is_read_back(pattern: str, choice: str) -> None:
    assert parse_pin(str(Pin(pattern, choice))) == Pin(pattern, choice)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        pin = parse_pin(text)
    except OsdpError:
        assert "=" not in text or not text.rpartition("=")[0].strip() or not text.rpartition("=")[2].strip()
        return
    assert f"{pin.pattern}={pin.choice}" == "=".join(part.strip() for part in text.rsplit("=", 1))


@given(st.lists(st.sampled_from(["h", "0", "1", "mlp", "up"]), min_size=1, max_size=4), st.text("h01.*?", max_size=6))
def test_a_name_matches_by_itself_or_a_module_around_it(path: list[str], pattern: str) -> None:
    modules = [".".join(path[:length]) for length in range(1, len(path) + 1)]
    assert matches(".".join(path), pattern) == any(fnmatchcase(module, pattern) for module in modules)


# --- what a pattern means ----------------------------------------------------------------------------


def test_operators_blocks_modules_and_patterns(graph: ModelGraph, machine: Cluster) -> None:
    inside = ["norm1", "qkv", "out", "norm2", "up", "down"]
    assert names_of(graph, machine, "blocks.2.up=shard") == {"blocks.2.up": "shard"}
    assert names_of(graph, machine, "blocks.2=shard") == {f"blocks.2.{name}": "shard" for name in inside}
    every = {f"blocks.{block}.{name}": "shard" for block in range(4) for name in inside}
    assert names_of(graph, machine, "blocks=shard") == names_of(graph, machine, "blocks.*=shard") == every
    assert names_of(graph, machine, "*=shard") == every | {"embed": "shard", "norm": "shard"}
    assert names_of(graph, machine, "blocks.?.up=split(2*shard)", "norm=replicate") == {
        **{f"blocks.{block}.up": "split(2*shard)" for block in range(4)},
        "norm": "replicate",
    }


def test_blocks_are_recomputed_or_kept(graph: ModelGraph, machine: Cluster) -> None:
    pins = resolve([Pin("blocks.[01]", "recompute"), Pin("blocks.3", "keep")], graph, machine)
    again, kept = Recompute.EVERYTHING, Recompute.NOTHING
    assert (pins.recompute, pins.strategies) == ({0: again, 1: again, 3: kept}, {})


def test_agreeing_pins_are_no_contradiction(graph: ModelGraph, machine: Cluster) -> None:
    assert names_of(graph, machine, "blocks.*=shard", "blocks.1=shard")["blocks.1.up"] == "shard"


def test_the_pin_that_matches_less_takes_precedence(graph: ModelGraph, machine: Cluster) -> None:
    """In whatever order they are given, also of blocks."""
    for order in permutations(("*=shard", "blocks.1=group_shard:2", "blocks.1.up=replicate")):
        names = names_of(graph, machine, *order)
        assert names["blocks.1.up"] == "replicate"
        assert names["blocks.1.down"] == "group_shard:2"
        assert {names[name] for name in names if not name.startswith("blocks.1.")} == {"shard"}
    for order in permutations(("*=recompute", "blocks.1=keep")):
        pins = resolve([parse_pin(pin) for pin in order], graph, machine)
        again = dict.fromkeys(range(len(graph.blocks)), Recompute.EVERYTHING)
        assert pins.recompute == again | {1: Recompute.NOTHING}


def test_a_model_without_blocks_has_nothing_to_recompute(graph: ModelGraph, machine: Cluster) -> None:
    with pytest.raises(OsdpError, match="the model has no blocks"):
        resolve([Pin("*", "recompute")], replace(graph, blocks=()), machine)


def test_the_same_pins_on_more_ranks(graph: ModelGraph, machine: Cluster) -> None:
    pins = resolve([Pin("blocks.0.up", "shard"), Pin("blocks.0", "keep")], graph, machine)
    moved = on_cluster(pins, cluster(2, 4))
    assert list(moved.strategies.values()) == [(Strategy("shard", 8),)]
    assert moved.recompute == pins.recompute
    with pytest.raises(OsdpError, match="no such strategy"):
        on_cluster(resolve([Pin("norm", "group_shard:2")], graph, machine), cluster(1, 3))


# --- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "parts"),
    [
        (["blocks.9=shard"], ["the model has no such operator or block", "expected: blocks.", "named_modules()"]),
        (["blocks.2.upp=shard"], ["blocks.2.up"]),
        (
            ["blocks.2.up=shred"],
            ["no such strategy", "got: shred", "shard_grad", "recompute, recompute+offload, selective, keep"],
        ),
        (["blocks.2.up=group_shard:3"], ["no such strategy on 1 x 4 ranks", "group_shard:2"]),
        (["embed=recompute"], ["no such block, and only blocks can be recomputed"]),
        (
            ["blocks.2=split(2*shard)"],
            ["blocks.2.norm1 cannot be split", "matches linear layers only", "split(2*shard)"],
        ),
        (
            ["blocks.1=shard", "blocks.*.up=replicate"],
            ["contradict each other for blocks.1.up", "blocks.1=shard and blocks.*.up=replicate"],
        ),
        (["blocks.0=keep", "blocks.0=recompute"], ["contradict each other for blocks.0"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    graph: ModelGraph, machine: Cluster, pins: list[str], parts: list[str]
) -> None:
    with pytest.raises(OsdpError) as refused:
        names_of(graph, machine, *pins)
    assert [part for part in parts if part not in str(refused.value)] == []


def test_a_tied_operator_has_one_choice(machine: Cluster) -> None:
    graph = transformer(2, 512)
    tied = replace(graph.operators[0], modules=("embed", "head"))
    graph = replace(graph, operators=(tied, *graph.operators[1:]))
    assert names_of(graph, machine, "head=shard") == {"embed": "shard"}
    with pytest.raises(OsdpError, match=r"for embed and head \(one operator, as they share a parameter\)"):
        names_of(graph, machine, "embed=shard", "head=replicate")
    with pytest.raises(OsdpError, match="tied to others"):
        names_of(graph, machine, "head=split(2*shard)")


# --- honoured ----------------------------------------------------------------------------------------


def planned(graph: ModelGraph, machine: Cluster, limit: int, *pins: str, micro_batch: int | None = None) -> Plan:
    request = Request(limit, pins=tuple(parse_pin(pin) for pin in pins), micro_batch=micro_batch)
    return written(search(task_of(request, graph, machine)), request)


@pytest.mark.parametrize(
    "pins",
    [
        ("blocks.*.up=shard", "blocks.1=recompute", "embed=replicate"),
        ("*=replicate", "*=keep"),
        ("blocks.2.qkv=split(2*shard, replicate)", "norm=group_shard:2"),
    ],
    ids=["mixed", "all", "split"],
)
def test_every_pin_is_in_the_plan(graph: ModelGraph, machine: Cluster, pins: tuple[str, ...]) -> None:
    plan = planned(graph, machine, 8 * GIB, *pins, micro_batch=2)
    assert plan.asked.pins == list(pins)
    assert plan.asked.micro_batch == 2
    wanted = pins_of(plan, graph, machine)
    for index, slices in wanted.strategies.items():
        assert plan.choices[graph.operators[index].name] == format_choice(slices)
    for block, again in wanted.recompute.items():
        assert plan.recomputations.get(graph.blocks[block].name, Recompute.NOTHING) is again


def test_pins_never_make_a_plan_faster(graph: ModelGraph, machine: Cluster) -> None:
    free = planned(graph, machine, 400 * MIB)
    pinned = planned(graph, machine, 400 * MIB, "blocks.*=shard", "blocks.*=recompute")
    assert pinned.predicted.samples_per_s <= free.predicted.samples_per_s / (1 - free.gap) * (1 + 1e-9)
    assert len(pinned.recomputed_blocks) == 4


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(["replicate", "shard", "shard_grad", "group_shard:2"]), min_size=3, max_size=3))
def test_a_plan_of_which_all_is_pinned_is_that_plan(strategies: list[str]) -> None:
    graph, machine = chain([(1024, 1024), (2048, 1024), (1024, 1024)], [30, 60, 30], [10, 20, 10]), cluster(1, 4)
    pins = [f"op{index}={strategy}" for index, strategy in enumerate(strategies)]
    plan = planned(graph, machine, 8 * GIB, *pins, micro_batch=1)
    assert plan.choices == {f"op{index}": strategy for index, strategy in enumerate(strategies)}
