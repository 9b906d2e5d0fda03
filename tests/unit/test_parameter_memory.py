"""Parameters that share memory are named, and those that are not row-major are planned as they will be sharded."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import draws
from torch import Tensor, nn

from osdp.models.user_factory import source_of
from profiler.parameter_memory import shared_memory
from profiler.trace.trace import trace_model


class Pair(nn.Module):
    """Two parameters, which a function makes."""

    def __init__(self, make: Callable[[], tuple[Tensor, Tensor]], *, buffer: bool = False) -> None:
        super().__init__()
        one, other = make()
        self.one = nn.Parameter(one)
        if buffer:
            self.register_buffer("other", other)
        else:
            self.other = nn.Parameter(other)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.one).sum() + self.other.sum()


def transposed() -> tuple[Tensor, Tensor]:
    weight = torch.randn(8, 8)
    return weight, weight.t()


def overlapping() -> tuple[Tensor, Tensor]:
    flat = torch.randn(100)
    return flat[:64].view(8, 8), flat[60:]


def halves() -> tuple[Tensor, Tensor]:
    flat = torch.randn(128)
    return flat[:64].view(8, 8), flat[64:]


def columns() -> tuple[Tensor, Tensor]:
    both = torch.randn(8, 16)
    return both[:, :8], both[:, 8:]


def given_as(how: str, build: Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    return build() if how == "module" else build


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("make", [transposed, overlapping])
def test_what_shares_memory_is_named(make: Callable[[], tuple[Tensor, Tensor]], buffer: bool) -> None:
    found = ["`one` and `other` share memory"]
    build = partial(Pair, make, buffer=buffer)
    assert shared_memory(build()) == found
    graph = trace_model(source_of(build, "pair", None, lambda batch: torch.randn(batch, 8)))
    assert list(graph.held_elsewhere) == found
    assert any(found[0] in note for note in graph.notes)


@pytest.mark.parametrize("how", ["module", "factory"])
@pytest.mark.parametrize("make", [halves, columns])
def test_parts_of_one_tensor_are_all_counted(make: Callable[[], tuple[Tensor, Tensor]], how: str) -> None:
    """A factory's were once taken for one tied parameter, as they have one storage."""
    model = given_as(how, partial(Pair, make))
    graph = trace_model(source_of(model, "pair", None, lambda batch: torch.randn(batch, 8)))
    traced = {one.name: one.shape for operator in graph.operators for one in operator.parameters}
    assert traced == {name: tuple(one.shape) for name, one in Pair(make).named_parameters()}


def test_a_tied_parameter_and_buffers_may_share() -> None:
    layer = nn.Linear(8, 8)
    layer.register_parameter("again", layer.weight)
    table = torch.zeros(4)
    layer.register_buffer("table", table)
    layer.register_buffer("view", table[1:])
    assert shared_memory(layer) == []


sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3)


@given(sizes, sizes, st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=draws(100))
def test_elements_in_common_are_found(
    one: list[tuple[int, int]], other: list[tuple[int, int]], start: int, other_start: int
) -> None:
    """As writing into one and reading the other shows."""
    flat = torch.zeros(200)
    views = [torch.as_strided(flat, *zip(*view, strict=True), at) for view, at in ((one, start), (other, other_start))]
    module = nn.Module()
    module.one, module.other = map(nn.Parameter, views)
    with torch.no_grad():
        views[0].fill_(1.0)
    shares = bool(views[1].any())
    assert bool(shared_memory(module)) == shares


def test_large_tensors_are_told_apart_quickly() -> None:
    """By their strides, not element by element: on the meta device there are none."""
    both, module = torch.empty(2**20, 3 * 2**12, device="meta"), nn.Module()
    module.query, module.key, module.value = map(nn.Parameter, both.chunk(3, dim=1))
    started = time.process_time()
    assert shared_memory(module) == []
    module.corner = nn.Parameter(both[5:7, 4090:4100])
    module.turned = nn.Parameter(both[:, :8].t())
    names = {"`corner` and `key`", "`corner` and `query`", "`query` and `turned`"}
    assert set(shared_memory(module)) == {f"{name} share memory" for name in names}
    assert time.process_time() - started < 1.0


class Images(nn.Module):
    """Convolutions, and a layer whose weight is a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1))
        self.head = nn.Linear(64, 256)
        self.head.weight = nn.Parameter(torch.randn(64, 256).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolutions(x).mean((2, 3))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["module", "factory"])
@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_memory_of_what_is_not_row_major(strategy: str, how: str) -> None:
    """FSDP2 refuses such parameters."""
    build = lambda: Images().to(memory_format=torch.channels_last)  # noqa: E731
    assert not build().convolutions[0].weight.is_contiguous()
    model = source_of(given_as(how, build), "images", None, lambda batch: torch.randn(batch, 3, 16, 16))
    graph, machine = trace_model(model), cluster(1, 2)
    plan = plan_of(graph, machine, dict.fromkeys((one.name for one in graph.operators), strategy), micro_batch=2)
    found = compare(plan, model, graph, machine)
    assert abs(found.error) <= 0.01
