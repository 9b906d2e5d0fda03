"""Small models for the tests of the tracer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from profiler.model_graph import Call, ModelGraph
from profiler.model_source import ModelSource


def source(build: Callable[[], nn.Module], *shapes: tuple[int, ...], classes: int = 0, length: int = 1) -> ModelSource:
    """Return a source whose forward takes one (batch, *shape) float tensor per shape.

    With `classes`, it takes one (batch, *shape) tensor of class numbers instead.
    """

    def inputs(module: nn.Module, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if classes:
            return tuple(torch.randint(classes, (batch, *shape)) for shape in shapes), {}
        return tuple(torch.randn(batch, *shape) for shape in shapes), {}

    return ModelSource("model", build, inputs, length)


def call_of(graph: ModelGraph, name: str) -> Call:
    """Return the only call of the operator called `name`."""
    (found,) = calls_of(graph, name)
    return found


def calls_of(graph: ModelGraph, name: str) -> list[Call]:
    """Return the calls of the operator called `name`."""
    return [call for call in graph.calls if graph.operators[call.operator].name == name]


class MLP(nn.Module):
    """A chain of linear layers, each but the last followed by a ReLU; returns the sum."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        out: Tensor = self.layers[-1](x)
        return out.sum()


class Attention(nn.Module):
    """Causal self-attention through the fused op."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class LanguageModel(nn.Module):
    """A decoder with a next-token loss; the head is tied to the embedding, by module or in use."""

    def __init__(
        self,
        *,
        width: int = 32,
        heads: int = 2,
        layers: int = 3,
        words: int = 64,
        length: int = 32,
        tie: str = "module",
        dropout: float = 0.0,
        hidden: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.tie = tie
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(length, width)
        sizes = hidden or (4 * width,) * layers
        self.blocks = nn.ModuleList(Block(width, heads, size, dropout) for size in sizes)
        self.norm = nn.LayerNorm(width)
        if tie != "use":
            self.head = nn.Linear(width, words, bias=False)
        if tie == "module":
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = F.linear(x, self.words.weight) if self.tie == "use" else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def language_model(**options: Any) -> ModelSource:
    """Return a source of `LanguageModel`."""
    length = options.get("length", 32)
    return source(lambda: LanguageModel(**options), (length,), classes=options.get("words", 64), length=length)


class EncoderDecoder(nn.Module):
    """torch's own transformer, summed: multi-head attention modules and cross attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Transformer(32, 2, 2, 2, 64, dropout=dropout, batch_first=True)

    def forward(self, encoded: Tensor, decoded: Tensor) -> Tensor:
        out: Tensor = self.net(encoded, decoded)
        return out.square().mean()


class RotaryLayer(nn.Module):
    """Grouped-query attention with rotated positions, gated MLP, root-mean-square norms."""

    def __init__(self, width: int = 32, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.size, bias=False)
        self.value = nn.Linear(width, key_heads * self.size, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key = (self.rotated(self.query(normed), self.heads), self.rotated(self.key(normed), self.key_heads))
        value = self.split(self.value(normed), self.key_heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        out: Tensor = x + self.down(F.silu(self.gate(x)) * self.gate(normed))
        return out.square().mean()

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.size).transpose(1, 2)

    def rotated(self, x: Tensor, heads: int) -> Tensor:
        x = self.split(x, heads)
        pairs = 10000.0 ** (-torch.arange(0, self.size, 2, device=x.device) / self.size)
        angles = torch.outer(torch.arange(x.shape[2], device=x.device), pairs)
        first, second = x.chunk(2, -1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(x.dtype)


class ConvNet(nn.Module):
    """Convolutions and batch norm in two stages, pooled and classified."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(self.unit(3, 8), self.unit(8, 8))
        self.stage2 = nn.Sequential(self.unit(8, 16), self.unit(16, 16))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 10)

    @staticmethod
    def unit(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.stage2(self.stage1(x))).flatten(1))
        return out.square().mean()


MEMORY_CASES = {
    "language model, peak at the loss": language_model(width=64, heads=4, length=64, words=512),
    "language model, peak in a block": language_model(width=64, heads=4, length=64, words=16),
    "untied": language_model(width=64, heads=4, length=64, words=256, tie="no"),
    "tied in use": language_model(width=64, heads=4, length=64, words=256, tie="use"),
    "dropout": language_model(width=64, heads=4, length=64, words=64, dropout=0.1),
    "uneven": language_model(width=64, heads=4, length=64, hidden=(64, 512, 128)),
    "wide mlp": source(lambda: MLP(256, 1024, 512, 256), (1024, 256)),
    "encoder-decoder": source(EncoderDecoder, (128, 32), (64, 32)),
    "encoder-decoder with dropout": source(lambda: EncoderDecoder(0.1), (128, 32), (64, 32)),
    "rotary": source(RotaryLayer, (128, 32)),
    "convolutions": source(ConvNet, (3, 32, 32)),
}


def checks(x: Tensor) -> Tensor:
    """Raise an exception if values are out of range, in ways in which models do; pytest rewrites `assert` in tests."""
    assert (x >= 0).all()
    assert 0 <= x.min() <= 1, f"values from {tuple(x.shape)} are out of range"
    assert x.max().item() <= 1 and (x != 3).all()  # noqa: PT018
    assert all(row.sum() > 0 for row in x[0])
    assert torch.allclose(x, x.abs())
    if not bool((x < 2).all()) or (x > 3).any().item():
        raise ValueError("too large")
    for part in x.unbind(1):
        if torch.min(part) < 0:
            raise ValueError(f"too low: {part.shape}")
    return x
