"""Memory of layers of which no backward comes, or that never run.

Nothing prefetches what has no backward, and what is below it is prefetched.  What never runs has no gradients, nor
states of the optimizer, also where every rank holds it.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

TOKENS, WIDTH, LENGTH = 120, 64, 32


class Layer(nn.Module):
    """Attention and a feed-forward network, to a memory as well if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same."""
        other = x if memory is None else memory
        x = x + self.attention(x, other, other, need_weights=False)[0]
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Positions(nn.Embedding):
    """Frozen, of sines where that matters."""

    def __init__(self) -> None:
        super().__init__(2 * LENGTH, WIDTH)
        self.weight.requires_grad_(False)


class Translator(nn.Module):
    """An encoder and a decoder with one embedding, which is the head too, and frozen positions before each."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.source_positions, self.positions = Positions(), Positions()
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH) if between == "beside a norm" else nn.Identity()
        self.frozen = Layer().requires_grad_(False) if between == "a frozen block" else nn.Identity()
        self.decoder = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) -> a loss."""
        places = torch.arange(LENGTH)
        memory = self.embed(tokens) + self.source_positions(places)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.norm(memory)
        x = self.embed(tokens) + self.frozen(self.positions(places).expand(len(tokens), -1, -1))
        for layer in self.decoder:
            x = layer(x, memory)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class FrozenBelow(nn.Module):
    """Trained layers on top of frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH).requires_grad_(False)
        self.frozen = nn.ModuleList(Layer().requires_grad_(False) for _ in range(2))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, 8) -> a loss."""
        x = self.stem(x)
        for layer in (*self.frozen, *self.layers):
            x = layer(x)
        return self.head(x).square().mean()


class TwoTowers(nn.Module):
    """Layers for images and for text, fed with text alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.images = nn.ModuleList(Layer() for _ in range(4))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) -> a loss."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Pooled(nn.Module):
    """A stack that also makes a summary, of which its loss reads nothing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4 if how == "pooled by a frozen block" else 3))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        for layer in self.layers[3:]:
            layer.requires_grad_(False)
            layer.up.requires_grad_(True)  # as an adapter
        self.transform, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) -> a loss."""
        x = self.embed(tokens)
        for layer in self.layers[:3]:
            x = layer(x)
        for layer in self.layers[3:]:
            layer(x)
        if self.how == "pooled before":
            torch.tanh(self.pooler(x[:, 0]))
        x = self.head(torch.relu(self.transform(x)))
        if self.how == "pooled after":
            torch.tanh(self.pooler(x[:, 0, :WIDTH]))
        return nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten())


@cache
def drawn(between: str) -> tuple[ModelSource, ModelGraph]:
    def build() -> nn.Module:
        others = {"frozen below": FrozenBelow, "never run": TwoTowers}
        if between.startswith("pooled"):
            return Pooled(between)
        return others[between]() if between in others else Translator(between)

    def inputs(module: nn.Module, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        made = torch.randn(batch, LENGTH, 8) if between == "frozen below" else torch.randint(TOKENS, (batch, LENGTH))
        return (made,), {}

    source = ModelSource(between, build, inputs, LENGTH)
    return source, trace_model(source)


def _check(name: str, strategy: str, accumulation: int = 1, *, recomputes: bool) -> None:
    """Compare a plan's prediction with a dry run: neither too low nor too high."""
    source, graph = drawn(name)
    choices = {operator.name: strategy for operator in graph.operators}
    again = [block.name for block in graph.blocks] if recomputes else []
    plan = plan_of(graph, cluster(2, 2), choices, again, micro_batch=4, accumulation=accumulation)
    found = compare(plan, source, graph, cluster(2, 2), with_data=True)
    print(name, strategy, accumulation, recomputes, f"{found.error:+.2%}", found.predicted_phase)
    assert -0.002 <= found.error <= 0.02


CASES = [
    *product(("alone", "beside a norm", "a frozen block", "frozen below"), ("shard", "hierarchical"), (True, False))
]


@pytest.mark.parametrize(("between", "strategy", "recomputes"), some(CASES, 6))
def test_what_no_backward_follows_is_not_prefetched(between: str, strategy: str, recomputes: bool) -> None:
    _check(between, strategy, recomputes=recomputes)


@pytest.mark.parametrize(
    ("strategy", "accumulation", "recomputes"),
    [
        ("replicate", 1, True),
        ("replicate", 2, False),
        ("replicate", 3, False),
        ("replicate", 1, False),
        ("shard", 1, True),
    ],
)
def test_what_never_runs_rests(strategy: str, accumulation: int, recomputes: bool) -> None:
    """The optimizer's states are of 2 layers of 6, the buckets of all."""
    _check("never run", strategy, accumulation, recomputes=recomputes)


@pytest.mark.parametrize(
    ("how", "strategy", "recomputes"),
    [
        *some([*product(("pooled before", "pooled after"), ("shard", "shard_grad", "owner"), (True, False))], 4),
        *product(["pooled by a frozen block"], ["shard"], (True, False)),
    ],
)
def test_what_the_loss_does_not_read_leaves_its_unit_unsharded(how: str, strategy: str, recomputes: bool) -> None:
    """No gradients and no states of it are counted, as notes say."""
    _check(how, strategy, recomputes=recomputes)
