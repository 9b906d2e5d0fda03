"""Models that run collectives themselves, as contrastive losses, centred teachers and experts on ranks do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

WIDTH, FEATURES = 32, 24


class GatherWithGradient(torch.autograd.Function):
    """As SimCLR's programs write it: what every rank has, whose gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        """(batch, FEATURES) -> a tensor of each rank."""
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the sum over ranks of this rank's part."""
        every = torch.stack(gradients)
        dist.all_reduce(every)
        return every[dist.get_rank()]


def ranks() -> int:
    """Return how many ranks there are, as programs that run alone as well ask."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_with_gradient(x: Tensor) -> Tensor:
    return torch.cat(GatherWithGradient.apply(x))  # type: ignore[no-untyped-call]


def gather_differentiably(x: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_gather  # deprecated, and what most programs have

    return torch.cat(all_gather(x)) if ranks() > 1 else x  # type: ignore[no-untyped-call]


def gather_detached(x: Tensor) -> Tensor:
    """As MoCo's programs have it: others' features without gradients, and one's own with."""
    parts = [torch.empty_like(x) for _ in range(ranks())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def gather_into_tensor(x: Tensor) -> Tensor:
    every = x.new_empty(len(x) * ranks(), x.shape[1])
    dist.all_gather_into_tensor(every, x.detach())
    return every


def gather_functionally(x: Tensor) -> Tensor:
    return functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def gather_lengths(x: Tensor) -> Tensor:
    """Of another number of rows on each rank: lengths are told first, and rows are filled up to the longest."""
    length = torch.tensor(len(x))
    lengths = [torch.zeros_like(length) for _ in range(ranks())]
    dist.all_gather(lengths, length)
    longest = max(int(one) for one in lengths)
    padded = nn.functional.pad(x, (0, 0, 0, longest - len(x)))
    parts = GatherWithGradient.apply(padded)  # type: ignore[no-untyped-call]
    return torch.cat([part[: int(one)] for part, one in zip(parts, lengths, strict=True)])


def summed(x: Tensor) -> Tensor:
    """A mean over the samples of all ranks, which is taken off."""
    total = x.detach().sum(0)
    dist.all_reduce(total, async_op=True).wait()
    return x - total / (len(x) * ranks())


def broadcast(x: Tensor) -> Tensor:
    chosen = x.detach()[:1].clone()
    dist.broadcast(chosen, 0)
    return x * chosen


def sent_to_experts(x: Tensor) -> Tensor:
    """Each rank gets as many rows of every rank, as where experts lie on ranks; of how many is told first."""
    rows = torch.full((ranks(),), len(x) // ranks())
    theirs = torch.empty_like(rows)
    dist.all_to_all_single(theirs, rows)
    got = x.new_empty(int(theirs.sum()), x.shape[1])
    dist.all_to_all_single(got, x.detach()[: int(rows.sum())].contiguous(), theirs.tolist(), rows.tolist())
    return torch.cat([x, got.tanh()])


EXCHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    one.__name__: one
    for one in (
        gather_with_gradient,
        gather_differentiably,
        gather_detached,
        gather_into_tensor,
        gather_functionally,
        gather_lengths,
        summed,
        broadcast,
        sent_to_experts,
    )
}


class Compared(nn.Module):
    """Blocks, features, and a loss that compares each sample with all that `exchange` returns.

    `place`: `loss`, or `block`, where each block attends to what it gets.
    """

    is_traced_by_each_rank = True

    def __init__(self, exchange: str, place: str = "loss", blocks: int = 3, wide: int = 64) -> None:
        super().__init__()
        self.exchange, self.place = EXCHANGES[exchange], place
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(blocks)
        )
        self.attention = nn.ModuleList(Attention(exchange) for _ in range(blocks if place == "block" else 0))
        self.head = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if self.place == "block":
                x = self.attention[number](x)
        x = nn.functional.normalize(self.head(x), dim=-1)
        loss: Tensor = torch.logsumexp(x @ (self.exchange(x) if self.place == "loss" else x).T, 1).mean()
        return loss

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, WIDTH),)


class Attention(nn.Module):
    """Attends from each sample to what an exchange returns."""

    def __init__(self, exchange: str) -> None:
        super().__init__()
        self.exchange, self.project = EXCHANGES[exchange], nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> the same."""
        own = self.project(x)
        others = self.exchange(own)
        attended: Tensor = torch.softmax(own @ others.T, -1) @ others
        return x + attended


class ExpertsOnRanks(nn.Module):
    """Experts of which each rank runs one, on rows of all ranks."""

    is_traced_by_each_rank = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ranks()))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        x = self.first(x)
        sent = torch.empty_like(x)
        dist.all_to_all_single(sent, x.detach())
        mixed: Tensor = self.head(x + self.experts[dist.get_rank()](sent)).square().mean()
        return mixed

    def example_inputs(self, batch: int) -> tuple[Tensor]:
        """Return the argument of forward."""
        return (torch.randn(batch, WIDTH),)


def contrastive() -> nn.Module:
    """Return a model for the command line."""
    return Compared("gather_with_gradient")
