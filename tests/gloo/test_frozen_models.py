"""Frozen models on ranks: forwards equal to one process, nothing left gathered, gradients through to the input."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from toys import Blocks, loss_of, plan_of, seeded

PLANS = {
    "shard": ("shard", {}),
    "replicate": ("replicate", {}),
    "mixture": (
        "shard",
        {"blocks.0.norm": "replicate", "blocks.0.up": "replicate", "blocks.1.up": "owner", "head": "shard_grad"},
    ),
}


def teacher() -> nn.Module:
    """Return a frozen model with buffers, which returns its loss and what the loss is of."""
    return Blocks("tuple").requires_grad_(False).eval()


def run_forwards(rank: int, name: str) -> None:
    """Forwards with and without grad mode, twice each, and a backward to the input of the model."""
    from osdp import OSDP

    reference = seeded(teacher)
    default, changes = PLANS[name]
    model = OSDP(seeded(teacher, seed=3 + rank), plan_of(reference, default, changes, ranks=(1, 2)))
    resting = {key: value.shape for key, value in model.named_parameters()}
    for step, grad_mode in enumerate((False, True, True, False)):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(2, 5, 6)
        with torch.set_grad_enabled(grad_mode):
            loss, (y,) = model(x)
        wanted_loss, (wanted,) = reference(x)
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(loss, wanted_loss)
        assert not y.requires_grad
        assert {key: value.shape for key, value in model.module.named_parameters()} == resting  # not one gathered
    torch.testing.assert_close(gradient_of_input(model, rank), gradient_of_input(reference, rank))
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):  # as PyTorch has it
        loss_of(model(torch.randn(2, 5, 6))).backward()


def gradient_of_input(model: nn.Module, rank: int) -> Tensor:
    """Return the gradient of the loss with respect to the input, as a perceptual loss needs it."""
    torch.manual_seed(rank)
    x = torch.randn(2, 5, 6, requires_grad=True)
    loss_of(model(x)).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("name", PLANS)
def test_forwards_of_a_frozen_model(name: str) -> None:
    run_ranks(run_forwards, 2, name)
