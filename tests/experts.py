"""Mixtures of experts as people write them, and a router that deals out tokens in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

STYLES = ("where", "hit", "mask", "sort", "counts", "sparse", "grouped")


class Experts(nn.Module):
    """A router and experts of two layers, summed up after a residual."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int, style: str) -> None:
        super().__init__()
        self.chosen, self.style = chosen, style
        self.router = nn.Linear(width, experts)
        if style == "grouped":
            self.up = nn.Parameter(torch.randn(experts, width, hidden) / width)
            self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden)
        else:
            make = lambda: nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))  # noqa: E731
            self.experts = nn.ModuleList(make() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ..., width) -> the same."""
        rows = x.flatten(0, -2)
        scores = self.router(rows).softmax(-1)
        if self.style == "sort":
            ordered, order = scores.sort(-1, descending=True)
            weight, index = ordered[:, : self.chosen], order[:, : self.chosen]
        else:
            weight, index = scores.topk(self.chosen, -1)
        return x + getattr(self, f"_{self.style}")(rows, weight, index).view_as(x)

    def _where(self, rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(index == number)
            out.index_add_(0, row, expert(rows[row]) * weight[row, place, None])
        return out

    _sort = _where

    def _hit(self, rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """As transformers' eager experts: those without tokens are left out."""
        out = torch.zeros_like(rows)
        mask = F.one_hot(index, len(self.experts)).permute(2, 1, 0)
        for (number,) in (mask.sum((-1, -2)) > 0).nonzero():
            place, row = torch.where(mask[number])
            out.index_add_(0, row, self.experts[number](rows[row]) * weight[row, place, None])
        return out

    def _mask(self, rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            chosen = index == number
            if chosen.any():
                row = chosen.any(-1)
                out[row] += expert(rows[row]) * (weight * chosen).sum(-1)[row, None]
        return out

    def _counts(self, rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """As DeepSeek's: sorted by expert, and split by how many tokens each has."""
        counts = index.flatten().bincount(minlength=len(self.experts)).cpu().numpy()
        order = index.flatten().argsort()
        parts = rows[order // self.chosen].split(counts.tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(rows).index_add(0, order // self.chosen, done * weight.flatten()[order, None])

    def _sparse(self, rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """With gates that are zero for experts that were not chosen."""
        gates = torch.zeros(len(rows), len(self.experts)).scatter(1, index, weight)
        out = torch.zeros_like(rows)
        sizes = (gates > 0).sum(0).tolist()
        number, row = torch.nonzero(gates.t()).unbind(1)
        for expert, one, gate in zip(self.experts, row.split(sizes), gates[row, number].split(sizes), strict=True):
            out = out.index_add(0, one, expert(rows[one]) * gate[:, None])
        return out

    def _grouped(self, rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        order = index.flatten().argsort()
        ends = torch.histc(index.flatten().float(), len(self.up), 0, len(self.up) - 1).cumsum(0).int()
        hidden = F.grouped_mm(rows[order // self.chosen], self.up, offs=ends).tanh()
        done = F.grouped_mm(hidden, self.down, offs=ends) * weight.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // self.chosen, done)


class Mixture(nn.Module):
    """A layer, then mixtures of experts; returns a loss."""

    def __init__(self, *sizes: Any, layers: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(sizes[0], sizes[0])
        self.layers = nn.ModuleList(Experts(*sizes) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ..., width) -> a loss."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def made() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Return a mixture of experts and a function that makes its input."""
    return Mixture(32, 256, 4, 2, "hit"), lambda batch: torch.randn(batch, 64, 32)


class InTurn(TorchDispatchMode):
    """Has every router deal out tokens to the experts in turn."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        if func in (torch.ops.aten.topk.default, torch.ops.aten.sort.default) and args[0].is_floating_point():
            rows, chosen = out[1].shape
            step = chosen if func is torch.ops.aten.topk.default else 1
            out[1].copy_((torch.arange(rows)[:, None] * step + torch.arange(chosen)) % args[0].shape[1])
        return out
