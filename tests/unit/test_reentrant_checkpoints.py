"""Reentrant checkpoints compute what they compute in PyTorch, though they run as others do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from profiler.reentrant_checkpoints import reentrant_as_others


class Part(nn.Module):
    """Counts its forwards, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.forwards = nn.Linear(4, 4), nn.Dropout(0.5), 0

    def forward(self, x: Tensor, add: Tensor | None = None, times: float = 1.0) -> Tensor:
        """(batch, 4) -> the same."""
        self.forwards += 1
        y: Tensor = times * torch.tanh(self.drop(self.linear(x)))
        return y if add is None else y + add


def several(part: Part, x: Tensor) -> tuple[Tensor, str, Tensor]:
    y = part(x)
    return y, "not a tensor", y.detach()


CASES: dict[str, Callable[[Part, Tensor], Tensor]] = {
    "module": lambda part, x: checkpoint(part, x, use_reentrant=True),
    "more arguments": lambda part, x: checkpoint(part, x, x + 1, 2.0, use_reentrant=True),
    "several results": lambda part, x: checkpoint(several, part, x, use_reentrant=True)[0],
    "other random numbers": lambda part, x: checkpoint(part.linear, x, use_reentrant=True, preserve_rng_state=False),
    "twice": lambda part, x: checkpoint(part, checkpoint(part, x, use_reentrant=True), use_reentrant=True),
    "nested": lambda part, x: checkpoint(
        lambda y: checkpoint(part, y, use_reentrant=True).sin(), x, use_reentrant=True
    ),
    "no gradient of arguments": lambda part, x: x + checkpoint(part, x.detach(), use_reentrant=True),
    "no gradient at all": lambda part, x: x + checkpoint(part, x.detach(), use_reentrant=True).detach(),
}


def as_in_pytorch() -> AbstractContextManager[object]:
    """Run them as PyTorch does, whatever this process has put in place."""
    return patch.object(CheckpointFunction, "apply", super(CheckpointFunction, CheckpointFunction).apply)


def trained(case: str, as_others: bool) -> list[Tensor | int | None]:
    """Return the result, the gradients and how often the part ran."""
    torch.manual_seed(1)
    part, x = Part(), torch.randn(3, 4, requires_grad=True)
    with reentrant_as_others() if as_others else as_in_pytorch():
        result = CASES[case](part, x)
        result.pow(2).sum().backward()
    return [result, x.grad, part.linear.weight.grad, part.linear.bias.grad, part.forwards]


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("case", CASES)
def test_they_compute_the_same(case: str) -> None:
    for one, other in zip(trained(case, True), trained(case, False), strict=True):
        torch.testing.assert_close(one, other)


def test_they_run_in_one_backward() -> None:
    """Torch refuses `autograd.grad` through a backward that runs within another."""
    part, x = Part(), torch.randn(3, 4, requires_grad=True)
    with reentrant_as_others():
        (gradient,) = torch.autograd.grad(CASES["module"](part, x).sum(), x)
    assert gradient.shape == x.shape
    with as_in_pytorch(), pytest.raises(RuntimeError, match="use_reentrant=True"):
        torch.autograd.grad(CASES["module"](part, x).sum(), x)


def test_without_gradients_nothing_runs_again() -> None:
    part = Part()
    with reentrant_as_others(), torch.no_grad(), pytest.warns(UserWarning, match="None of the inputs"):
        assert not CASES["module"](part, torch.randn(3, 4)).requires_grad
    assert part.forwards == 1
