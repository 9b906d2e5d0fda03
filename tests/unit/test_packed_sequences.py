"""Packed sequences without data: what PyTorch computes of those that have it, and the memory that plans predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from test_recurrent_layers import LAYERS, OPTIONS, gradients
from thoroughness import some
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from profiler.model_source import ModelSource
from profiler.trace.packed_sequences import pad, recurrent_packed
from profiler.trace.trace import trace_model

STEPS, WIDTH = 6, 32
LENGTHS = [6, 6, 5, 2, 1], [4, 4], [3], [1, 1, 1], [5, 1]


def of_lengths(lengths: Sequence[int], width: int = WIDTH) -> PackedSequence:
    return pack_sequence([torch.randn(length, width, dtype=torch.double) for length in lengths])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("at_once", [True, False])
def test_outputs_and_gradients_are_those_of_torch(name: str, at_once: bool) -> None:
    for options, lengths in some([*product(OPTIONS, LENGTHS)], 3, at_once):
        if options["batch_first"] or ("proj_size" in options and name != "lstm"):
            continue
        torch.manual_seed(0)
        layer = LAYERS[name](6, 5, **options).double()
        packed = of_lengths(lengths, 6)
        states = [torch.randn_like(state) for state in tree_leaves(layer(packed)[1])]
        given: Any = tuple(states) if name == "lstm" else states[0]
        counts = options["num_layers"], 0.0, layer.training, options["bidirectional"]
        weights = layer._flat_weights
        made = recurrent_packed(
            name, at_once, packed.data, packed.batch_sizes, given, weights, options["bias"], *counts
        )
        out, ends = layer(packed, given)
        wanted = tree_leaves((out.data, ends))
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one, other)
        for ours, torchs in zip(gradients(made, layer), gradients(wanted, layer), strict=True):
            torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_padded_is_what_torch_pads(lengths: list[int], batch_first: bool) -> None:
    packed = of_lengths(lengths)
    for total in (0, 9):
        padded, found = pad(packed.data.requires_grad_(), packed.batch_sizes, batch_first, -1.0, total)
        wanted, told = pad_packed_sequence(packed, batch_first, -1.0, total or None)
        assert torch.equal(padded, wanted)
        assert torch.equal(found, told)
        assert found.tolist() == lengths
        ours, torchs = (torch.autograd.grad(one.sin().sum(), packed.data)[0] for one in (padded, wanted))
        assert torch.equal(ours, torchs)


class Tagger(nn.Module):
    """Packs and pads itself, in the middle of it."""

    def __init__(self, name: str, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.layer = LAYERS[name](WIDTH, WIDTH, batch_first=batch_first, **options)
        self.end = nn.Linear(WIDTH * (2 if self.layer.bidirectional else 1), WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        batch_first = self.layer.batch_first
        x = self.begin(x).transpose(0, 1 - batch_first)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.layer(packed)[0], batch_first, total_length=STEPS)
        return self.end(padded).tanh().mean()


class Classifier(Tagger):
    """Takes the last states alone, of samples that it sorts."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.begin(x)[order], lengths.cpu(), True)
        states = self.layer(packed)[1]
        hidden = states[0] if isinstance(states, tuple) else states
        return hidden.tanh().mean()


class Block(nn.Module):
    """Hands on what is packed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.out = LAYERS[name](WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return packed._replace(data=packed.data + self.out(self.layer(packed)[0].data))


class Blocks(nn.Module):
    """Blocks between which sequences stay packed."""

    def __init__(self, name: str, is_packed: bool = False) -> None:
        super().__init__()
        self.blocks, self.is_packed = nn.ModuleList(Block(name) for _ in range(3)), is_packed

    def forward(self, x: Any, lengths: Tensor | None = None) -> Tensor:
        packed = x if lengths is None else pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
        for block in self.blocks:
            packed = block(packed)
        return packed.data.tanh().mean()  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tagger": lambda: Tagger("lstm", num_layers=2, bidirectional=True),
    "steps first": lambda: Tagger("gru", batch_first=False),
    "classifier": lambda: Classifier("lstm", num_layers=2),
    "blocks": lambda: Blocks("gru"),
    "packed inputs": lambda: Blocks("rnn_tanh", is_packed=True),
}


def source(name: str, shorter: int) -> ModelSource:
    """`shorter`: by how much the last sample is, of `STEPS`."""

    def inputs(model: Any, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lengths = [STEPS] * (batch - 1) + [STEPS - shorter]
        if name == "packed inputs":
            return (pack_sequence([torch.randn(length, WIDTH) for length in lengths]),), {}
        return (torch.randn(batch, STEPS, WIDTH), torch.tensor(lengths)), {}

    return ModelSource(name, MODELS[name], inputs, STEPS)


@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_holds_what_is_predicted(name: str) -> None:
    """Of samples of one length, as their LSTM keeps more on a CPU, or but for a step of one sample, as others run."""
    graph, machine = trace_model(source(name, 0)), cluster(1, 2)
    assert "sequences that are packed are assumed to be as long as they were padded to" in " ".join(graph.notes)
    shorter, blocks = 0 if name in ("tagger", "classifier") else 1, [block.name for block in graph.blocks]
    for again in ([], blocks[:2]) if blocks else ([],):
        plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, again, micro_batch=512)
        assert -0.002 <= compare(plan, source(name, shorter), graph, machine, with_data=True).error <= 0.01
