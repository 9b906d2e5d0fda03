"""Parameters that a forward reads through lists of its modules are named; others in such lists are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from osdp.models.user_factory import source_of
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model

HOLDERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "a list": lambda weight: [weight],
    "a tuple in a dict": lambda weight: {"all": (weight, 1)},
    "itself": lambda weight: weight,
}


def taken(held: Any) -> Tensor:
    found = held["all"][0] if isinstance(held, dict) else held[0] if isinstance(held, list) else held
    assert isinstance(found, nn.Parameter)
    return found


class Holder(nn.Module):
    """Keeps the weight of a layer in a plain attribute."""

    def __init__(self, hold: Callable[[nn.Parameter], Any], use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.inner = nn.Module()
        self.inner.__dict__["held"] = hold(self.layers[1].weight)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum() + self.use(taken(self.inner.held))


READS: dict[str, Callable[[Tensor], Any]] = {
    "penalty": lambda weight: weight.square().sum(),
    "data": lambda weight: weight.data.sum(),
    "transposed": lambda weight: weight.T.sum(),
    "function": lambda weight: torch.linalg.vector_norm(weight),
}
ABOUT: dict[str, Callable[[Tensor], Any]] = {
    "numel": lambda weight: weight.numel(),
    "shape": lambda weight: weight.shape[0] + weight.size(1) + weight.dim(),
    "grad": lambda weight: weight.grad is None and weight.requires_grad,
    "kind": lambda weight: weight.ndimension() + len(weight.type()) + weight.get_device(),
}


def traced(build: Callable[[], nn.Module], how: str) -> tuple[nn.Module, ModelGraph]:
    model = build()
    given = model if how == "module" else lambda: model
    return model, trace_model(source_of(given, "holder", None, lambda n: torch.randn(n, 8)))


@pytest.mark.parametrize("how", ["module", "factory"])
@pytest.mark.parametrize(("held", "read"), [*((held, "penalty") for held in HOLDERS), *(("itself", r) for r in READS)])
def test_reads_are_named(held: str, read: str, how: str) -> None:
    _, graph = traced(lambda: Holder(HOLDERS[held], READS[read]), how)
    assert graph.held_elsewhere == ("`layers.1.weight` is read through the attribute `inner.held`",)
    assert any(graph.held_elsewhere[0] in note for note in graph.notes)


@pytest.mark.parametrize("held", HOLDERS)
@pytest.mark.parametrize("about", ABOUT)
def test_what_is_not_read_may_be_held(held: str, about: str) -> None:
    model, graph = traced(lambda: Holder(HOLDERS[held], ABOUT[about]), "module")
    assert isinstance(model, Holder)
    assert graph.held_elsewhere == ()
    assert taken(model.inner.held) is model.layers[1].weight


def test_the_users_module_is_as_it_was() -> None:
    """A factory may return the same module each time."""
    with torch.device("meta"):
        model = Holder(HOLDERS["a list"], READS["penalty"])
    held = model.inner.held
    assert trace_model(source_of(lambda: model, "holder", None, lambda n: torch.randn(n, 8))).held_elsewhere
    assert model.inner.held is held


def test_recurrent_layers_keep_a_list_of_their_own() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].sum()  # type: ignore[no-any-return]

    assert trace_model(source_of(Recurrent, "recurrent", None, lambda n: torch.randn(4, n, 8))).held_elsewhere == ()


def test_modules_that_share_a_list_go_on_sharing_it() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
            self.layer.seen = self.other.seen = [self.layer.weight]

        def forward(self, x: Tensor) -> Tensor:
            self.layer.seen.clear()
            self.layer.seen.append(self.layer.weight)
            return self.other(x).sum() + self.other.seen[0].square().sum()  # type: ignore[no-any-return]

    assert trace_model(source_of(Sharing, "sharing", None, lambda n: torch.randn(n, 8))).held_elsewhere == ()
