"""Small models of images as people write them, with forwards that return a loss, outputs beside it, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SIDE, WIDTH, CLASSES = 16, 64, 10


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions with group norms and activations in place."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Skip connections from the way down to the way up; `upsample` in place of transposed convolutions."""

    def __init__(self, *, upsample: bool, channels: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.downs = nn.ModuleList(double_convolution(a, b) for a, b in zip((3, *channels), channels, strict=False))
        self.middle = double_convolution(channels[-1], channels[-1])
        pairs = [*zip(channels[::-1], (*channels[-2::-1], channels[0]), strict=True)]
        self.grow = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(a, a, 1)) if upsample
            else nn.ConvTranspose2d(a, a, 2, stride=2)
            for a, _ in pairs
        )  # fmt: skip
        self.ups = nn.ModuleList(double_convolution(2 * a, b) for a, b in pairs)
        self.head = nn.Conv2d(channels[0], 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE) -> a loss."""
        x, skips = images, []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, up in zip(self.grow, self.ups, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], 1))
        return F.l1_loss(self.head(x), images)


class Residual(nn.Module):
    """A block of ResNet, with batch norm and ReLU in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += identity
        return self.relu(x)


class ResNet(nn.Module):
    """As torchvision has it: a stem, layers of residual blocks, and a head; returns logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
        self.layer1 = nn.Sequential(Residual(32, 32, 1), Residual(32, 32, 1))
        self.layer2 = nn.Sequential(Residual(32, 64, 2), Residual(64, 64, 1))
        self.layer3 = nn.Sequential(Residual(64, 128, 2), Residual(128, 128, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(128, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE) -> (batch, CLASSES)."""
        x = self.layer3(self.layer2(self.layer1(self.stem(images))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, layer norm of channels last, and a scale of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(1e-1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.down(F.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Stages of blocks in nested sequentials, with labels given."""

    def __init__(self) -> None:
        super().__init__()
        widths = (48, 96)
        self.stem = nn.Conv2d(3, widths[0], 2, 2)
        self.stages = nn.Sequential(
            nn.Sequential(*(ConvNeXtBlock(widths[0]) for _ in range(2))),
            nn.Sequential(nn.GroupNorm(1, widths[0]), nn.Conv2d(widths[0], widths[1], 2, 2)),
            nn.Sequential(*(ConvNeXtBlock(widths[1]) for _ in range(3))),
        )
        self.head = nn.Linear(widths[1], CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """(batch, 3, SIDE, SIDE), (batch,) -> loss and logits."""
        logits = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


class InvertedResidual(nn.Module):
    """A block of MobileNet with squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.Hardswish(inplace=True),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU6(inplace=True),
        )
        self.squeeze = nn.Sequential(nn.Conv2d(4 * width, width, 1), nn.ReLU(True), nn.Conv2d(width, 4 * width, 1))
        self.project = nn.Sequential(nn.Conv2d(4 * width, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        return x + self.project(y)


class MobileNet(nn.Module):
    """Inverted residuals and a classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.Hardswish(True), *(InvertedResidual(48) for _ in range(3))
        )
        self.classifier = nn.Sequential(
            nn.Linear(48, 256), nn.Hardswish(True), nn.Dropout(0.2, True), nn.Linear(256, CLASSES)
        )

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 3, SIDE, SIDE), (batch,) -> loss and logits."""
        logits = self.classifier(self.features(images).mean([2, 3]))
        return F.cross_entropy(logits, labels), logits


class Discriminator(nn.Module):
    """Spectral norms, instance norms and leaky activations; of true and made images one after the other."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.spectral_norm
        self.main = nn.Sequential(
            norm(nn.Conv2d(3, 48, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True),
            norm(nn.Conv2d(48, 96, 4, 2, 1)), nn.InstanceNorm2d(96, affine=True), nn.LeakyReLU(0.2, inplace=True),
            norm(nn.Conv2d(96, 192, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(192, 1, 2),
        )  # fmt: skip

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE) twice -> a hinge loss."""
        return F.relu(1 - self.main(real)).mean() + F.relu(1 + self.main(fake.detach())).mean()


class Generator(nn.Module):
    """Transposed convolutions up from a vector, a frozen critic behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128 * 4)
        self.main = nn.Sequential(
            nn.ConvTranspose2d(128, 96, 4, 2, 1), nn.BatchNorm2d(96), nn.ReLU(True),
            nn.ConvTranspose2d(96, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(True),
            nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 64, 4, 2, 1), nn.Flatten(), nn.Linear(1024, 1)
        )
        self.critic.requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        """(batch, 32) -> a loss."""
        image = self.main(self.first(noise).view(-1, 128, 2, 2))
        return F.softplus(-self.critic(image)).mean()


@dataclass
class Reconstruction:
    """What the autoencoder returns."""

    loss: Tensor
    image: Tensor
    mu: Tensor


class VAE(nn.Module):
    """Reparametrisation, and the Kullback-Leibler divergence beside the error of the image."""

    def __init__(self, *, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.SiLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.SiLU(), nn.Flatten()
        )
        self.fc_mu, self.fc_logvar = nn.Linear(1024, 64), nn.Linear(1024, 64)
        self.fc = nn.Linear(64, 1024)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, images: Tensor) -> Any:
        """(batch, 3, SIDE, SIDE) -> a loss and what it is of."""
        hidden = self.encoder(images)
        mu, logvar = self.fc_mu(hidden), self.fc_logvar(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        image = self.decoder(self.fc(z).view(-1, 64, 4, 4))
        error = F.mse_loss(image, images, reduction="sum") / images.shape[0]
        divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / images.shape[0]
        if self.returns == "dataclass":
            return Reconstruction(error + divergence, image, mu)
        return error + divergence, {"image": image, "mu": mu, "logvar": logvar}


class MixerBlock(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.blocks = nn.Sequential(*(MixerBlock(64, WIDTH) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE), (batch,) -> a loss."""
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class Fused(nn.Module):
    """Blocks over patches, and after them features, whose first layer is larger than all else and gets no gradient."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(4, 32) for _ in range(2)))
        self.wide, self.narrow, self.head = nn.Linear(features, 256), nn.Linear(256, 32), nn.Linear(32, CLASSES)

    def forward(self, images: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE), (batch, features), (batch,) -> a loss."""
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1)
        return F.cross_entropy(self.head(x + self.narrow(F.gelu(self.wide(features)))), labels)


class Attention(nn.Module):
    """One product for queries, keys and values."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class EncoderBlock(nn.Module):
    """Attention and a network, before each a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Class token and positions are the root's own; the loss is outside the model."""

    def __init__(self, *, registers: int = 0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.registers = nn.Parameter(torch.zeros(1, registers, WIDTH)) if registers else None
        self.positions = nn.Parameter(0.02 * torch.randn(1, 65, WIDTH))
        self.blocks = nn.ModuleList(EncoderBlock(WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE) -> (batch, CLASSES)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        if self.registers is not None:
            x = torch.cat([x, self.registers.expand(x.shape[0], -1, -1)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class DiTBlock(nn.Module):
    """Modulated by six vectors: made of a condition that all blocks get, or handed to all blocks."""

    def __init__(self, width: int, *, shared: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = None if shared else nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.table = nn.Parameter(torch.randn(6, width) / width**0.5) if shared else None

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        if self.modulation is not None:
            parts = self.modulation(condition)[:, None].chunk(6, -1)
        else:
            parts = (self.table[None] + condition.view(x.shape[0], 6, -1)).chunk(6, 1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Denoises patches, given a time; positions are a buffer."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.register_buffer("positions", torch.randn(1, 64, WIDTH))
        self.register_buffer("frequencies", torch.exp(-torch.arange(16, dtype=torch.float64)), persistent=False)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH)) if shared else None
        self.blocks = nn.ModuleList(DiTBlock(WIDTH, shared=shared) for _ in range(3))
        self.final = nn.Linear(WIDTH, 12)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE), (batch,) -> a loss."""
        noise = torch.randn_like(images)
        angle = time[:, None].double() * self.frequencies
        condition = self.time(torch.cat([angle.cos(), angle.sin()], 1).float())
        if self.modulation is not None:
            condition = self.modulation(condition)
        x = self.patches(images + noise).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        found = F.pixel_shuffle(self.final(x).transpose(1, 2).reshape(-1, 12, 8, 8), 2)
        return (found - noise).square().mean()


def images(batch: int) -> Tensor:
    """Return (batch, 3, SIDE, SIDE)."""
    return torch.randn(batch, 3, SIDE, SIDE)


def labels(batch: int) -> Tensor:
    """Return (batch,) classes."""
    return torch.randint(CLASSES, (batch,))


class Siamese(nn.Module):
    """One encoder with batch norm for an anchor, a like and an unlike image."""

    class Block(nn.Module):
        """A convolution and what follows it."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.convolution(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Siamese.Block(3), *(Siamese.Block(32) for _ in range(3))])
        self.head = nn.Linear(32, 64)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> Tensor:
        near, far = ((self.encode(anchor) - self.encode(x)).pow(2).sum(1) for x in (like, unlike))
        return torch.relu(near - far + 1).mean()


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "U-Net, transposed": (lambda: UNet(upsample=False), lambda b: (images(b),)),
    "U-Net, upsampled": (lambda: UNet(upsample=True), lambda b: (images(b),)),
    "ResNet": (ResNet, lambda b: (images(b),)),
    "ConvNeXt": (ConvNeXt, lambda b: (images(b), labels(b))),
    "MobileNet": (MobileNet, lambda b: (images(b), labels(b))),
    "discriminator": (Discriminator, lambda b: (images(b), images(b))),
    "generator": (Generator, lambda b: (torch.randn(b, 32),)),
    "VAE, dataclass": (lambda: VAE(returns="dataclass"), lambda b: (images(b),)),
    "fused": (lambda: Fused(2048), lambda b: (images(b), torch.randn(b, 2048), labels(b))),
    "VAE, tuple": (lambda: VAE(returns="tuple"), lambda b: (images(b),)),
    "Mixer": (Mixer, lambda b: (images(b), labels(b))),
    "Siamese": (Siamese, lambda b: (images(b), images(b), images(b))),
    "ViT": (ViT, lambda b: (images(b),)),
    "ViT, registers": (lambda: ViT(registers=7), lambda b: (images(b),)),
    "DiT": (lambda: DiT(shared=False), lambda b: (images(b), torch.rand(b))),
    "DiT, shared modulation": (lambda: DiT(shared=True), lambda b: (images(b), torch.rand(b))),
}
