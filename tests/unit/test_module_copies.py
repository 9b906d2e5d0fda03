"""Models whose hooks, and other functions, close over them: planned as what a function builds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from osdp.models.user_factory import source_of
from profiler.module_copies import copied
from profiler.trace.trace import trace_model

WIDTH = 8


class Model(nn.Module):
    """Two layers, and what `change` does to it."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.features: dict[str, Tensor] = {}
        self.extra: Any = None
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        hidden = self.first(x).relu()
        y: Tensor = self.second(hidden)
        if self.extra is not None:
            y = self.extra(y)
        if "first" in self.features:
            y = y + self.features.pop("first").mean()
        return y.square().sum()

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, WIDTH),)


def note_in_the_model(model: Any) -> None:
    model.first.register_forward_hook(lambda layer, args, out: model.features.__setitem__("first", out))


def note_in_its_dict(model: Any) -> None:
    features = model.features

    def note(layer: nn.Module, args: Any, out: Tensor) -> None:
        features["first"] = out

    model.first.register_forward_hook(note)


def note_by_a_method(model: Any) -> None:
    model.note = MethodType(lambda self, layer, args, out: self.features.__setitem__("first", out), model)
    model.first.register_forward_hook(model.note)


def note_by_a_partial(model: Any) -> None:
    def note(kept: dict[str, Tensor], layer: nn.Module, args: Any, out: Tensor) -> None:
        kept["first"] = out

    model.first.register_forward_hook(functools.partial(note, model.features))


def note_by_a_default(model: Any) -> None:
    def note(layer: nn.Module, args: Any, out: Tensor, kept: Any = model, *, name: Any = model.features) -> None:
        kept.features["first"] = out
        assert name is kept.features

    model.first.register_forward_hook(note)


def another_forward(model: Any) -> None:
    """As libraries that change a model after it was built put one in its place."""
    before = model.second.forward
    model.second.forward = lambda x: before(x) + model.first.weight.sum()


def a_decorated_forward(model: Any) -> None:
    def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(function)
        def run(x: Tensor) -> Tensor:
            return function(x) + function(-x)

        return run

    inner = model.second
    model.second.forward = twice(lambda x: nn.functional.linear(x, inner.weight, inner.bias))


def a_layer_in_a_function(model: Any) -> None:
    def apply(x: Tensor) -> Tensor:
        return x + model.second(model.first(x))  # type: ignore[no-any-return]

    model.extra = apply


def functions_that_share_a_cell(model: Any) -> None:
    """The one counts what the other reads; both know the model."""
    seen = 0

    def count(layer: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal seen
        seen = seen + 1 if model.training else 0

    def scale(x: Tensor) -> Tensor:
        return x * (seen > 0 and model.second.bias is not None)

    model.first.register_forward_hook(count)
    model.extra = scale


def functions_in_a_list(model: Any) -> None:
    functions = [lambda x: x * model.first.weight.mean(), lambda x: x + model.second.bias]
    model.functions = functions
    model.extra = lambda x: functools.reduce(lambda y, function: function(y), model.functions, x)


CHANGES = [
    note_in_the_model,
    note_in_its_dict,
    note_by_a_method,
    note_by_a_partial,
    note_by_a_default,
    another_forward,
    a_decorated_forward,
    a_layer_in_a_function,
    functions_that_share_a_cell,
    functions_in_a_list,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_is_planned_as_what_a_function_builds(change: Callable[[Any], None]) -> None:
    """A copy whose functions knew the original read parameters that have data, or did not find what hooks had noted."""
    live = Model(change)
    before = {name: one.clone() for name, one in live.state_dict().items()}
    wanted = trace_model(source_of(lambda: Model(change), "model", None, None))
    found = trace_model(source_of(live, "model", None, None))
    assert found == wanted
    assert not live.features
    torch.testing.assert_close(dict(live.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_computes_the_same_and_reaches_no_part_of_the_original(change: Callable[[Any], None]) -> None:
    live, x = Model(change), torch.randn(4, WIDTH)
    made = copied(live, {})
    torch.testing.assert_close(made(x), live(x))
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.fill_(torch.nan)
    assert made(x).isfinite()
    assert not live.features


def test_what_is_not_of_the_module_is_shared() -> None:
    class Log:
        """Cannot be copied."""

        def __deepcopy__(self, memo: dict[int, Any]) -> Log:
            raise TypeError

    log, seen = Log(), list[tuple[Log, nn.Module]]()

    def change(model: Any) -> None:
        model.first.register_forward_hook(lambda layer, args, out: seen.append((log, model)))

    made = copied(Model(change), {})
    made(torch.randn(4, WIDTH))
    assert seen == [(log, made)]


def test_functions_that_know_nothing_of_the_module_are_taken_as_they_are() -> None:
    scale = 2.0

    def double(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        return scale * out

    made = copied(Model(lambda model: model.first.register_forward_hook(double)), {})
    assert list(made.get_submodule("first")._forward_hooks.values()) == [double]
    assert copy.deepcopy(made)(torch.ones(1, WIDTH)) == made(torch.ones(1, WIDTH))


def test_what_holds_itself_is_looked_at_once() -> None:
    def change(model: Any) -> None:
        model.extra_lists = lists = list[Any]()
        lists += [lists] * 1000
        model.first.register_forward_hook(
            lambda layer, args, out: model.features.__setitem__("first", out * len(lists))
        )

    live = Model(change)
    made: Any = copied(live, {})
    made(torch.randn(2, WIDTH))
    assert made.extra_lists[0] is made.extra_lists is not live.extra_lists
