"""Small models of sequences, tables and graphs as people write them, with code of their own around torch's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, TOKENS = 64, 12, 257

# --- recurrent --------------------------------------------------------------------------------


class Seq2Seq(nn.Module):
    """A bidirectional encoder, and a decoder cell by cell that attends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True)
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, TOKENS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) twice -> a loss."""
        memory, _ = self.encoder(self.source(source))
        hidden = cell = memory.new_zeros(source.shape[0], WIDTH)
        context, logits = memory.mean(1), []
        for step in range(target.shape[1] - 1):
            given = torch.cat([self.target(target[:, step]), context], 1)
            hidden, cell = self.cell(given, (hidden, cell))
            weights = torch.bmm(memory, self.query(hidden)[:, :, None]).softmax(1)
            context = (weights * memory).sum(1)
            logits.append(self.out(torch.cat([hidden, context], 1)))
        return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), target[:, 1:].flatten())


class Recurrent(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self, layer: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layer = layer(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        width = options.get("proj_size", WIDTH)
        self.head = nn.Linear(2 * width if options.get("bidirectional") else width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, LENGTH) -> a loss."""
        hidden, _ = self.layer(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# --- attention --------------------------------------------------------------------------------


class Masked(nn.Module):
    """`nn.MultiheadAttention` with a mask of padding and a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.register_buffer("causal", torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, LENGTH) -> a loss."""
        padding, x = tokens == 0, self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = norm(x)
            x = x + layer(y, y, y, key_padding_mask=padding, attn_mask=self.causal)[0]
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


class Translator(nn.Module):
    """`nn.Transformer` with masks of padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 128, batch_first=True, **options)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) twice -> a loss."""
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.transformer(
            self.embedding(source) + self.positions,
            self.embedding(target) + self.positions,
            tgt_mask=causal,
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
        return F.cross_entropy(self.head(hidden).transpose(1, 2), target)


class CrossBlock(nn.Module):
    """Latents look at inputs, then at themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=32, batch_first=True)
        self.own = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, latents: Tensor, inputs: Tensor) -> Tensor:
        found, _ = self.cross(self.norm(latents), inputs, inputs, need_weights=False)
        return self.own(latents + found)


class Perceiver(nn.Module):
    """Learned latents of the root, read first, and again at the end."""

    def __init__(self, *, weight_shared: bool) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 16, WIDTH))
        self.inputs = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(1 if weight_shared else 3))
        self.repeats = 3 if weight_shared else 1
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """(batch, 4 LENGTH, 8) -> a loss among others."""
        x, latents = self.inputs(x), self.latents.expand(x.shape[0], -1, -1)
        states = []
        for _ in range(self.repeats):
            for block in self.blocks:
                latents = block(latents, x)
                states.append(latents)
        logits = self.out((latents - self.latents).mean(1))
        return {"hidden": tuple(states), "logits": logits, "loss": logits.logsumexp(-1).mean()}


class Albert(nn.Module):
    """One block called several times, its embedding factorised and tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.project = nn.Embedding(TOKENS, 32), nn.Linear(32, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.down, self.bias = nn.Linear(WIDTH, 32), nn.Parameter(torch.zeros(TOKENS))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, LENGTH) -> a loss, logits."""
        x = self.project(self.embedding(tokens))
        for _ in range(4):
            x = self.block(x)
        logits = F.linear(self.down(x), self.embedding.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


class Swish(torch.autograd.Function):
    """x sigmoid(x), of which x alone is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return gradient * (sigmoid * (1 + x * (1 - sigmoid)))


class Scaled(torch.autograd.Function):
    """A product with a weight, both kept as attributes of the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.rows = scale, torch.full_like(x[..., :1], scale)
        return (x @ weight.t()) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = gradient * ctx.rows
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None


class OwnFunctions(nn.Module):
    """Blocks of autograd functions of the user's own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / 8)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(Swish.apply(Scaled.apply(self.norm(x), self.up, 0.5)))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.Sequential(*(self.Block() for _ in range(3)))
        self.last = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, 16) -> a loss."""
        return F.smooth_l1_loss(self.last(self.blocks(self.first(x))), x)


class Checkpointed(nn.Module):
    """The user recomputes every second block."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, LENGTH) -> a loss."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant) if number % 2 else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


# --- experts ----------------------------------------------------------------------------------


class Experts(nn.Module):
    """The best two of four networks for every token."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape, x = x.shape, x.flatten(0, 1)
        weights = self.gate(x).softmax(-1)
        best, chosen = weights.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        balance = (weights.mean(0) * F.one_hot(chosen, 4).sum(1).float().mean(0)).sum()
        if self.dense:
            spread = torch.zeros_like(weights).scatter(1, chosen, best)
            out = sum(spread[:, number, None] * expert(x) for number, expert in enumerate(self.experts))
            return out.view(shape), balance
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            found = expert(x[rows]) * best[rows, places, None]
            out.index_put_((rows,), found, accumulate=True)
        return out.view(shape), balance


class MixtureOfExperts(nn.Module):
    """Attention and experts by turns; what balances the experts is added to the loss."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))
        self.experts = nn.ModuleList(Experts(dense=dense) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, LENGTH) -> a loss."""
        x, loss = self.embedding(tokens), 0
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = x + attention(x, x, x)[0]
            found, balance = experts(x)
            x, loss = x + found, loss + 0.01 * balance
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + loss


# --- tables, graphs, pairs --------------------------------------------------------------------


class Recommender(nn.Module):
    """DLRM: several bags of embeddings, products of all pairs, two networks."""

    def __init__(self, *, sparse_features: int = 4) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(500 + 300 * n, 16, mode="sum") for n in range(sparse_features))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(True), nn.Linear(128, 16), nn.ReLU(True))
        pairs = (sparse_features + 1) * sparse_features // 2
        self.top = nn.Sequential(
            nn.Linear(16 + pairs, 256), nn.ReLU(True), nn.Linear(256, 128), nn.ReLU(True), nn.Linear(128, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(sparse_features + 1, sparse_features + 1, -1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        """(batch, 13), (batch, features, 5), (batch,) -> a loss."""
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(sparse[:, n]) for n, bag in enumerate(self.bags))], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([x, products], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


class GraphLayer(nn.Module):
    """Messages over edges, added up at their ends."""

    def __init__(self, *, scatters: bool) -> None:
        super().__init__()
        self.scatters = scatters
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.update = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(torch.cat([x[source], x[target]], 1))
        zeros = torch.zeros_like(x)
        if self.scatters:
            total = zeros.scatter_reduce(0, target[:, None].expand_as(messages), messages, "mean", include_self=False)
        else:
            total = zeros.index_add_(0, target, messages)
        return self.update(total, x)


class GraphNetwork(nn.Module):
    """Layers of messages; nodes are pooled by graph."""

    def __init__(self, *, scatters: bool) -> None:
        super().__init__()
        self.nodes = nn.Linear(9, WIDTH)
        self.layers = nn.ModuleList(GraphLayer(scatters=scatters) for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor, wanted: Tensor) -> Tensor:
        """(8 batch, 9), (2, 24 batch), (batch,) -> a loss."""
        x = self.nodes(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        graph = torch.arange(x.shape[0], device=x.device) // 8
        pooled = x.new_zeros(wanted.shape[0], WIDTH).index_add(0, graph, x)
        return F.mse_loss(self.out(pooled).squeeze(1), wanted)


class TwoTowers(nn.Module):
    """Text and vectors, compared by their cosines at a learned temperature."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.text = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.other = nn.Sequential(
            *(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()))
        )
        self.project = nn.ModuleDict({name: nn.Linear(WIDTH, 32, bias=False) for name in ("text", "other")})
        self.logit_scale = nn.Parameter(torch.tensor(2.6))
        if frozen:
            self.text.requires_grad_(False)
            self.embedding.requires_grad_(False)

    def forward(self, tokens: Tensor, other: Tensor) -> dict[str, Tensor]:
        """(batch, LENGTH), (batch, WIDTH) -> a loss among others."""
        text = F.normalize(self.project["text"](self.text(self.embedding(tokens)).mean(1)), dim=-1)
        seen = F.normalize(self.project["other"](self.other(other)), dim=-1)
        logits = self.logit_scale.exp() * text @ seen.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        return {"loss": loss, "logits_per_text": logits, "text_embeds": text}


# --- containers -------------------------------------------------------------------------------


class Losses(NamedTuple):
    """What a model of several tasks returns."""

    loss: Tensor
    details: dict[str, Tensor]


class Containers(nn.Module):
    """Parameters in lists and dictionaries, modules in lists in dictionaries, two levels of own parameters."""

    class Stage(nn.Module):
        """A scale of its own around layers, of which each has a bias around a product."""

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bias, self.inner = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return F.gelu(self.inner(x) + self.bias)

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16, WIDTH))
            self.layers = nn.ModuleDict({"a": self.Layer(), "b": self.Layer()})

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale[: x.shape[1]]
            for layer in self.layers.values():
                y = layer(y)
            return x + y * self.scale[: x.shape[1]]

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.stages = nn.ModuleList(self.Stage() for _ in range(3))
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(3))
        self.tables = nn.ParameterDict({"in": torch.randn(WIDTH, WIDTH) / 8, "out": torch.randn(WIDTH, WIDTH) / 8})
        self.heads = nn.ModuleDict(
            {"class": nn.ModuleList([nn.Linear(WIDTH, 7)]), "value": nn.ModuleList([nn.Linear(WIDTH, 1)])}
        )
        self.register_buffer("counts", torch.zeros(300, dtype=torch.int64))
        self.register_buffer("factors", torch.ones(WIDTH, dtype=torch.bfloat16))
        if frozen:
            self.stages[:2].requires_grad_(False)
            self.tables.requires_grad_(False)

    def forward(self, x: Tensor, classes: Tensor) -> Losses:
        """(batch, LENGTH, 16), (batch,) -> losses of two tasks."""
        x = self.first(x) @ self.tables["in"]
        self.counts += 1
        for stage, scale in zip(self.stages, self.scales, strict=True):
            x = stage(x) * scale * self.factors
        x = (x @ self.tables["out"]).mean(1)
        classified = F.cross_entropy(self.heads["class"][0](x), classes)
        value = self.heads["value"][0](x).square().mean()
        return Losses(classified + 0.1 * value, {"class": classified, "value": value})


def tokens(batch: int) -> Tensor:
    """Return (batch, LENGTH) tokens."""
    return torch.randint(1, TOKENS, (batch, LENGTH))


def graph(batch: int) -> tuple[Tensor, ...]:
    """Return nodes, edges and what is wanted of a batch of graphs."""
    return torch.randn(8 * batch, 9), torch.randint(8 * batch, (2, 24 * batch)), torch.randn(batch)


def clicks(batch: int) -> tuple[Tensor, ...]:
    """Return what the recommender gets."""
    return torch.randn(batch, 13), torch.randint(500, (batch, 4, 5)), torch.rand(batch)


def one(batch: int) -> tuple[Tensor, ...]:
    """Return tokens alone."""
    return (tokens(batch),)


def two(batch: int) -> tuple[Tensor, ...]:
    """Return tokens twice."""
    return tokens(batch), tokens(batch)


def vectors(batch: int) -> tuple[Tensor, ...]:
    """Return vectors alone."""
    return (torch.randn(batch, LENGTH, 16),)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "seq2seq": (Seq2Seq, two),
    "LSTM": (lambda: Recurrent(nn.LSTM), one),
    "LSTM, both ways": (lambda: Recurrent(nn.LSTM, bidirectional=True, dropout=0.1), one),
    "LSTM, projected": (lambda: Recurrent(nn.LSTM, proj_size=32), one),
    "GRU": (lambda: Recurrent(nn.GRU), one),
    "RNN": (lambda: Recurrent(nn.RNN), one),
    "MultiheadAttention, masks": (Masked, one),
    "Transformer, masks": (lambda: Translator(dropout=0.0), two),
    "Transformer, dropout, norm first": (lambda: Translator(norm_first=True, activation="gelu"), two),
    "Perceiver": (lambda: Perceiver(weight_shared=False), lambda b: (torch.randn(b, 4 * LENGTH, 8),)),
    "Perceiver, one block": (lambda: Perceiver(weight_shared=True), lambda b: (torch.randn(b, 4 * LENGTH, 8),)),
    "ALBERT": (Albert, one),
    "own functions": (OwnFunctions, vectors),
    "own checkpoints": (lambda: Checkpointed(reentrant=False), one),
    "own checkpoints, reentrant": (lambda: Checkpointed(reentrant=True), one),
    "experts, index_put": (lambda: MixtureOfExperts(dense=False), one),
    "experts, dense": (lambda: MixtureOfExperts(dense=True), one),
    "recommender": (Recommender, clicks),
    "graph, index_add": (lambda: GraphNetwork(scatters=False), graph),
    "graph, scatter": (lambda: GraphNetwork(scatters=True), graph),
    "two towers": (lambda: TwoTowers(frozen=False), lambda b: (tokens(b), torch.randn(b, WIDTH))),
    "two towers, one frozen": (lambda: TwoTowers(frozen=True), lambda b: (tokens(b), torch.randn(b, WIDTH))),
    "containers": (lambda: Containers(frozen=False), lambda b: (*vectors(b), torch.randint(7, (b,)))),
    "containers, frozen": (lambda: Containers(frozen=True), lambda b: (*vectors(b), torch.randint(7, (b,)))),
}
