"""How operators form units, and how a linear operator is cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain, operator, transformer

from planner.model.fsdp_units import Unit, check_split, owners_of, split_bounds, split_parameters, units_of
from planner.model.stages import StagedModel, cut
from planner.strategies.spec import Strategy
from profiler.errors import OsdpError
from profiler.model_graph import Operator, Parameter

SHARD, KEEP, COPY, OWNER = (
    Strategy("shard", 4),
    Strategy("shard_grad", 4),
    Strategy("replicate", 1),
    Strategy("owner", 4),
)


def units(model: StagedModel, changes: dict[str, tuple[Strategy, ...]]) -> tuple[Unit, ...]:
    """Units with everything sharded but for the named operators."""
    names = [operator.name for operator in model.graph.operators]
    return units_of(model, {index: changes.get(name, (SHARD,)) for index, name in enumerate(names)})


# embed 0, blocks.0 of norm1 1, qkv 2, out 3, norm2 4, up 5, down 6, then norm 7; the head is embed again.
MODEL = cut(transformer(1, 256))


def test_a_block_of_one_strategy_is_one_unit() -> None:
    assert units(MODEL, {}) == (Unit((0,), SHARD), Unit((1, 2, 3, 4, 5, 6), SHARD, whole_block=0), Unit((7,), SHARD))


def test_neighbours_of_one_strategy_are_joined() -> None:
    found = units(MODEL, {"blocks.0.out": (KEEP,), "blocks.0.norm2": (KEEP,)})
    assert found[1:4] == (Unit((1, 2), SHARD), Unit((3, 4), KEEP), Unit((5, 6), SHARD))


def test_owned_operators_are_never_joined() -> None:
    found = units(MODEL, {"blocks.0.norm1": (OWNER,), "blocks.0.qkv": (OWNER,), "blocks.0.out": (OWNER,)})
    assert found[1:5] == (Unit((1,), OWNER), Unit((2,), OWNER), Unit((3,), OWNER), Unit((4, 5, 6), SHARD))


def test_each_slice_is_a_unit() -> None:
    found = units(MODEL, {"blocks.0.up": (SHARD, SHARD, COPY)})
    assert found[1:6] == (
        Unit((1, 2, 3, 4), SHARD),
        Unit((5,), SHARD, (0, 3)),
        Unit((5,), SHARD, (1, 3)),
        Unit((5,), COPY, (2, 3)),
        Unit((6,), SHARD),
    )


def test_operators_that_are_never_called_come_last_and_alone() -> None:
    graph = chain([(64, 64), (64, 64)], [1, 1], [1, 1])
    idle = (operator("idle0", (8, 8)), operator("idle1", (8, 8)))
    model = cut(
        replace(
            graph,
            operators=(*idle, *graph.operators),
            calls=tuple(replace(call, operator=call.operator + 2) for call in graph.calls),
        )
    )
    assert units(model, {}) == (Unit((2, 3), SHARD), Unit((0,), SHARD), Unit((1,), SHARD))


def test_units_are_in_order_of_first_call() -> None:
    graph = transformer(2, 64, tied=False)
    found = units(cut(graph), {"blocks.1.qkv": (COPY,), "head": (COPY, SHARD)})
    first = {call.operator: index for index, call in reversed(list(enumerate(graph.calls)))}
    positions = [first[unit.operators[0]] for unit in found]
    assert positions == sorted(positions)
    assert {o for unit in found for o in unit.operators} == set(range(len(graph.operators)))


def test_owners_go_by_the_size_of_units() -> None:
    model = cut(chain([(30, 10), (50, 10), (40, 10), (10, 10)], [1] * 4, [1] * 4))
    found = units(model, {"op0": (OWNER,), "op1": (OWNER,), "op2": (OWNER, OWNER)})
    # Units: 300, 500, two of 200, and one that nobody owns.  500 to rank 0, 300 to 1, then 200 to 1 and 200
    # to rank 0, for they are equally full.
    assert owners_of(found, model.graph, 2) == {0: 1, 1: 0, 2: 1, 3: 0}


@given(st.integers(1, 300), st.integers(1, 20))
def test_slices_are_those_of_tensor_split(features: int, slices: int) -> None:
    bounds = split_bounds(features, slices)
    parts = torch.tensor_split(torch.arange(features), slices)
    assert [list(range(a, b)) for a, b in pairwise(bounds)] == [part.tolist() for part in parts]


def test_parameters_of_slices() -> None:
    weight, bias = Parameter("l.weight", (6, 10)), Parameter("l.bias", (6,), trainable=False)
    # 10 features in 3: 4, 3 and 3.
    assert split_parameters((weight, bias), 0, 3) == (replace(weight, shape=(6, 4)), bias)
    assert split_parameters((weight, bias), 2, 3) == (replace(weight, shape=(6, 3)),)
    assert split_parameters((weight,), 1, 3) == (replace(weight, shape=(6, 3)),)


@pytest.mark.parametrize(
    ("found", "slices", "reason"),
    [
        (replace(operator("a", (8, 8)), kind="Embedding"), 2, "a Embedding"),
        (replace(operator("a", (8, 8)), modules=("a", "b")), 2, "tied"),
        (operator("a", (8,)), 2, "cannot be split"),
        (replace(operator("a", (8, 8)), parameters=(Parameter("w", (8, 8)), Parameter("b", (4,)))), 2, "cannot"),
        (operator("a", (8, 3)), 4, "(?s)into 4 slices.*3 input features"),
    ],
)
def test_what_cannot_be_split_is_refused(found: Operator, slices: int, reason: str) -> None:
    with pytest.raises(OsdpError, match=reason):
        check_split(found, slices)
    check_split(found, 1)
