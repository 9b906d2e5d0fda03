"""What blocks run before their first layer, and inputs that they do not use, in a dry run: what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from trace_models import source

from profiler.trace.trace import trace_model

WIDTH = 64
Given = list[Tensor]


def averaged(x: Tensor, given: Given) -> Tensor:
    """Save nothing, and make much in both directions."""
    return x + torch.stack([x, *given]).mean(0)


def scaled(x: Tensor, given: Given) -> Tensor:
    """Save something, use one of what is given."""
    return torch.tanh(x * given[0]).mul(x)


def joined(x: Tensor, given: Given) -> Tensor:
    """Save something larger."""
    return torch.cat([x, *given], 1).pow(2).view(x.shape[0], 1 + len(given), -1, WIDTH).sum(1)


def mixed(x: Tensor, given: Given) -> Tensor:
    """Make products, which are kept where blocks are recomputed selectively."""
    return x + torch.softmax(x @ given[0].transpose(1, 2), -1) @ x


def unused(x: Tensor, given: Given) -> Tensor:
    """Use nothing of what is given."""
    return x


class Block(nn.Module):
    """Two layers after an opening."""

    def __init__(self, opening: Callable[[Tensor, Given], Tensor]) -> None:
        super().__init__()
        self.opening = opening
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: Given) -> Tensor:
        """Return a tensor like the first."""
        y: Tensor = self.last(torch.tanh(self.first(self.opening(x, given))))
        return x + y


class Handing(nn.Module):
    """Three blocks that are handed the same tensors, or all that was computed so far."""

    def __init__(self, opening: Callable[[Tensor, Given], Tensor], handed: str) -> None:
        super().__init__()
        self.inputs, self.context, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(Block(opening) for _ in range(3))
        self.handed = handed

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> a loss."""
        context, hidden = self.context(x), self.inputs(x)
        both, seen = [context, context.sin()], [hidden]
        for block in self.blocks:
            hidden = block(hidden, {"one": both[:1], "both": both, "all": seen}[self.handed])
            seen = [*seen, hidden]
        out: Tensor = self.head(hidden)
        return out.pow(2).mean()


RECOMPUTED = ((), ()), ((0, 1, 2), ()), ((), (0, 1, 2)), ((1,), ()), ((0,), ()), ((2,), ()), ((), (1,))
"""Blocks that are recomputed, and selectively."""
STRATEGIES = ("shard", "shard"), ("shard_grad", "shard"), ("replicate", "replicate")
"""Of first layers, and of all others."""


@pytest.mark.parametrize("opening", [averaged, scaled, joined, mixed, unused])
def test_no_step_holds_more_than_is_predicted(opening: Callable[[Tensor, Given], Tensor]) -> None:
    """Plans were up to 6.6 % too low, and others 10 % too high, as openings counted as parts of the block before."""
    openings = [averaged, scaled, joined, mixed, unused]
    for handed in some(["one", "both", "all"], 2, openings.index(opening)):
        model = source(lambda handed=handed: Handing(opening, handed), (32, WIDTH))  # type: ignore[misc]
        graph = trace_model(model)
        names = [block.name for block in graph.blocks]
        for (first, others), (again, selective) in some([*product(STRATEGIES, RECOMPUTED)], 5, openings.index(opening)):
            choices = {one.name: first if one.name.endswith(".first") else others for one in graph.operators}
            chosen = [names[one] for one in again], [names[one] for one in selective]
            plan = plan_of(graph, cluster(1, 4), choices, *chosen, micro_batch=8)
            error = compare(plan, model, graph, cluster(1, 4)).error
            assert -0.0005 <= error <= 0.13, (handed, first, again, selective)
            if opening is scaled and handed == "one" and len(again) in (0, 3) and not selective:
                assert error <= 0.002, (first, again)
