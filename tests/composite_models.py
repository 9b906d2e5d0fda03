"""Kinds of models of tokens, sound and pairs that are made of several ideas, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH, LENGTH, TOKENS, SIDE, CLASSES, LAYERS = 64, 32, 512, 16, 10, 3


class Attention(nn.Module):
    """One product for queries, keys and values; keys and values of another sequence if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None, *, causal: bool = False) -> Tensor:
        k, v = self.kv(x if other is None else other).chunk(2, dim=-1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (self.q(x), k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


def network(width: int = WIDTH) -> nn.Sequential:
    """Return two products with an activation between them."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """Attention, with another sequence too if asked, and a network; norms before or after."""

    def __init__(self, *, crosses: bool = False, norm_first: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.norm_first, self.causal = norm_first, causal
        self.attention, self.network = Attention(), network()
        self.cross = Attention() if crosses else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3 if crosses else 2))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        parts: list[Callable[[Tensor], Tensor]] = [lambda y: self.attention(y, causal=self.causal), self.network]
        if self.cross is not None:
            cross = self.cross
            parts.insert(1, lambda y: cross(y, memory))
        for part, norm in zip(parts, self.norms, strict=True):
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x


class SelectiveScan(nn.Module):
    """A block of Mamba: a gated convolution in time and a recurrence written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.convolution = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 4, padding=3, groups=2 * WIDTH)
        self.selects, self.step = nn.Linear(2 * WIDTH, 2 * 8 + 4), nn.Linear(4, 2 * WIDTH)
        self.decay = nn.Parameter(torch.log(torch.arange(1, 9).float()).repeat(2 * WIDTH, 1))
        self.skip, self.out = nn.Parameter(torch.ones(2 * WIDTH)), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y, gate = self.into(self.norm(x)).chunk(2, dim=-1)
        y = F.silu(self.convolution(y.transpose(1, 2))[..., :length].transpose(1, 2))
        step, b, c = self.selects(y).split([4, 8, 8], dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(self.decay))
        fed = step.unsqueeze(-1) * b.unsqueeze(2) * y.unsqueeze(-1)
        state, found = torch.zeros_like(fed[:, 0]), []
        for t in range(length):
            state = decay[:, t] * state + fed[:, t]
            found.append((state * c[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(found, dim=1) + self.skip * y
        return x + self.out(y * F.silu(gate))


class Tokens(nn.Module):
    """A language model: an embedding that is also the head if tied, blocks, and a loss all at once or in chunks."""

    def __init__(self, block: Callable[[], nn.Module], *, tied: bool = True, chunks: int = 1) -> None:
        super().__init__()
        self.chunks = chunks
        self.embedding, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, LENGTH) -> scalar."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x, targets = self.norm(x)[:, :-1], tokens[:, 1:]
        pieces = zip(x.chunk(self.chunks, dim=1), targets.chunk(self.chunks, dim=1), strict=True)
        losses = [F.cross_entropy(self.head(some).flatten(0, 1), t.flatten(), reduction="sum") for some, t in pieces]
        return torch.stack(losses).sum() / targets.numel()


class SharedExperts(nn.Module):
    """DeepSeek's: two networks that every token takes beside four of which all are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.norm_too = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.shared = nn.ModuleList(network() for _ in range(2))
        self.experts = nn.ModuleList(network() for _ in range(4))
        self.router = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), causal=True)
        y = self.norm_too(x)
        weights = self.router(y).sigmoid()
        routed = sum(expert(y) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))
        return x + routed + sum(expert(y) for expert in self.shared)


class Low(nn.Module):
    """W + B A, as `parametrize` has it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, columns)), nn.Parameter(torch.zeros(rows, 8))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def adapted() -> Tokens:
    """Return a language model of which only low-rank parts of products in networks, and norms, are trained."""
    model = Tokens(Block)
    model.requires_grad_(False)
    for block in model.blocks:
        for layer in (block.network[0], block.network[2]):
            parametrize.register_parametrization(layer, "weight", Low(*layer.weight.shape))
            layer.parametrizations.weight.original.requires_grad_(False)
        block.norms.requires_grad_(True)
    return model


class RoutedDepth(nn.Module):
    """Mixture of depths: half of the tokens, chosen by a score, go through a block."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(WIDTH, 1), Block()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).squeeze(-1)
        weights, chosen = scores.topk(x.shape[1] // 2, dim=1)
        where = chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        return x.scatter_add(1, where, self.block(x.gather(1, where)) * weights.sigmoid().unsqueeze(-1))


class Waves(nn.Module):
    """WaveNet: dilated convolutions with weight norm, whose skips are added up."""

    class Layer(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            conv = nn.Conv1d(32, 64, 3, padding=dilation, dilation=dilation)
            self.gated = parametrizations.weight_norm(conv)
            self.out = parametrizations.weight_norm(nn.Conv1d(32, 64, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = self.gated(x).chunk(2, dim=1)
            residual, skip = self.out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, dim=1)
            return x + residual, skip

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv1d(1, 32, 7, padding=3))
        self.layers = nn.ModuleList(self.Layer(2**i) for i in range(LAYERS))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(32, 64, 1), nn.ReLU(), nn.Conv1d(64, 1, 1))

    def forward(self, wave: Tensor) -> Tensor:
        """(batch, 1, samples) -> scalar."""
        x, skips = self.first(wave), []
        for layer in self.layers:
            x, skip = layer(x)
            skips.append(skip)
        return F.l1_loss(self.last(torch.stack(skips).sum(0))[..., :-1], wave[..., 1:])


class Clip(nn.Module):
    """A tower of patches and one of tokens, compared at a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.class_token = nn.Conv2d(3, WIDTH, 4, stride=4), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.registers = nn.Parameter(torch.zeros(1, 4, WIDTH))
        self.seeing = nn.ModuleList(Block() for _ in range(2))
        self.embedding, self.reading = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(Block(causal=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.image, self.text = nn.Parameter(torch.randn(WIDTH, 32)), nn.Linear(WIDTH, 32, bias=False)
        self.temperature = nn.Parameter(torch.tensor(2.6))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE), (batch, LENGTH) -> scalar."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        first = torch.cat([self.class_token, self.registers], dim=1).expand(len(x), -1, -1)
        x = torch.cat([first, x], dim=1)
        for block in self.seeing:
            x = block(x)
        y = self.embedding(tokens)
        for block in self.reading:
            y = block(y)
        a = F.normalize(self.norms[0](x)[:, 0] @ self.image, dim=-1)
        b = F.normalize(self.text(self.norms[1](y)[torch.arange(len(y)), tokens.argmax(-1)]), dim=-1)
        logits = self.temperature.exp() * a @ b.t()
        wanted = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.t(), wanted)) / 2


class Conformer(nn.Module):
    """Half networks around attention and a convolution in time."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.attention = network(), network(), nn.MultiheadAttention(WIDTH, 4, 0.1)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
            self.gated, self.wide = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 15, padding=7, groups=WIDTH)
            self.batch_norm, self.out = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.5 * self.first(self.norms[0](x))
            y = self.norms[1](x).transpose(0, 1)
            x = x + self.attention(y, y, y)[0].transpose(0, 1)
            y = F.glu(self.gated(self.norms[2](x).transpose(1, 2)), dim=1)
            x = x + self.out(F.silu(self.batch_norm(self.wide(y)))).transpose(1, 2)
            return self.norms[4](x + 0.5 * self.last(self.norms[3](x)))

    def __init__(self) -> None:
        super().__init__()
        self.sampled = nn.Sequential(nn.Conv1d(16, WIDTH, 3, stride=2, padding=1), nn.ReLU())
        self.blocks, self.head = nn.ModuleList(self.Block() for _ in range(3)), nn.Linear(WIDTH, 30)

    def forward(self, sound: Tensor, tokens: Tensor) -> Tensor:
        """(batch, 16, 2 * LENGTH), (batch, 8) -> scalar."""
        x = self.sampled(sound).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        scores = F.log_softmax(self.head(x).float(), dim=-1).transpose(0, 1)
        lengths = [torch.full((len(tokens),), n, dtype=torch.long) for n in (scores.shape[0], tokens.shape[1])]
        return -scores.mean() * lengths[0].numel() / lengths[1].numel() + scores.logsumexp(0).mean()


class Listener(nn.Module):
    """Whisper: an encoder of sound whose positions are a buffer, and a decoder that looks at it; the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv1d(16, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.register_buffer("where", torch.randn(LENGTH, WIDTH), persistent=False)
        self.encoder, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.embedding, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.decoder = nn.ModuleList(Block(crosses=True, causal=True) for _ in range(3))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, sound: Tensor, tokens: Tensor) -> Tensor:
        """(batch, 16, 2 * LENGTH), (batch, LENGTH) -> scalar."""
        memory = F.gelu(self.far(F.gelu(self.near(sound)))).transpose(1, 2)
        memory = (memory + self.where).to(memory.dtype)
        for block in self.encoder:
            memory = block(memory)
        memory, x = self.norm(memory), self.embedding(tokens) + self.positions
        for block in self.decoder:
            x = block(x, memory)
        logits = (self.last(x) @ self.embedding.weight.t()).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def images(batch: int) -> Tensor:
    """Return (batch, 3, SIDE, SIDE)."""
    return torch.randn(batch, 3, SIDE, SIDE)


def classes(batch: int, of: int = CLASSES) -> Tensor:
    """Return (batch,) classes."""
    return torch.randint(of, (batch,))


def tokens(batch: int) -> Tensor:
    """Return (batch, LENGTH) tokens."""
    return torch.randint(TOKENS, (batch, LENGTH))


def sound(batch: int) -> Tensor:
    """Return (batch, 16, 2 * LENGTH)."""
    return torch.randn(batch, 16, 2 * LENGTH)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "Mamba": (lambda: Tokens(SelectiveScan), lambda b: (tokens(b)[:, :8],)),
    "shared experts": (lambda: Tokens(SharedExperts), lambda b: (tokens(b),)),
    "LoRA, parametrized": (adapted, lambda b: (tokens(b),)),
    "mixture of depths": (lambda: Tokens(RoutedDepth), lambda b: (tokens(b),)),
    "norm first, chunked loss": (lambda: Tokens(lambda: Block(causal=True), chunks=4), lambda b: (tokens(b),)),
    "norm last, chunked loss": (
        lambda: Tokens(lambda: Block(causal=True, norm_first=False), chunks=4),
        lambda b: (tokens(b),),
    ),
    "norm last, head of its own": (lambda: Tokens(lambda: Block(norm_first=False), tied=False), lambda b: (tokens(b),)),
    "weight-normed waves": (Waves, lambda b: (torch.randn(b, 1, 256),)),
    "CLIP": (Clip, lambda b: (images(b), tokens(b))),
    "Conformer": (Conformer, lambda b: (sound(b), torch.randint(30, (b, 8)))),
    "Whisper": (Listener, lambda b: (sound(b), tokens(b))),
}
