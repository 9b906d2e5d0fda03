"""Kinds of models of images, scenes, tables and graphs that are made of several ideas, small."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH, SIDE, CLASSES = 64, 16, 10


class Diffusion(nn.Module):
    """A U-Net of residual blocks with attention, modulated by an embedding of time; skips are concatenated."""

    class Residual(nn.Module):
        def __init__(self, inputs: int, outputs: int, *, attends: bool) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
            self.time = nn.Linear(WIDTH, 2 * outputs)
            self.norm_too, self.conv_too = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
            self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
            self.attention = nn.MultiheadAttention(outputs, 4, batch_first=True) if attends else None

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
            y = self.norm_too(self.conv(F.silu(self.norm(x)))) * (1 + scale) + shift
            y = self.skip(x) + self.conv_too(F.silu(y))
            if self.attention is None:
                return y
            flat = y.flatten(2).transpose(1, 2)
            return y + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(y)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        one = self.Residual
        self.down = nn.ModuleList([one(32, 32, attends=False), one(32, 64, attends=True)])
        self.middle = one(64, 64, attends=True)
        self.up = nn.ModuleList([one(128, 32, attends=True), one(64, 32, attends=False)])
        self.last = nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1))
        self.register_buffer("alphas", torch.linspace(0.999, 0.01, 100).sqrt())

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE), (batch,) -> scalar."""
        noise = torch.randn_like(images)
        alpha = self.alphas[steps][:, None, None, None]
        x = self.first(alpha * images + (1 - alpha**2).sqrt() * noise)
        angles = steps[:, None] * torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2, device=steps.device) / WIDTH)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype))
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1), time)
        return F.mse_loss(self.last(x), noise)


class Crosses(nn.Module):
    """DLRM with a cross network: tables, features, products of pairs, and layers that multiply by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2000, 16) for _ in range(8))
        self.dense = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16))
        self.crosses = nn.ModuleList(nn.Linear(144, 144) for _ in range(3))
        self.top = nn.Sequential(nn.Linear(144 + 36, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        """(batch, 13), (batch, 8), (batch,) -> scalar."""
        found = [self.dense(dense), *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        each = torch.stack(found, dim=1)
        first = x = each.flatten(1)
        for cross in self.crosses:
            x = first * cross(x) + x
        pairs = torch.bmm(each, each.transpose(1, 2))
        i, j = torch.tril_indices(9, 9, -1, device=pairs.device)
        logits = self.top(torch.cat([x, pairs[:, i, j]], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


class Radiance(nn.Module):
    """NeRF: encoded points along rays, a network with a skip, colours added up by their opacity."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(6))
        self.layers = nn.ModuleList(nn.Linear((36 + 3) if i == 0 else 167 if i == 3 else 128, 128) for i in range(6))
        self.density, self.colour = (
            nn.Linear(128, 1),
            nn.Sequential(nn.Linear(128 + 3, 64), nn.ReLU(), nn.Linear(64, 3)),
        )

    def forward(self, origins: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
        """(batch, 8, 3) each -> scalar."""
        depths = torch.linspace(1, 4, 16, device=origins.device, dtype=origins.dtype)
        points = origins.unsqueeze(-2) + depths[:, None] * directions.unsqueeze(-2)
        angles = (points.unsqueeze(-1) * self.frequencies).flatten(-2).to(points.dtype)
        encoded = x = torch.cat([points, angles.sin(), angles.cos()], dim=-1)
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(torch.cat([encoded, x], dim=-1) if i == 3 else x))
        opacity = 1 - torch.exp(-F.relu(self.density(x).squeeze(-1)))
        seen = torch.cumprod(1 - opacity + 1e-10, dim=-1)
        facing = directions.unsqueeze(-2).expand_as(points)
        found = (opacity * seen).unsqueeze(-1) * self.colour(torch.cat([x, facing], dim=-1)).sigmoid()
        return F.mse_loss(found.sum(-2), colours)


class GraphAttention(nn.Module):
    """Attention over the edges of a graph, normalised where they end."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(WIDTH, WIDTH, bias=False)
            self.source, self.target = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(4, 16))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            start, end = edges
            h = self.into(x).view(-1, 4, 16)
            scores = (h * self.source).sum(-1)[start] + (h * self.target).sum(-1)[end]
            scores = F.leaky_relu(scores, 0.2).exp()
            total = torch.zeros(len(x), 4, dtype=scores.dtype, device=x.device).index_add(0, end, scores)
            weighed = h[start] * (scores / (total[end] + 1e-9)).unsqueeze(-1)
            return F.elu(torch.zeros_like(h).index_add(0, end, weighed).flatten(1)) + x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(9, WIDTH), nn.ModuleList(self.Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, nodes: Tensor, edges: Tensor, classes: Tensor) -> Tensor:
        """(nodes, 9), (2, edges), (nodes,) -> scalar."""
        x = self.first(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return F.cross_entropy(self.head(x), classes)


class Hypernetwork(nn.Module):
    """A network makes the weights of layers from what each layer is and what the sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(3, 16))
        self.makes = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32 * 32 + 32))
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """(batch, 16), (batch,) -> scalar."""
        y = self.first(x)
        for code in self.codes:
            weight, bias = self.makes(code * x).split([32 * 32, 32], dim=-1)
            y = y + torch.tanh(torch.baddbmm(bias.unsqueeze(1), y.unsqueeze(1), weight.view(-1, 32, 32))).squeeze(1)
        return F.cross_entropy(self.last(y), classes)


class Inception(nn.Module):
    """GoogLeNet: branches that are concatenated, and heads on the way that count in the loss."""

    class Branches(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()

            def conv(i: int, o: int, k: int) -> nn.Sequential:
                return nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))

            self.one, self.three = conv(inputs, 16, 1), nn.Sequential(conv(inputs, 16, 1), conv(16, 24, 3))
            self.five, self.pool = nn.Sequential(conv(inputs, 8, 1), conv(8, 16, 5)), conv(inputs, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(F.max_pool2d(x, 3, 1, 1))], dim=1)

    def __init__(self, *, every: bool = False) -> None:
        """`every` block has a head of its own: deep supervision."""
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(self.Branches(64) for _ in range(4))
        places = range(4) if every else (1, 3)
        self.heads = nn.ModuleDict({str(i): nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)) for i in places})

    def forward(self, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """(batch, 3, SIDE, SIDE), (batch,) -> loss and logits."""
        x, found = self.stem(images), []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if str(i) in self.heads:
                found.append(self.heads[str(i)](F.adaptive_avg_pool2d(x, 1)))
        losses = [F.cross_entropy(logits, classes, label_smoothing=0.1) for logits in found]
        return {"loss": losses[-1] + 0.3 * torch.stack(losses).sum(), "logits": found[-1]}


class Adversaries(nn.Module):
    """A generator and a critic, one step of both: what was made is judged twice, once without its past."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(32, 128 * 16), nn.Unflatten(1, (128, 4, 4)), nn.BatchNorm2d(128), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()),
        )
        self.critic = nn.Sequential(
            *(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)),
            *(nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(128 * 16, 1)),
        )

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE), (batch, 32) -> scalar."""
        made = self.generator(noise)
        true, false = self.critic(images), self.critic(made.detach())
        return F.softplus(-true).mean() + F.softplus(false).mean() + F.softplus(-self.critic(made)).mean()


class Codebook(nn.Module):
    """Nearest of some vectors, which are buffers that follow averages of what came near them; gradients pass by."""

    def __init__(self, size: int = 128, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.randn(size, width))
        self.register_buffer("counts", torch.ones(size))
        self.register_buffer("sums", torch.randn(size, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        chosen = torch.cdist(flat.float(), self.vectors.float()).argmin(-1)
        found = F.embedding(chosen, self.vectors).view_as(x)
        if self.training:
            with torch.no_grad():
                near = F.one_hot(chosen, len(self.vectors)).to(self.sums.dtype)
                self.counts.mul_(0.99).add_(near.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(near.t() @ flat.to(near.dtype), alpha=0.01)
                self.vectors.copy_(self.sums / self.counts.unsqueeze(1))
        commitment = (x - found.detach()).square().mean()
        return x + (found - x).detach(), commitment


class Quantised(nn.Module):
    """VQ-VAE with a codebook of moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 32, 1)
        )
        self.codebook = Codebook()
        self.decoder = nn.Sequential(
            nn.Conv2d(32, 64, 3, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 64, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 3, 4, 2, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE) -> scalar."""
        z = self.encoder(images)
        q, commitment = self.codebook(z.flatten(2).transpose(1, 2))
        return F.mse_loss(self.decoder(q.transpose(1, 2).reshape(z.shape)), images) + 0.25 * commitment


def images(batch: int) -> Tensor:
    """Return (batch, 3, SIDE, SIDE)."""
    return torch.randn(batch, 3, SIDE, SIDE)


def classes(batch: int, of: int = CLASSES) -> Tensor:
    """Return (batch,) classes."""
    return torch.randint(of, (batch,))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "diffusion U-Net": (Diffusion, lambda b: (images(b), classes(b, 100))),
    "DLRM, crosses": (Crosses, lambda b: (torch.randn(b, 13), torch.randint(2000, (b, 8)), torch.rand(b))),
    "NeRF": (Radiance, lambda b: (torch.randn(b, 8, 3), torch.randn(b, 8, 3), torch.rand(b, 8, 3))),
    "graph attention": (
        GraphAttention,
        lambda b: (torch.randn(8 * b, 9), torch.randint(8 * b, (2, 24 * b)), torch.randint(5, (8 * b,))),
    ),
    "hypernetwork": (Hypernetwork, lambda b: (torch.randn(b, 16), classes(b))),
    "GoogLeNet": (Inception, lambda b: (images(b), classes(b))),
    "deep supervision": (lambda: Inception(every=True), lambda b: (images(b), classes(b))),
    "generator and critic": (Adversaries, lambda b: (images(b), torch.randn(b, 32))),
    "VQ-VAE": (Quantised, lambda b: (images(b),)),
}
