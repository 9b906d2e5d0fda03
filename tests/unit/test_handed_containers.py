"""Modules get the containers that their callers hand them, and these are as they were but for what the module does."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from lists import Changes, Lists
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves
from toys import graph_of

from profiler.handed_containers import ContainersHanded
from profiler.mixed_precision import cast_inputs
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model


@dataclass(frozen=True)
class Frozen:
    """A dataclass that can be changed only in what it holds."""

    items: list[Any]


class Pair(NamedTuple):
    """A tuple with names."""

    items: list[Any]
    one: Tensor


class Noting(nn.Module):
    """Notes what it is handed, and does something with it."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.weight, self.does, self.seen = nn.Parameter(torch.ones(2)), does, list[Any]()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a sum."""
        self.seen = [*args, *kwargs.values()]
        self.does(self.weight, *self.seen)
        return self.weight.sum()


def noting(does: Any = lambda *_: None) -> Noting:
    """Return a module whose inputs are cast to bf16, and that gets its callers' containers."""
    module = Noting(does)
    containers = ContainersHanded([module])
    cast_inputs(module, "bf16")
    containers.surround()
    return module


def containers_of(x: Tensor) -> list[Any]:
    """Return a container of every kind."""
    inner: list[Any] = [x]
    tuples = [Pair([x], x), ([x], x)]
    return [[x, inner], {"x": x, "y": {"z": [x]}}, deque([x], 3), Frozen([x]), *tuples, OrderedDict(a=x), [1, "a"]]


def dtypes_in(value: Any) -> set[torch.dtype]:
    """Return the dtypes of all tensors in containers."""
    if isinstance(value, Frozen):
        return dtypes_in(value.items)
    return {leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("by_name", [False, True])
def test_a_module_that_only_reads_gets_the_callers_containers(kind: int, by_name: bool) -> None:
    x, module = torch.ones(2), noting()
    given, same = containers_of(x)[kind], containers_of(x)[kind]
    _ = module(x=given) if by_name else module(given)
    assert module.seen[0] is given or isinstance(given, tuple)
    assert given == same
    assert all(one is x for one in tree_leaves(given) if isinstance(one, Tensor))


@pytest.mark.parametrize("kind", [0, 1, 2, 4, 5, 6])
def test_it_reads_what_hooks_have_made(kind: int) -> None:
    found = list[set[torch.dtype]]()
    given = containers_of(torch.ones(2))[kind]
    noting(lambda _, value: found.append(dtypes_in(value)))(given)
    assert found == [{torch.bfloat16}]
    assert dtypes_in(given) == {torch.float32}


def test_changes_stay() -> None:
    x, z = torch.ones(2), torch.zeros(2)

    def change(weight: Tensor, items: list[Any], others: dict[str, Any], frozen: Frozen, pair: Pair) -> None:
        items.append(2 * weight)
        items[1].append(items.pop(0))
        others["y"]["z"] = [weight]
        others["x"], _ = weight, others.pop("gone")
        frozen.items.clear()
        pair.items.extend(["new", pair.one])

    items, others, frozen, pair = [x, [z]], {"x": x, "y": {}, "gone": z}, Frozen([z]), Pair([x], z)
    module = noting(change)
    module(items, others, frozen=frozen, pair=pair)
    assert items[0] == [z, x]
    assert items[1].grad_fn is not None
    assert others.keys() == {"x", "y"}
    assert frozen.items == []
    assert pair.items == [x, "new", z]


def test_containers_are_given_back_where_a_forward_fails() -> None:
    def fail(weight: Tensor, items: list[Tensor]) -> None:
        raise RuntimeError("no")

    x, module = torch.ones(2), noting(fail)
    given = [x]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            module(given)
        assert given[0] is x
    module.does = lambda weight, items: items.append(weight)
    module(given)
    assert given == [x, module.weight]


def test_a_container_that_is_handed_twice_is_one() -> None:
    given = [torch.ones(2)]
    noting(lambda _, one, other: (one.append(3), other["a"].append(4)))(given, {"a": given})
    assert given[1:] == [3, 4]


def test_what_a_module_hands_on_comes_back_through_both() -> None:
    x, inner = torch.ones(2), noting(lambda weight, items: items.append(2 * weight))
    given = [x]
    noting(lambda _, items: inner(items))(given)
    assert given[0] is x
    assert len(given) == 2


class Expecting(Lists):
    """Raises where its blocks' changes are not there."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, any, width) -> a loss."""
        seen = [x]
        for number, block in enumerate(self.blocks):
            x = block(x, seen)
            if len(seen) != number + 2:
                raise ValueError(f"{len(seen)} after block {number}")
        return x.pow(2).mean() + seen[-1].mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_traces_see_changes(precision: str) -> None:
    assert len(graph_of(Expecting(kind="adds"), precision).blocks) == 3
    for draw in range(5):
        assert len(graph_of(Changes(draw), precision).blocks) == 4


class Counting:
    """A node of pytrees that is made again without its counter."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.count, self.cache = x, 0, None


register_pytree_node(Counting, lambda node: ([node.x], None), lambda leaves, _: Counting(*leaves))


def test_what_is_no_tensor_stays_in_every_container() -> None:
    node: Any = Counting(torch.ones(2))
    node.count, node.cache = 5, "filled"
    beside = {"mask": None, "step": 0, "x": node.x}
    seen: list[Any] = []
    noting(lambda _, first, second: seen.append((first.count, first.cache, second["step"])))(node, beside)
    assert seen == [(5, "filled", 0)]
    assert (node.count, node.cache, beside["mask"], beside["step"]) == (5, "filled", None, 0)
    assert beside["x"] is node.x
    assert node.x.dtype == torch.float32


def test_tuples_in_lists_are_given_back() -> None:
    x = torch.ones(2)
    pairs = [(x, 1), ([x], 2)]
    before = [*pairs]
    noting()(pairs)
    assert all(one is other for one, other in zip(pairs, before, strict=True))
    assert pairs[0][0] is x
    assert pairs[1][0][0] is x  # type: ignore[index]


class Handing(nn.Module):
    """A block that is handed a tensor and a list of them, in one value, and returns the like."""

    def __init__(self, of: Callable[..., Any], read: Callable[[Any], tuple[Tensor, list[Tensor]]]) -> None:
        super().__init__()
        self.first, self.second, self.of, self.read = nn.Linear(6, 9), nn.Linear(9, 6), of, read

    def forward(self, given: Any) -> Any:
        x, others = self.read(given)
        return self.of(x + self.second(torch.tanh(self.first(x))), [*others, x.mean()])


class HandingOn(nn.Module):
    """Three such blocks."""

    def __init__(self, of: Callable[..., Any], read: Callable[[Any], tuple[Tensor, list[Tensor]]]) -> None:
        super().__init__()
        self.blocks, self.of, self.read = nn.ModuleList(Handing(of, read) for _ in range(3)), of, read

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> a loss."""
        given = self.of(x, [])
        for block in self.blocks:
            given = block(given)
        x, others = self.read(given)
        return x.pow(2).mean() + torch.stack(others).sum()


@dataclass(frozen=True)
class Handed:
    """What they hand on."""

    x: Tensor
    others: list[Tensor]


def test_what_is_handed_on_in_dataclasses_costs_what_it_does_in_tuples() -> None:
    """Blocks were once taken to get nothing that needs a gradient: sharded until the whole backward is over."""
    ways: tuple[tuple[Callable[..., Any], Callable[[Any], Any]], ...] = (
        (lambda *given: given, lambda given: given),
        (Handed, lambda given: (given.x, given.others)),
    )
    inputs = lambda _, batch: ((torch.randn(batch, 6),), {})  # noqa: E731
    in_tuples, in_dataclasses = (
        trace_model(ModelSource("handing", partial(HandingOn, *way), inputs, 1), "fp32") for way in ways
    )
    assert in_dataclasses.calls == in_tuples.calls
    assert in_dataclasses.blocks == in_tuples.blocks
