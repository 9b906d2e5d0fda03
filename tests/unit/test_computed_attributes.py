"""Attributes that a forward computes of parameters: planned, counted, and refused where they are read before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from computed_weights import CASES, CHANGES, Layers, wide
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from torch.nn.utils import prune

from osdp.models.user_factory import source_of
from profiler.computed_attributes import NotComputed
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from runtime.deferred_init.deferred_init import record

WIDTH = 4
"""Also the steps of the recurrent layer, which take most of a trace."""
PLANS = [(how, again) for how in ("replicate", "shard", "shard_grad", "owner", "odc:4") for again in ("keep", "whole")]


def source(build: Callable[[], nn.Module], how: str = "module", width: int = WIDTH) -> ModelSource:
    return source_of(build() if how == "module" else build, "model", None, lambda count: torch.randn(count, width))


def build(kind: str) -> Layers:
    """Return a model whose weights are kept in some way."""
    return Layers(CHANGES[kind], WIDTH)


def traced(build: Callable[[], nn.Module], how: str = "module") -> ModelGraph:
    return trace_model(source(build, how))


@pytest.mark.parametrize("kind", CHANGES)
def test_no_more_is_held_than_is_predicted(kind: str) -> None:
    """Whole weights are there between steps; what hooks hold besides, as masks that were given, is not the model's."""
    factory = source(lambda: wide(kind), "factory", 128)
    graph = trace_model(source(lambda: wide(kind), width=128))
    model = wide(kind)
    hooks = [hook for part in model.modules() for hook in part._forward_pre_hooks.values()]
    methods = [one for hook in hooks for one in (hook if isinstance(hook, prune.PruningContainer) else [hook])]
    masks = {one.mask.untyped_storage()._cdata: one.mask for one in methods if isinstance(one, prune.CustomFromMask)}
    beside = sum(mask.untyped_storage().nbytes() for mask in masks.values())
    blocks = [block.name for block in graph.blocks]
    for strategy, again in some(PLANS, 8, list(CHANGES).index(kind)):
        choices = {operator.name: strategy for operator in graph.operators}
        plan = plan_of(graph, cluster(2, 4), choices, blocks if again == "whole" else [], micro_batch=16)
        found = compare(plan, factory, graph, cluster(2, 4), with_data=True)
        tracked, predicted = sum(found.tracked.values()) - beside, sum(found.predicted.values())
        assert -0.002 <= (predicted - tracked) / tracked <= 0.1, (strategy, again, found)


@pytest.mark.parametrize(("kind", "how"), some(CASES, 3))
def test_weights_between_steps_are_counted(kind: str, how: str) -> None:
    graph, model = traced(lambda: build(kind), how), build(kind)
    model(torch.randn(2, WIDTH))
    kept = {
        f"{path}.{key}": value.numel()
        for path, part in model.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, Tensor)
    }
    counted = {one.name: one.numel for one in graph.buffers}
    assert kept
    assert kept.items() <= counted.items()


@pytest.mark.parametrize("kind", ["weight_normed", "pruned"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_that_are_frozen_or_have_run_are_planned(kind: str, precision: str) -> None:
    def frozen() -> Layers:
        model = build(kind).requires_grad_(False)
        with torch.no_grad():
            model(torch.randn(2, WIDTH))
        model.head.requires_grad_(True)
        return model

    graph = trace_model(source(frozen), precision)
    assert any(one.name == "blocks.0.up.weight" for one in graph.buffers)


@pytest.mark.parametrize("kind", [kind for kind, how in CASES if how == "factory"])
def test_recorded_models_have_values_that_their_constructors_give(kind: str) -> None:
    torch.manual_seed(3)
    expected = build(kind).state_dict()
    torch.manual_seed(3)
    values = dict(record(lambda: build(kind)).replay())
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_pruning_twice_cannot_be_recorded() -> None:
    with pytest.raises(OsdpError, match="pass the module itself"):
        record(lambda: build("pruned_again"))


@pytest.mark.parametrize("how", ["module", "factory"])
def test_the_users_module_keeps_what_it_has(how: str) -> None:
    model = build("weight_normed")
    weight = model.blocks[0].up.weight
    traced(lambda: model, how)
    assert model.blocks[0].up.weight is weight
    assert not any(isinstance(value, NotComputed) for part in model.modules() for value in vars(part).values())


class Stale(nn.Module):
    """Computes something of its weight when it is built, and reads that in its forward."""

    def __init__(self, compute: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kept = compute(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept["all"] if isinstance(self.kept, dict) else self.kept
        return self.layer(x) + F.linear(x, kept)  # type: ignore[no-any-return]


COMPUTED: dict[str, Callable[[nn.Parameter], Any]] = {
    "scaled": lambda weight: weight * 2,
    "view": lambda weight: weight.t(),
    "data": lambda weight: weight.data,
    "in a dict": lambda weight: {"all": weight.tanh()},
}


@pytest.mark.parametrize("how", ["module", "factory"])
@pytest.mark.parametrize("computed", COMPUTED)
def test_what_no_forward_computes_is_refused(computed: str, how: str) -> None:
    with pytest.raises(OsdpError, match="`kept` is read before a forward has computed it") as caught:
        traced(lambda: Stale(COMPUTED[computed]), how)
    assert "register_buffer" in caught.value.advice


def test_constants_may_be_read() -> None:
    """Also where they were parameters, or lie beside one in memory."""
    traced(lambda: Stale(lambda weight: weight.detach().clone()))

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            scale, self.constant = torch.randn(2, WIDTH).unbind()
            self.scale = nn.Parameter(scale)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.constant

    traced(Halves)


class Changed(nn.Module):
    """Makes, removes, ties or unties a parameter in its first forward."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer, self.change, self.scale = nn.Linear(WIDTH, WIDTH), change, None
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.third(self.second(self.first(self.layer(x))))
        self.change(self)
        return out * (1 if self.scale is None else self.scale)  # type: ignore[no-any-return]


def made(model: Any) -> None:
    if model.scale is None:
        del model.scale
        model.scale = nn.Parameter(torch.ones(WIDTH))


def made_below(model: Any) -> None:
    if not hasattr(model, "head"):
        model.head = nn.Linear(WIDTH, WIDTH)


def removed(model: Any) -> None:
    model.layer.bias = None


def tied(model: Any) -> None:
    model.second.bias = model.first.bias


def same_module(model: Any) -> None:
    model.second = model.first


def untied(model: Any) -> None:
    model.third.weight = nn.Parameter(model.third.weight.detach().clone())


@pytest.mark.parametrize("how", ["module", "factory"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (made, "makes the parameter `scale`"),
        (made_below, r"makes the parameter `head\.weight`"),
        (removed, r"removes the parameter `layer\.bias`"),
        (tied, r"ties the parameter `second\.bias` to `first\.bias`"),
        (same_module, r"ties the parameter `second\.weight` to `first\.weight`"),
        (untied, r"no longer ties the parameter `third\.weight` to `second\.weight`"),
    ],
)
def test_parameters_that_come_or_go_or_are_tied_in_a_forward_are_refused(
    change: Callable[[Any], None], message: str, how: str
) -> None:
    with pytest.raises(OsdpError, match=message) as caught:
        traced(lambda: Changed(change), how)
    assert "__init__" in caught.value.advice
