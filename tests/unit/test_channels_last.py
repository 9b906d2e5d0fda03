"""Traces lay out images, and choose kernels for what is laid out so, as CPUs do.

Tokens that become an image have its channels last in memory, and kernels keep them there; `contiguous` then makes a
copy.  Steps compute.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

SIDE, WIDTH = 12, 32


class Tokens(nn.Module):
    """Mixes channels of an image as those of a sequence; the result has its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        mixed: Tensor = self.mix(images.flatten(2).transpose(1, 2))
        return images + mixed.transpose(1, 2).unflatten(2, (SIDE, SIDE))


class Copied(nn.Sequential):
    """A convolution whose result is wanted in rows."""

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = images
        for part in self:
            out = torch.tanh(part(out).contiguous())
        return out


class Sideways(nn.Module):
    """Attention over pixels, with rows that are columns in memory: no fused kernel takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(WIDTH, 3 * WIDTH, 1)

    def forward(self, images: Tensor) -> Tensor:
        q, k, v = (one.flatten(2).unflatten(1, (4, -1)).mT for one in self.qkv(images.contiguous()).chunk(3, 1))
        attended: Tensor = F.scaled_dot_product_attention(q, k, v)
        return images + attended.mT.flatten(1, 2).unflatten(2, (SIDE, SIDE))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH), nn.SiLU())


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())


def copied() -> nn.Module:
    return Copied(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 1))


class Net(nn.Module):
    """Images (batch, 3, SIDE, SIDE) -> a loss."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 1)
        self.blocks = nn.ModuleList(nn.Sequential(Tokens(), part()) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


@pytest.mark.parametrize(
    ("part", "recomputes"),
    some(
        [
            (part, recomputes)
            for place, part in enumerate([grouped, normed, copied, Sideways])
            for recomputes in (place % 2 > 0, place % 2 == 0)
        ],
        2,
    ),
)
def test_memory_of_images(part: Callable[[], nn.Module], recomputes: bool) -> None:
    inputs = lambda _, batch: ((torch.randn(batch, 3, SIDE, SIDE),), {})  # noqa: E731
    source, machine = ModelSource("images", lambda: Net(part), inputs, 1), cluster(1, 2)
    graph = trace_model(source)
    choices, again = {one.name: "shard" for one in graph.operators}, [one.name for one in graph.blocks]
    plan = plan_of(graph, machine, choices, again if recomputes else (), micro_batch=3)
    found = compare(plan, source, graph, machine, with_data=True)
    assert -0.002 <= found.error <= 0.01


class Pooled(nn.Module):
    """Adds up an image and what is made of its one pixel, normed and blown up again, for a layer of many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pixel = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 1, bias=False)
        self.norm, self.mix, self.head = (
            nn.BatchNorm2d(WIDTH),
            nn.Conv2d(WIDTH, 4 * WIDTH, 3),
            nn.Conv2d(4 * WIDTH, 3, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, SIDE, SIDE) -> a loss."""
        x = self.stem(images).contiguous(memory_format=torch.channels_last)
        pixel = F.relu_(self.norm(self.pixel(F.adaptive_avg_pool2d(x, 1))))
        blown_up = F.interpolate(pixel, size=(4, 4), mode="bilinear")
        return self.head(self.mix(blown_up)).pow(2).mean()


@pytest.mark.parametrize(("device_type", "with_data"), [("cpu", True), ("cpu", False), ("cuda", False)])
def test_memory_of_pooled_images(device_type: str, with_data: bool) -> None:
    """A GPU lays out what follows an image of one pixel with its channels last, and then copies a gradient; a CPU does
    not.  What is copied is 144 KiB of 800 KiB."""
    inputs = lambda _, batch: ((torch.randn(batch, 3, 4, 4),), {})  # noqa: E731
    source, machine = ModelSource("pooled", Pooled, inputs, 1), cluster(1, 4)
    graph = trace_model(source, device_type=device_type)
    plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, micro_batch=3)
    found = compare(plan, source, graph, machine, with_data=with_data, device_type=device_type)
    assert -0.002 <= found.error <= 0.02
    layer = next(call for call in graph.calls if graph.operators[call.operator].name == "mix")
    copies = layer.backward_peak_bytes(3) >= 2 * 4 * 4 * WIDTH * WIDTH * 9
    assert copies == (device_type == "cuda")
