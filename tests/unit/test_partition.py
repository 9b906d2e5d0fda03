"""Whole tensors over ranks: against all partitions of small cases, and what the runtime makes of them."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Case, cluster_of, graph_of
from toys import Irregular

from osdp.compat.zero3_partition import assign, owner_pins, zero3_partition_tensors
from osdp.models.user_factory import source_of
from osdp.planning.request import Request, plan_model
from planner.pins import Pin, parse_pin, resolve
from planner.strategies.notation import format_choice, parse_strategy
from planner.strategies.owner_assignment import assign_owners
from planner.strategies.spec import Strategy
from profiler.errors import OsdpError
from profiler.trace.trace import trace_model
from runtime.compile_plan import compile_plan

PRIORITIES = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]
sizes_of = st.lists(st.integers(0, 40), min_size=1, max_size=7)
ranks_of = st.integers(1, 4)


def loads_of(sizes: list[int], ranks: tuple[int, ...] | list[int], count: int) -> list[int]:
    """Return what each rank keeps."""
    return [sum(size for size, rank in zip(sizes, ranks, strict=True) if rank == each) for each in range(count)]


def best_neighbours(sizes: list[int], count: int) -> tuple[int, int]:
    """Return the least (maximum, sum of squares) of all ways to cut neighbours into parts."""
    found = []
    for cuts in range(min(count, len(sizes))):
        for places in combinations(range(1, len(sizes)), cuts):
            parts = [sum(sizes[start:stop]) for start, stop in pairwise([0, *places, len(sizes)])]
            found.append((max(parts), sum(part * part for part in parts)))
    return min(found)


def best_of_all(sizes: list[int], count: int) -> int:
    """Return the least maximum of all partitions."""
    return min(max(loads_of(sizes, ranks, count)) for ranks in product(range(count), repeat=len(sizes)))


@given(sizes_of, ranks_of)
def test_priority_0_is_the_best_that_neighbours_can_be(sizes: list[int], count: int) -> None:
    ranks = assign(sizes, count, 0.0)
    assert list(ranks) == sorted(ranks), "neighbours stay together"
    loads = loads_of(sizes, ranks, count)
    assert (max(loads), sum(load * load for load in loads)) == best_neighbours(sizes, count)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), ranks_of)
def test_priority_1_is_within_grahams_bound(sizes: list[int], count: int) -> None:
    fullest = max(loads_of(sizes, assign(sizes, count, 1.0), count))
    assert 3 * count * fullest <= (4 * count - 1) * best_of_all(sizes, count)


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_more_priority_is_never_less_even(sizes: list[int], count: int) -> None:
    fullest = [max(loads_of(sizes, assign(sizes, count, priority), count)) for priority in PRIORITIES]
    assert fullest == sorted(fullest, reverse=True)


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9), st.floats(0, 1))
def test_ranks_are_numbered_as_they_begin(sizes: list[int], count: int, priority: float) -> None:
    ranks = assign(sizes, count, priority)
    assert len(ranks) == len(sizes)
    first = list(dict.fromkeys(ranks))
    assert first == list(range(len(first)))
    assert len(first) <= count


@given(st.lists(st.integers(1, 1000), min_size=9, max_size=40), st.integers(1, 9), st.floats(0, 1))
def test_no_rank_goes_without(sizes: list[int], count: int, priority: float) -> None:
    assert set(assign(sizes, count, priority)) == set(range(count))


def test_by_hand() -> None:
    # Of three cuts of 4 3 3 2 into two, 7 | 5 is best; in pairs from both ends both have 6.
    assert assign([4, 3, 3, 2], 2, 0.0) == (0, 0, 1, 1)
    assert assign([4, 3, 3, 2], 2, 1.0) == (0, 1, 1, 0)
    # One that is larger than all others together leaves them what is left of the ranks, evenly.
    assert assign([100, 1, 1, 1, 1], 3, 0.0) == (0, 1, 1, 2, 2)


def tensors(**shapes: tuple[int, ...]) -> OrderedDict[str, torch.Tensor]:
    """Return tensors without data; underscores stand for dots."""
    return OrderedDict((name.replace("_", "."), torch.empty(shape, device="meta")) for name, shape in shapes.items())


def test_tensors_count_by_their_bytes() -> None:
    given_ = tensors(a=(4,), b=(4,), c=(4,))
    given_["a"] = given_["a"].to(torch.float64)
    parts, balance = zero3_partition_tensors(given_, ["cuda:0", "cuda:1"], evenness_priority=0)
    assert parts == {"a": 0, "b": 1, "c": 1}
    assert (balance.ranks, balance.bytes_by_rank, balance.neighbours_parted) == (("cuda:0", "cuda:1"), (32, 32), 1)
    assert balance.max_over_mean == 1.0
    assert zero3_partition_tensors(given_, ["cpu"] * 1, 0)[1].neighbours_parted == 0
    uneven = zero3_partition_tensors(tensors(a=(3,), b=(1,)), ["x", "y"], 1)[1]
    assert uneven.max_over_mean == 1.5  # 12 of 16 bytes, where 8 were even


def test_modules_stay_whole_if_asked() -> None:
    # Largest first: the weights to either rank, then both biases to the second, which has less by then.
    given_ = tensors(x_weight=(10,), x_bias=(4,), y_weight=(8,), y_bias=(1,))
    apart, _ = zero3_partition_tensors(given_, ["a", "b"], 1.0)
    assert apart == {"x.weight": 0, "x.bias": 1, "y.weight": 1, "y.bias": 0}
    with pytest.raises(OsdpError, match="by_module=True"):
        owner_pins(apart)
    together, balance = zero3_partition_tensors(given_, ["a", "b"], 1.0, by_module=True)
    assert owner_pins(together) == ["x=owner@0", "y=owner@1"]
    assert balance.bytes_by_rank == (56, 36)


@pytest.mark.parametrize(
    ("ranks", "priority", "words"),
    [([], 0.5, "no rank"), (["a"], 1.1, "1.1"), (["a"], -0.1, "-0.1"), (["a"], float("nan"), "nan")],
)
def test_what_cannot_be_is_refused(ranks: list[str], priority: float, words: str) -> None:
    with pytest.raises(OsdpError, match=words):
        zero3_partition_tensors(tensors(a=(1,)), ranks, priority)


# --- owners that are given -----------------------------------------------------------------------


def test_an_owner_is_read_and_printed() -> None:
    cluster = cluster_of(2, 2)
    assert parse_strategy("owner@3", cluster) == Strategy("owner", 4, owner=3)
    for text in ("owner", "owner@0", "owner@1+offload"):
        assert str(parse_strategy(text, cluster)) == text
    for text, words in {"owner@4": "from 0 to 3", "owner@": "owner@", "shard@1": "shard@1", "owner@-1": "@-1"}.items():
        with pytest.raises(OsdpError, match=words):
            parse_strategy(text, cluster)


def test_the_others_go_where_room_is_left() -> None:
    assert assign_owners([5, 4, 3], 2) == (0, 1, 1)
    assert assign_owners([5, 4, 3], 2, {0: 1}) == (1, 0, 0)
    assert assign_owners([5, 4, 3], 2, {1: 0, 2: 0}) == (1, 0, 0)
    assert assign_owners([1, 1, 1], 3, {0: 2, 1: 2, 2: 2}) == (2, 2, 2)


def test_the_runtime_takes_the_owners_that_are_given() -> None:
    graph = graph_of("gpt2")
    names = [parameter.name for operator in graph.operators for parameter in operator.parameters]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    parts = {name: modules.index(name.rpartition(".")[0]) % 4 for name in names}
    pins = resolve([parse_pin(pin) for pin in owner_pins(parts)], graph, cluster_of(2, 2))
    choices = {graph.operators[index].name: format_choice(taken) for index, taken in pins.strategies.items()}
    schedule = compile_plan(Case("gpt2", choices).plan(), graph, cluster_of(2, 2))
    assert {parameter.path: unit.owner for unit in schedule.units for parameter in unit.parameters} == parts


def test_the_planner_charges_the_owners_that_are_given() -> None:
    """All on the last rank: what rests there is everything, tensor by tensor rounded to 512 bytes."""
    model = Irregular()
    source = source_of(model, "irregular", None, None)
    cluster = cluster_of(1, 2)
    even, uneven = (
        plan_model(source, cluster, Request(1 << 40, micro_batch=2, pins=(Pin("*", choice),))).plan
        for choice in ("owner", "owner@1")
    )
    whole = sum(-(-4 * parameter.numel() // 512) * 512 for parameter in model.parameters())
    assert uneven.predicted.memory_by_category["parameters"] == whole
    assert even.predicted.memory_by_category["parameters"] < whole
    assert set(uneven.choices.values()) == {"owner@1"}


def test_a_star_means_the_models_own_parameters_too() -> None:
    graph = trace_model(source_of(Irregular(), "irregular", None, None), "fp32")
    own = next(index for index, operator in enumerate(graph.operators) if operator.name == "")
    cluster = cluster_of(2, 2)
    everything = resolve([Pin("*", "owner")], graph, cluster).strategies
    assert set(everything) == set(range(len(graph.operators)))
    assert set(resolve([Pin(".", "owner@2")], graph, cluster).strategies) == {own}
    parts, _ = zero3_partition_tensors(dict(Irregular().named_parameters()), ["cpu"] * 4, 1.0, by_module=True)
    pins = resolve([parse_pin(pin) for pin in owner_pins(parts)], graph, cluster).strategies
    assert set(pins) == set(everything)
