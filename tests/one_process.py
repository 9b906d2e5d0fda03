"""What tests of frameworks compare with: six steps of plain PyTorch in one process, by hand, of all ranks' samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from toys import Blocks, plan_of, seeded

from planner.plan import Plan

RANKS = 2
BATCH = 2
ACCUMULATION = 2
STEPS = 6
HALF = STEPS // 2
"""Then the state is saved, and what goes on is another model that has loaded it."""
MAX_NORM = 0.3
MAX_VALUE = 0.01
"""Gradients are clipped by norm in the first half, and by value in the second; either changes something (checked)."""


def build(seed: int = 3) -> nn.Module:
    """Return the model that is trained: it maps a batch to a loss."""
    return seeded(lambda: Blocks(frozen=False), seed)


def plan(accumulation: int = ACCUMULATION) -> Plan:
    """Return a plan of several strategies: sharded and recomputed, replicated, of one owner, and split."""
    replicated = dict.fromkeys(("blocks.1.up", "blocks.1.norm"), "replicate")
    choices = {**replicated, "blocks.1.down": "split(shard, replicate)", "head": "owner"}
    return plan_of(build(), "shard", choices, accumulation=accumulation, recomputed=("blocks.0",), ranks=(1, RANKS))


def samples() -> Tensor:
    """Return those of half of the steps, which both halves see, and one batch of each rank for the evaluation."""
    draw = torch.Generator().manual_seed(11)
    return torch.randn((HALF * ACCUMULATION + 1) * RANKS * BATCH, 5, 6, generator=draw)


def batches() -> list[list[Tensor]]:
    """Return the micro-batches, of each a batch by rank, as samplers deal them that do not shuffle; the last is held
    out."""
    by_micro_batch = samples().view(-1, BATCH, RANKS, 5, 6)
    return [[one[:, rank] for rank in range(RANKS)] for one in by_micro_batch]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every run."""
    return torch.optim.AdamW(parameters, lr=2e-2, eps=1e-3, weight_decay=0.1)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule of every run, which steps with the optimizer."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@dataclass(frozen=True)
class Trained:
    """What a run went through."""

    losses: list[float]
    """Mean over ranks, of every micro-batch."""
    evaluated: list[float]
    """Loss of the batches held out, after each half."""
    parameters: dict[str, Tensor]
    """At the end."""
    moments: dict[str, Tensor]
    """Running means of squared gradients at the end."""


@cache
def reference() -> Trained:
    """Train in one process."""
    model = build()
    optimizer = optimizer_of(model.parameters())
    schedule, losses, evaluated = schedule_of(optimizer), [], []
    *trained, held_out = batches()
    for step in range(STEPS):
        for index in range(ACCUMULATION):
            by_rank = trained[(step * ACCUMULATION + index) % len(trained)]
            mean = torch.stack([model(batch) for batch in by_rank]).mean()
            (mean / ACCUMULATION).backward()
            losses.append(mean.item())
        if step < HALF:
            assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM
        else:
            assert max(float(one.grad.abs().max()) for one in model.parameters()) > MAX_VALUE
            nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step + 1 in (HALF, STEPS):
            with torch.no_grad():
                evaluated.append(torch.stack([model(batch) for batch in held_out]).mean().item())
    moments = {name: optimizer.state[one]["exp_avg_sq"] for name, one in model.named_parameters()}
    return Trained(losses, evaluated, {name: one.detach() for name, one in model.state_dict().items()}, moments)


def compare(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Assert that a run went as in one process, but for the last bits."""
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
