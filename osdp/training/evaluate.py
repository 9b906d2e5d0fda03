"""How well the addition task was learned: greedy answers to sums that were held out of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from osdp.training.events import Accuracy
from osdp.training.group import Ranks
from osdp.training.tasks import Addition

TEST_SUMS = 256
"""Sums that are asked."""


@torch.no_grad()
def addition_accuracy(model: nn.Module, task: Addition, ranks: Ranks, batch: int, count: int = TEST_SUMS) -> Accuracy:
    """Return how many held-out sums the model gets right, all digits of them. A collective call.

    Each rank answers its share, and all run forward equally often.
    """
    share = -(-count // ranks.world_size)
    sums = torch.from_numpy(task.held_out(share * ranks.world_size))[ranks.rank :: ranks.world_size]
    was_training = model.training
    model.eval()
    right = 0
    for asked in torch.split(sums.to(ranks.device), batch):
        answered = _continue(model, asked[:, : 2 * task.digits], task.digits + 1)
        right += int((answered == asked).all(dim=1).sum())
    model.train(was_training)
    return Accuracy(*ranks.total([right, share]))


def _continue(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """Append the `count` likeliest tokens one by one; (batch, sequence) -> (batch, sequence + count)."""
    for _ in range(count):
        output: Any = model(tokens)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens
