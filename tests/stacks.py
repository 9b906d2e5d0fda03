"""Random stacks of blocks, of which activations are most: what people write in blocks, and around them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from profiler.model_source import ModelSource

LENGTH = 64


class BlocksBetweenLayers(nn.Module):
    """Runs a layer, blocks and a head; its loss is the mean of squares."""

    embed: nn.Module
    blocks: nn.ModuleList
    head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """What `embed` takes -> a loss."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).pow(2).mean()
        return loss


class Attention(nn.Module):
    """Self-attention with an optional mask that is added to the scores."""

    def __init__(self, width: int, draw: Random) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.eager = draw.random() < 0.5

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, LENGTH, width) -> the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        if self.eager:
            scores = q @ k.transpose(-1, -2)
            scores = scores if mask is None else scores + mask.to(q.dtype)
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask.to(q.dtype))
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """Two layers with an activation, and dropout or none."""

    def __init__(self, width: int, draw: Random) -> None:
        super().__init__()
        hidden = draw.choice([1, 2, 4]) * width
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = draw.choice([nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Tanh()])
        self.drop = nn.Dropout(draw.choice([0.0, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, width) -> the same, as of all pieces."""
        return self.drop(self.down(self.act(self.up(x))))


class Convolution(nn.Module):
    """A convolution along the sequence, with statistics of the batch or of groups of channels."""

    def __init__(self, width: int, draw: Random) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width) if draw.random() < 0.6 else nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Scaled(nn.Module):
    """A buffer of another dtype, and a parameter used directly."""

    def __init__(self, width: int, draw: Random) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("table", torch.ones(width, dtype=draw.choice([torch.float32, torch.float64, torch.int64])))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * self.table.to(x.dtype)


class Block(nn.Module):
    """Attention or none, one or two pieces, perhaps a block within, in one of several forms."""

    def __init__(self, width: int, draw: Random) -> None:
        super().__init__()
        self.form = draw.choice(["plain", "residual", "residual", "pre", "gated", "tuple"])
        self.attention = Attention(width, draw) if draw.random() < 0.6 else None
        pieces: list[Callable[[int, Random], nn.Module]] = [Mlp, Mlp, Convolution, Scaled]
        self.body = nn.ModuleList(draw.choice(pieces)(width, draw) for _ in range(draw.randint(1, 2)))
        self.norm = draw.choice([nn.LayerNorm(width), nn.RMSNorm(width), nn.Identity()])
        self.inner = Block(width, draw) if draw.random() < 0.1 else None

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None) -> Any:
        y = self.norm(x)
        if self.attention is not None:
            y = self.attention(y, mask)
            y = x + y if self.form != "plain" else y
        if memory is not None:
            y = y + memory
        for piece in self.body:
            y = piece(y)
        if self.inner is not None:
            y = self.inner(y, mask)
            y = y[0] if isinstance(y, tuple) else y
        match self.form:
            case "residual":
                return x + y
            case "gated":
                return x * y.sigmoid()
            case "tuple":
                return y, x
        return y


AROUND = (
    "none", "none", "none", "gelu", "residual", "residual gelu", "scaled", "norm", "dropout", "in place", "clone",
    "chunked", "silu mul",
)  # fmt: skip
"""What comes after a block."""


class Stack(nn.Module):
    """Blocks between an embedding and a head, with code of its own after each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = Random(number)
        self.number = number
        width = self.width = draw.choice([32, 48])
        self.tokens = draw.random() < 0.5
        self.embed = nn.Embedding(draw.choice([16, 256]), width) if self.tokens else nn.Linear(width, width)
        count = draw.randint(2, 4)
        seed = draw.random()
        same = draw.random() < 0.6
        self.blocks = nn.ModuleList(Block(width, Random(seed if same else draw.random())) for _ in range(count))
        one = draw.choice(AROUND)
        alike = draw.random() < 0.6
        self.around = [one if alike else draw.choice(AROUND) for _ in range(count)]
        self.mask = draw.choice(["none", "none", "plain", "per sample", "trained", "boolean"])
        self.bias = nn.Embedding(8, 2) if self.mask == "trained" else None
        self.memory = draw.random() < 0.15
        self.skips = draw.random() < 0.15
        self.states = draw.random() < 0.15
        self.alias = draw.random() < 0.15
        self.head = nn.Linear(width, self.embed.num_embeddings if self.tokens else width, bias=draw.random() < 0.5)
        if self.tokens and draw.random() < 0.4:
            self.head.weight = self.embed.weight
        if self.alias:  # as T5 has it: it never runs
            self.shared = type(self.embed)(width, width)
            self.shared.weight = self.embed.weight
        self.aux = nn.Linear(width, 4) if draw.random() < 0.2 else None
        self.aux_at = draw.randrange(count)
        self.final = draw.choice([nn.LayerNorm(width), nn.Identity()])
        self.loss = draw.choice(["cross_entropy", "mean", "mse"])
        self.again = draw.random() < 0.1
        if draw.random() < 0.15:
            self.embed.requires_grad_(False)
        if draw.random() < 0.1:
            for block in self.blocks[:1]:
                block.requires_grad_(False)
        self.masks_anew = draw.random() < 0.3

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.tokens:
            return (torch.randint(self.embed.num_embeddings, (batch, LENGTH)),), {}
        return (torch.randn(batch, LENGTH, self.width),), {}

    def make_mask(self, x: Tensor) -> Tensor | None:
        match self.mask:
            case "plain":
                return torch.full((LENGTH, LENGTH), -1e4).triu(1)
            case "per sample":
                return torch.zeros(x.shape[0], 1, LENGTH, LENGTH)
            case "trained":
                places = torch.arange(LENGTH)
                assert self.bias is not None
                return self.bias((places[:, None] - places).clamp(-3, 4) + 3).permute(2, 0, 1)[None]
            case "boolean":
                return torch.zeros(LENGTH, LENGTH).masked_fill(
                    torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -1e4
                )
        return None

    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) or inputs (batch, LENGTH, width) -> the loss."""
        x = start = self.embed(inputs)
        mask = self.make_mask(x)
        saved, states, aux = [], [], None
        blocks = [*self.blocks, *(self.blocks[:1] if self.again else [])]
        for index, block in enumerate(blocks):
            if self.masks_anew and index == len(blocks) // 2:
                mask = self.make_mask(x)  # as a decoder has one of its own
            if self.skips and index < len(blocks) // 2:
                saved.append(x)
            y = block(x, mask if block.attention is not None else None, start if self.memory else None)
            y = y[0] if isinstance(y, tuple) else y
            match self.around[index % len(self.around)]:
                case "none":
                    x = y
                case "gelu":
                    x = F.gelu(y)
                case "residual":
                    x = x + y
                case "residual gelu":
                    x = x + F.gelu(y)
                case "scaled":
                    x = 0.5 * x + y * y.mean(-1, keepdim=True)
                case "norm":
                    x = F.layer_norm(x + y, (self.width,))
                case "dropout":
                    x = x + F.dropout(y, 0.1)
                case "in place":
                    x = y.clone()
                    x *= 2.0
                case "clone":
                    x = y.clone()
                case "chunked":
                    one, two = y.chunk(2, -1)
                    x = torch.cat([one.tanh(), two * one], -1)
                case "silu mul":
                    x = F.silu(x) * y
            if saved and index >= len(blocks) // 2:
                x = x + saved.pop()
            states.append(x)
            if self.aux is not None and index == self.aux_at:
                aux = self.aux(x).square().mean()
        if self.states:
            x = torch.stack(states).mean(0)
        out = self.head(self.final(x))
        match self.loss:
            case "cross_entropy":
                target = inputs if self.tokens else torch.zeros(out.shape[:2], dtype=torch.int64)
                loss = F.cross_entropy(out.flatten(0, 1), target.flatten())
            case "mse":
                loss = F.mse_loss(out, torch.zeros_like(out))
            case _:
                loss = out.mean()
        return loss if aux is None else loss + 0.1 * aux


def source_of(number: int) -> ModelSource:
    """Return the source of one stack."""
    return ModelSource(
        f"stack{number}", lambda: Stack(number), lambda model, batch: model.example_inputs(batch), LENGTH
    )
