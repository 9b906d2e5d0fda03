"""Models with a backward of their own that computes with parameters, as reversible layers and adjoints of ODEs do.

They train as in one process, or are refused with what to do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from own_backwards import Applied, Reverse, Whole, drawn, layers
from ranks import run_ranks
from torch import Tensor, nn
from toys import STRATEGIES, graph_of, plan_of, seeded

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
        assert "hand all parameters" in found
        assert "*=replicate" in found


class _Asks(Reverse):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Reverse.backward(ctx, gradient)[:2]


class Unhanded(Applied):
    """Does not hand its function the parameters of which the backward asks for gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> the same."""
        return _Asks.apply(x, self.inside)  # type: ignore[no-any-return, no-untyped-call]


def unhanded(rank: int) -> str:
    """Return how the backward is refused, of layers that are gathered apart."""
    model = Whole(Unhanded("reverse", layers(3)))
    with pytest.raises(OsdpError) as raised:
        OSDP(model, plan_of(model, "shard", {"parts.0.inside.0": "replicate"}, ranks=(1, 2)))(data(rank)).backward()
    return str(raised.value)


def test_what_was_not_handed_is_refused_with_what_to_do() -> None:
    for found in run_ranks(unhanded, 2):
        assert "parts.0.inside.2.weight" in found
        assert "hand them to Function.apply" in found


def drawn_plans(seed: int) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """Return choices of operators and blocks to recompute, of a drawn model: one strategy each, and a mixture."""
    draw, graph = random.Random(seed), graph_of(drawn(seed)())
    names, blocks = [operator.name for operator in graph.operators], dict.fromkeys(one.name for one in graph.blocks)
    among = [[draw.choice(STRATEGIES)], ["shard"], STRATEGIES]
    return [
        ({name: draw.choice(some) for name in names}, tuple(one for one in blocks if draw.random() < 0.5))
        for some in among
    ]


def data(rank: int) -> Tensor:
    return torch.linspace(-1, 1 + rank, 2 * 6).view(2, 6)


def trained_by(rank: int, seeds: Sequence[int]) -> list[list[Tensor]]:
    """Return the parameters after a step of each drawn model under each of its plans."""
    found = list[list[Tensor]]()
    for seed in seeds:
        for choices, recomputed in drawn_plans(seed):
            build = drawn(seed)
            model = OSDP(seeded(build), plan_of(build(), "shard", choices, recomputed=recomputed, ranks=(1, 2)))
            optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
            model(data(rank)).backward()
            optimizer.step()
            found.append([*model.full_state_dict(rank0_only=False).values()])
    return found


def test_what_they_ask_autograd_for_is_gathered_under_every_plan() -> None:
    """Adjoints, reversible layers and solvers ask for gradients of parameters: once only some plans of them ran."""
    seeds = 2, 6, 12  # around several blocks, with frozen layers, with tied ones
    alone = list[list[Tensor]]()
    for seed in seeds:
        model = seeded(drawn(seed))
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
        for rank in range(2):
            (model(data(rank)) / 2).backward()
        optimizer.step()
        alone += [[*model.state_dict().values()]] * len(drawn_plans(seed))
    for found in run_ranks(trained_by, 2, seeds):
        torch.testing.assert_close(found, alone)
