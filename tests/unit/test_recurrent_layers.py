"""Recurrent layers of plain products: the same numbers as PyTorch's, and the memory that plans predict."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import THOROUGH, some
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from profiler.model_source import ModelSource
from profiler.recurrent_layers import CELLS, recurrent
from profiler.trace.trace import trace_model

LAYERS: dict[str, Any] = {
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
}
STEPS, MICRO_BATCH = (12, 256) if THOROUGH else (4, 768)
"""Of a dry run: as many time steps in all, and so many that hardly anything else is held; of each sample a first, a
last and two between are enough."""
OPTIONS: list[dict[str, Any]] = [
    {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first, **projected}
    for layers, both, bias, first in product((1, 2), (False, True), (True, False), (True, False))
    for projected in ({}, {"proj_size": 4})
]


def test_every_layer_of_torch_is_there() -> None:
    assert set(CELLS) == set(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("at_once", [True, False])
def test_outputs_and_gradients_are_those_of_torch(name: str, at_once: bool) -> None:
    for options in OPTIONS:
        if "proj_size" in options and name != "lstm":
            continue
        torch.manual_seed(0)
        layer = LAYERS[name](6, 5, **options).double()
        inputs = torch.randn(3, 2, 6, dtype=torch.double)
        states = [torch.randn_like(state) for state in tree_leaves(layer(inputs)[1])]
        given: Any = tuple(states) if name == "lstm" else states[0]
        biased, train = options["bias"], layer.training
        counts = options["num_layers"], 0.0, train, options["bidirectional"], options["batch_first"]
        made = recurrent(name, at_once, inputs, given, layer._flat_weights, biased, *counts)
        wanted = tree_leaves(layer(inputs, given))
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one, other)
        for ours, torchs in zip(gradients(made, layer), gradients(wanted, layer), strict=True):
            torch.testing.assert_close(ours, torchs)


def gradients(outputs: Any, layer: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(sum(one.sin().sum() for one in outputs), [*layer.parameters()])


class Alone(nn.Module):
    """A recurrent layer that is nearly all of a model, so that its peak is the model's."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.layer = LAYERS[name](32, 32, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out.tanh().mean()


class Dropped(nn.Module):
    """Dropout in every way: a module, a function, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1, self.training)
        return x.square().mean()


WAYS: list[tuple[str, dict[str, Any]]] = [
    (name, options)
    for name in LAYERS
    for options in (
        {},
        {"bidirectional": True},
        {"num_layers": 2, "dropout": 0.2},
        {"num_layers": 2, "bidirectional": True, "bias": False},
        *([{"proj_size": 8}] if name == "lstm" else []),
    )
]
MODELS: dict[str, Any] = {
    **{f"{name} {options}": lambda name=name, options=options: Alone(name, **options) for name, options in WAYS},
    "dropout": Dropped,
}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("model", [*some([*MODELS][:-1], 9, 1), "dropout"])
def test_a_dry_run_holds_what_is_predicted(model: str, device_type: str) -> None:
    """With the kernels of the plan's devices.  A CPU of the test machine computes, where it can."""
    source = ModelSource(model, MODELS[model], lambda module, batch: ((torch.randn(batch, STEPS, 32),), {}), STEPS)
    graph, machine = trace_model(source, device_type=device_type), cluster(1, 2)
    plan = plan_of(graph, machine, {operator.name: "shard" for operator in graph.operators}, micro_batch=MICRO_BATCH)
    with_data = device_type == "cpu"
    found = compare(plan, source, graph, machine, with_data=with_data, device_type=device_type)
    assert -0.002 <= found.error <= 0.03, found
