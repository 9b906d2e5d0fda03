"""Forwards that change their parameters: the trace names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from osdp.models.user_factory import source_of
from profiler.trace.trace import trace_model


class Changing(nn.Module):
    """Two layers and a table; a function is called before they run."""

    def __init__(self, change: Callable[[Any], Any], **table: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Embedding(16, 8, **table)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self)
        self.seen += 1
        x = self.norm(x) + self.table(torch.arange(len(x)) % 16)
        return self.second(torch.relu_(self.first(x))).sum()  # type: ignore[no-any-return]


def momentum(model: Any) -> None:
    for ours, theirs in zip(model.second.parameters(), model.first.parameters(), strict=True):
        ours.data = 0.9 * ours.data + 0.1 * theirs.data


def swap(model: Any) -> None:
    model.first.bias.data, model.second.bias.data = model.second.bias.data, model.first.bias.data


CHANGES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "clamp": (lambda model: model.first.weight.clamp_(-1, 1), {"first.weight"}),
    "data": (lambda model: model.first.weight.data.mul_(0.5), {"first.weight"}),
    "view": (lambda model: model.first.weight.t()[0].zero_(), {"first.weight"}),
    "copy": (lambda model: model.first.bias.copy_(model.second.bias), {"first.bias"}),
    "out": (lambda model: torch.add(model.first.bias, 1.0, out=model.second.bias.data), {"second.bias"}),
    "foreach": (
        lambda model: torch._foreach_mul_([model.first.weight, model.second.weight], 0.5),
        {"first.weight", "second.weight"},
    ),
    "normalize": (
        lambda model: nn.functional.normalize(model.first.weight.data, dim=1, out=model.first.weight.data),
        {"first.weight"},
    ),
    "swap": (swap, {"first.bias", "second.bias"}),
    "set": (momentum, {"second.weight", "second.bias"}),
}


def written(change: Callable[[Any], Any], **table: Any) -> set[str]:
    model = source_of(lambda: Changing(change, **table), "changing", None, lambda n: torch.randn(n, 8))
    graph = trace_model(model)
    assert bool(graph.written) == any("changes parameters" in note for note in graph.notes)
    return set(graph.written)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters_are_named(change: str) -> None:
    function, names = CHANGES[change]
    assert written(function) == names


def test_a_table_of_bounded_norm() -> None:
    assert written(lambda model: None, max_norm=1.0) == {"table.weight"}


@pytest.mark.parametrize("reads", [lambda model: None, lambda model: model.first.weight.norm().mul_(2)])
def test_reads_and_changed_buffers_are_no_changes(reads: Callable[[Any], Any]) -> None:
    assert written(reads) == set()


def test_changes_in_the_backward() -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            ctx.weight.mul_(0.5)
            return gradients[0] * ctx.weight, gradients[0].sum(0)

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.layer = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return Halved.apply(self.layer(x), self.weight).sum()  # type: ignore[no-untyped-call, no-any-return]

    assert trace_model(source_of(Halving, "halving", None, lambda n: torch.randn(n, 8))).written == ("weight",)
