"""Models with a backward of their own that computes with parameters, as reversible layers and adjoints of ODEs do.

They train as in one process, or are refused with what to do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from ranks import run_ranks
from torch import Tensor, nn
from toys import plan_of, seeded

from osdp.api import OSDP
from profiler.errors import OsdpError

WIDTH = 6


class _Rerun(torch.autograd.Function):
    """Runs a layer without a graph, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, again: Any) -> Tensor:
        ctx.again, ctx.layer = again, layer
        ctx.save_for_backward(x)
        return layer(x).tanh()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.again(ctx.layer, x).tanh().backward(gradient)
        return x.grad, None, None


def by_weights(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


class Reversible(nn.Module):
    """Three layers, of which the second keeps its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        x = _Rerun.apply(self.first(x), self.second, by_weights)  # type: ignore[no-untyped-call]
        return self.last(x).pow(2).mean()  # type: ignore[no-any-return]

    def example_inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (torch.ones(batch, WIDTH),)


def gradients(rank: int, strategy: str) -> list[Tensor] | str:
    """Return the gradients of a step that all ranks make alike, or how the backward is refused."""
    model = OSDP(seeded(Reversible), plan_of(Reversible(), "replicate", {"second": strategy}, ranks=(1, 2)))
    loss = model(torch.ones(2, WIDTH))
    try:
        loss.backward()
    except OsdpError as error:
        return str(error)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_replicated_they_train_as_in_one_process() -> None:
    alone = seeded(Reversible)
    alone(torch.ones(2, WIDTH)).backward()
    for found in run_ranks(gradients, 2, "replicate"):
        assert isinstance(found, list)
        torch.testing.assert_close(found, [parameter.grad for parameter in alone.parameters()])


@pytest.mark.parametrize("strategy", ["shard", "odc:2"])
def test_sharded_they_are_told_what_to_do(strategy: str) -> None:
    """Once it was PyTorch's word alone, that an op got tensors and DTensors."""
    for found in run_ranks(gradients, 2, strategy):
        assert isinstance(found, str)
        assert "by a backward of the model's own" in found
        assert "*=replicate" in found
