"""Forwards that random numbers steer: the trace says what may be left out, and has the pass in which most runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from random import random as drawn
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from osdp.models.user_factory import source_of
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model

KEPT = 0.7
"""Probability of a layer to run."""
DRAWS: dict[str, Callable[[], Any]] = {
    "random.random": lambda: random.random() < KEPT,
    "random.uniform": lambda: random.uniform(-1, 1) < 2 * KEPT - 1,
    "numpy.rand": lambda: np.random.rand() < KEPT,
    "numpy.uniform": lambda: np.random.uniform(0, 1) < KEPT,
    "numpy.rand(1)": lambda: np.random.rand(1)[0] < KEPT,
    "random.randint": lambda: random.randint(0, 2),
    "random.choice": lambda: random.choice([True, False]),
    "numpy.randint": lambda: np.random.randint(0, 2),
    "imported": lambda: drawn() < KEPT,
    "torch.randperm": lambda: torch.randperm(8).tolist()[3] < 4,
    "torch.rand": lambda: torch.rand([]) < KEPT,
    "torch.rand, item": lambda: torch.rand(1).item() < KEPT,
    "torch.rand, one of several": lambda: torch.rand(8)[3] < KEPT,
    "torch.rand, list": lambda: torch.rand(8).tolist()[3] < KEPT,
    "uniform_, one of several": lambda: torch.zeros(8).uniform_(0, 1)[3] < KEPT,
    "torch.randint": lambda: torch.randint(0, 10, (1,)).item() < 10 * KEPT,
    "kept where high": lambda: random.random() > 1 - KEPT,
}
BY_SEED = {"random.randint", "random.choice", "numpy.randint", "imported"}
"""Which have no ends, so that only other seeds tell, and the pass with most layers need not have all."""
LAYERS = 4


class Dropping(nn.Module):
    """Layers of which each runs or not; the last always does."""

    def __init__(self, keeps: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(LAYERS))
        self.head = nn.Linear(8, 8)
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.keeps():
                x = x + layer(x)
        return self.head(x).sum()  # type: ignore[no-any-return]


def traced(keeps: Callable[[], Any]) -> ModelGraph:
    return trace_model(source_of(lambda: Dropping(keeps), "dropping", None, lambda n: torch.randn(n, 8)))


@cache
def traced_whole() -> ModelGraph:
    """Return the graph where every layer runs."""
    return traced(lambda: True)


@pytest.mark.parametrize("draws", DRAWS)
def test_layers_that_are_left_out_at_random(draws: str) -> None:
    state = random.getstate(), np.random.get_state()[2]
    graph = traced(DRAWS[draws])
    assert (random.getstate(), np.random.get_state()[2]) == state
    assert graph.left_out
    assert any("random numbers decide" in note for note in graph.notes)
    if draws in BY_SEED:
        return
    layers = {f"layers.{layer}.{part}" for layer in range(LAYERS) for part in (0, 2)}
    assert set(graph.left_out) == layers
    assert len(graph.calls) == len(layers) + 1
    for one, other in zip(graph.calls, traced_whole().calls, strict=True):
        assert one.saved_bytes == other.saved_bytes


@pytest.mark.parametrize(
    "draw", [lambda: random.random() >= 0, lambda: torch.rand([]) >= 0.0, lambda: bool(random.sample(range(9), 3))]
)
def test_draws_that_decide_nothing(draw: Callable[[], Any]) -> None:
    """As where a layer is dropped with probability 0."""
    graph = traced(draw)
    assert graph.left_out == ()
    assert len(graph.calls) == 2 * LAYERS + 1


def test_a_size_that_is_drawn_decides_nothing() -> None:
    """Even if the model does not run with the smallest one."""

    class Cropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            length = int(9 * random.random())
            if not length:
                raise ValueError("nothing is left")
            return self.layer(x)[:, :length].sum()  # type: ignore[no-any-return]

    graph = trace_model(source_of(Cropping, "cropping", None, lambda n: torch.randn(n, 8)))
    assert graph.left_out == ()


def test_layers_that_may_all_be_left_out() -> None:
    """Without any the loss has no gradient."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) if torch.rand([]) < KEPT else x).sum()  # type: ignore[no-any-return]

    assert trace_model(source_of(Single, "single", None, lambda n: torch.randn(n, 8))).left_out == ("layer",)


def test_one_of_several_alike_layers() -> None:
    """As many run each time, but others: ranks would gather different ones."""

    class OneLeftOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            skipped = random.randint(0, 3)
            for number, layer in enumerate(self.layers):
                x = x if number == skipped else layer(x)
            return x.sum()

    assert trace_model(source_of(OneLeftOut, "one", None, lambda n: torch.randn(n, 8))).left_out


def test_layers_in_random_order() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for number in torch.randperm(4).tolist():
                x = self.layers[number](x)
            return x.sum()

    assert len(trace_model(source_of(Shuffled, "shuffled", None, lambda n: torch.randn(n, 8))).left_out) == 4


def test_loops_that_wait_for_a_draw_end() -> None:
    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            drawn = random.random()
            while drawn < 0.1 or drawn > 0.9:
                drawn = random.random()
            return (self.layer(x) * drawn).sum()  # type: ignore[no-any-return]

    assert trace_model(source_of(Waiting, "waiting", None, lambda n: torch.randn(n, 8))).left_out == ()


def test_data_that_is_drawn_is_not_empty() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand(len(x), 8) < 0.5
            x = self.layer(x) * mask
            return (self.other(x) if mask.any() else x).sum()  # type: ignore[no-any-return]

    assert trace_model(source_of(Masked, "masked", None, lambda n: torch.randn(n, 8))).left_out == ()


def test_noise_decides_nothing() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand_like(x) < KEPT
            return (self.layer(x) * mask + random.random()).sum()

    assert trace_model(source_of(Noisy, "noisy", None, lambda n: torch.randn(n, 8))).left_out == ()


def test_what_is_drawn_beside_layers_is_what_takes_most() -> None:
    """How often something runs that has no parameters shows in no call: up to 17 % too low for quantizers."""

    class Quantized(nn.Module):
        def __init__(self, count: Callable[[], int]) -> None:
            super().__init__()
            self.layer, self.head, self.count = nn.Linear(8, 64), nn.Linear(64, 8), count

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            for _ in range(self.count()):
                x = x * torch.tanh(x)
            return self.head(x).sum()  # type: ignore[no-any-return]

    def saved_bytes(count: Callable[[], int]) -> float:
        own = source_of(lambda: Quantized(count), "quantized", None, lambda n: torch.randn(n, 8))
        return sum(call.saved_bytes(4) for call in trace_model(own).calls)

    assert saved_bytes(lambda: random.randrange(1, 4)) == saved_bytes(lambda: 3) > saved_bytes(lambda: 1)
    assert saved_bytes(lambda: 1 + 2 * (random.random() < 0.1)) == saved_bytes(lambda: 3)
