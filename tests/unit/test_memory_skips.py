"""Predicted peak memory of models with skips against dry runs: what one makes, a later one takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

TOKENS, FEATURES = 48, 64


class Layer(nn.Module):
    """A feed-forward layer from one width to another, of its input and perhaps a skip beside it."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(before)
        self.up, self.down = nn.Linear(before, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """(batch, tokens, before), or both parts of it -> (batch, tokens, width)."""
        x = x if skip is None else torch.cat([x, skip], -1)
        out: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return out


class Skips(nn.Module):
    """Layers down and up again; each on the way up but the first takes what the one across has made."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        steps = list(pairwise(widths))
        self.stem, self.head = nn.Linear(FEATURES, widths[0]), nn.Linear(widths[0], FEATURES)
        self.encoder = nn.ModuleList(Layer(before, width) for before, width in steps)
        ways = [(width, before) for before, width in reversed(steps)]
        self.decoder = nn.ModuleList(Layer(2 * a if place else a, b) for place, (a, b) in enumerate(ways))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, features) -> a loss."""
        x, made = self.stem(x), []
        for layer in self.encoder:
            x = layer(x)
            made.append(x)
        for place, layer in enumerate(self.decoder):
            x = layer(x, made[-1 - place] if place else None)
        loss: Tensor = self.head(x).pow(2).mean()
        return loss

    def example_inputs(self, batch: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return arguments of `forward`."""
        return (torch.randn(batch, TOKENS, FEATURES),), {}


@pytest.mark.parametrize(
    ("widths", "strategy", "recomputed", "micro_batch"),
    [
        ((384, 384, 128, 320), "secondary_shard:2", ("encoder.1", "encoder.2", "decoder.2"), 8),
        ((320, 320, 128, 384), "owner", ("decoder.2",), 8),
        ((320, 320, 256, 256), "owner", ("encoder.0", "decoder.1", "decoder.2"), 4),
        ((128, 384, 384, 128), "shard", (), 4),
    ],
)
def test_prediction_is_what_the_runtime_holds(
    widths: tuple[int, ...], strategy: str, recomputed: tuple[str, ...], micro_batch: int
) -> None:
    """A block that runs again makes its `cat` anew beside both parts, of which one may be an input of a block below."""
    model = ModelSource("skips", lambda: Skips(widths), lambda module, batch: module.example_inputs(batch), TOKENS)
    graph, machine = trace_model(model, "fp32"), cluster(2, 4)
    choices = {operator.name: strategy for operator in graph.operators}
    plan = plan_of(graph, machine, choices, recomputed, micro_batch=micro_batch, optimizer="sgd")
    assert len(plan.recomputed_blocks) == len(recomputed)
    assert -0.002 <= compare(plan, model, graph, machine).error <= 0.005


class Stems(nn.Module):
    """Two embeddings, each larger than all that follows; neither has an input with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(4096, FEATURES), nn.Embedding(8192, FEATURES)
        self.lower, self.upper = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """Twice (batch, tokens) -> a loss."""
        x = self.lower(self.first(tokens))
        loss: Tensor = self.upper(self.second(others) + x).pow(2).mean()
        return loss

    def example_inputs(self, batch: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Return arguments of `forward`."""
        return (torch.randint(4096, (batch, TOKENS)), torch.randint(4096, (batch, TOKENS))), {}


@pytest.mark.parametrize("strategy", ["owner", "owner+offload", "shard"])
def test_embeddings_are_reduced_first_in_the_model_first(strategy: str) -> None:
    """All wait for the end of backward with their gradients, and the largest buffer comes when fewest wait."""
    model = ModelSource("stems", Stems, lambda module, batch: module.example_inputs(batch), TOKENS)
    graph, machine = trace_model(model, "bf16"), cluster(1, 4)
    choices = {operator.name: strategy for operator in graph.operators}
    plan = plan_of(graph, machine, choices, (), micro_batch=1, optimizer="sgd")
    found = compare(plan, model, graph, machine)
    assert -0.002 <= found.error <= 0.005


def test_who_is_charged_for_what_a_block_takes() -> None:
    """In bytes of one sample; the norm of a layer is the first to save what it reads."""
    graph = trace_model(
        ModelSource("skips", lambda: Skips((128, 256, 192)), lambda m, b: m.example_inputs(b), TOKENS), "fp32"
    )
    encoder, decoder = graph.blocks[1], graph.blocks[3]
    taken = 4 * TOKENS * 256
    assert (encoder.name, decoder.name) == ("encoder.1", "decoder.1")
    first, *others = graph.calls[encoder.first_call : encoder.last_call]
    # The encoder's norm saves its input and two statistics; running again, the block holds the input alone.
    assert first.saved_bytes.per_sample == taken + 2 * 4 * TOKENS
    assert first.recomputed is not None
    assert first.recomputed.saved_bytes.per_sample == taken
    assert all(call.recomputed is not None and call.recomputed.saved_bytes(1) == 0 for call in others)
    # The lower decoder's output, and that of encoder.0, for which encoder.1 is charged: the decoder adds the two up.
    assert decoder.input_bytes(1) == 2 * taken
    charged = [call.recomputed for call in graph.calls[decoder.first_call : decoder.last_call]]
    assert sum(call.saved_bytes(1) for call in charged if call) == taken


def test_inputs_under_bf16_are_held_in_fp32_as_they_were_given() -> None:
    """The caller holds on to what it gave, and FSDP2 casts a copy of it."""
    model = ModelSource("skips", lambda: Skips((16, 16)), lambda module, batch: module.example_inputs(batch), TOKENS)
    graph, machine = trace_model(model, "bf16"), cluster(1, 4)
    first = graph.calls[0]
    assert first.saved_bytes(1) == 2 * TOKENS * FEATURES  # the copy
    assert first.forward_peak_bytes(1) >= (4 + 2) * TOKENS * FEATURES
    choices = {operator.name: "shard" for operator in graph.operators}
    plan = plan_of(graph, machine, choices, (), micro_batch=64, optimizer="sgd")
    assert -0.002 <= compare(plan, model, graph, machine).error <= 0.01


class Branches(nn.Module):
    """Layers of several widths that read one activation; all of them reach the loss."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.lower = nn.Linear(FEATURES, 256)
        self.upper = nn.ModuleList(nn.Linear(256, width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, features) -> a loss."""
        x = torch.relu(self.lower(x))
        return torch.stack([layer(x).pow(2).mean() for layer in self.upper]).sum()

    def example_inputs(self, batch: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return arguments of `forward`."""
        return (torch.randn(batch, TOKENS, FEATURES),), {}


@pytest.mark.parametrize("replicated", [("0",), ("0", "1")])
@pytest.mark.parametrize(
    ("widths", "precision", "micro_batch", "accumulation"),
    [((256, 128), "bf16", 4, 1), ((256, 128, 64), "bf16", 3, 1), ((256, 128, 64), "fp32", 4, 2)],
)
def test_gradients_of_branches_are_added_up_after_a_reduction(
    widths: tuple[int, ...], precision: str, micro_batch: int, accumulation: int, replicated: tuple[str, ...]
) -> None:
    """Two gradients of one activation and their sum are there beside the gradients that were reduced."""
    model = ModelSource("branches", lambda: Branches(widths), lambda m, batch: m.example_inputs(batch), TOKENS)
    graph, machine = trace_model(model, precision), cluster(1, 4)
    whole = {f"upper.{name}" for name in replicated}
    choices = {one.name: "replicate" if one.name in whole else "shard" for one in graph.operators}
    plan = plan_of(graph, machine, choices, micro_batch=micro_batch, accumulation=accumulation)
    assert -0.002 <= compare(plan, model, graph, machine).error <= 0.005
