"""What losses and `F.fold` leave in memory, with data and without, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from trace_models import source

from profiler.trace.trace import trace_model
from runtime.observe.live_bytes import LiveBytes

Arguments = Callable[[], tuple[Tensor, ...]]


def values(*shape: int) -> Tensor:
    return torch.rand(shape, requires_grad=True)


def alike() -> tuple[Tensor, ...]:
    return values(64, 100), torch.rand(64, 100)


def three() -> tuple[Tensor, ...]:
    return values(64, 100), values(64, 100), values(64, 100)


def signs() -> tuple[Tensor, ...]:
    return values(64, 100), torch.ones(64, 100)


def classes() -> tuple[Tensor, ...]:
    return values(64, 100), torch.zeros(64, dtype=torch.int64)


LOSSES: dict[type[nn.Module], Arguments] = {
    nn.L1Loss: alike,
    nn.MSELoss: alike,
    nn.HuberLoss: alike,
    nn.SmoothL1Loss: alike,
    nn.BCELoss: alike,
    nn.BCEWithLogitsLoss: alike,
    nn.KLDivLoss: alike,
    nn.PoissonNLLLoss: alike,
    nn.SoftMarginLoss: signs,
    nn.HingeEmbeddingLoss: signs,
    nn.MultiLabelSoftMarginLoss: signs,
    nn.NLLLoss: classes,
    nn.CrossEntropyLoss: classes,
    nn.MultiMarginLoss: classes,
    nn.MultiLabelMarginLoss: lambda: (values(64, 100), torch.zeros(64, 100, dtype=torch.int64)),
    nn.MarginRankingLoss: lambda: (values(6400), values(6400), torch.ones(6400)),
    nn.CosineEmbeddingLoss: lambda: (values(64, 100), values(64, 100), torch.ones(64)),
    nn.TripletMarginLoss: three,
    nn.TripletMarginWithDistanceLoss: three,
}
OTHERS = {"CTCLoss", "NLLLoss2d", "GaussianNLLLoss", "AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"}
"""The first has a test of its own, the second is an old name, the third reads values, the others have parameters."""


def bytes_of(loss: Any, arguments: Arguments) -> list[int]:
    """Return the live bytes after the arguments were made, the loss computed, its backward run, and the loss freed."""
    with LiveBytes() as live:
        given = arguments()
        found = [live.total_bytes]
        out = loss(*given)
        found.append(live.total_bytes)
        out.sum().backward()
        found.append(live.total_bytes)
        del out
        return [*found, live.total_bytes]


def test_no_loss_of_torch_is_missing() -> None:
    assert {*nn.modules.loss.__all__} - OTHERS == {loss.__name__ for loss in LOSSES}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_without_data_a_loss_leaves_what_it_leaves_with_data(loss: type[nn.Module], reduction: str) -> None:
    found = bytes_of(loss(reduction=reduction), LOSSES[loss])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert bytes_of(loss(reduction=reduction), LOSSES[loss]) == found


FOLDS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "overlapping": (nn.Fold((20, 30), 3, padding=1), (2, 18, 600)),
    "apart": (nn.Fold((20, 30), 2, stride=2), (2, 8, 150)),
    "with gaps": (nn.Fold((20, 30), 2, stride=5), (2, 8, 24)),
    "one image": (nn.Fold((20, 30), 3, padding=1), (18, 600)),
    "unfolding": (nn.Unfold(3, padding=1), (2, 5, 20, 30)),
    "unfolding with gaps": (nn.Unfold(2, stride=5), (2, 5, 20, 30)),
}


@pytest.mark.parametrize("how", FOLDS)
def test_without_data_a_fold_leaves_what_it_leaves_with_data(how: str) -> None:
    fold, shape = FOLDS[how]
    found = bytes_of(fold, lambda: (values(*shape),))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert bytes_of(fold, lambda: (values(*shape),)) == found


class Gated(nn.Module):
    """A block that saves what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).sigmoid()


class Autoencoder(nn.Module):
    """An output and a loss of each of its elements, on top of blocks."""

    def __init__(self, loss: nn.Module, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.blocks = nn.ModuleList(Gated() for _ in range(3))
        self.head, self.loss = nn.Linear(128, 128), loss

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 64, 128) -> the loss."""
        for block in self.blocks:
            y = block(x)
            x = x + y
        out = torch.sigmoid_(self.head(x))
        found: Tensor = self.loss(out, torch.zeros_like(out))
        return found if self.factor == 1.0 else found * self.factor


@pytest.mark.parametrize(
    ("loss", "factor", "recomputes"),
    some(
        [
            *product(
                [nn.MSELoss, nn.BCELoss, nn.SmoothL1Loss, nn.SoftMarginLoss, nn.HuberLoss, nn.L1Loss],
                [1.0, 2.0],
                [False, True],
            )
        ],
        7,
    ),
)
def test_a_plan_counts_it_and_what_the_model_holds_on_to(
    loss: type[nn.Module], factor: float, recomputes: bool
) -> None:
    """The output has 32 KiB a sample, as what the last block returned, which nobody saves if that is recomputed.

    A loss that is multiplied is freed as the forward ends, whose end is the peak then.

    Run with data: what the kernels leave is not assumed.  All of them with --thorough.
    """
    model = source(lambda: Autoencoder(loss(), factor), (64, 128))
    graph = trace_model(model)
    choices = {operator.name: "shard" for operator in graph.operators}
    assert len(graph.blocks) == 3
    again = [block.name for block in graph.blocks] if recomputes else []
    plan = plan_of(graph, cluster(1, 4), choices, again, micro_batch=64, optimizer="sgd")
    found = compare(plan, model, graph, cluster(1, 4), with_data=True)
    assert abs(found.error) <= 0.002


class Local(nn.Module):
    """A layer, and the sum of each pixel's surroundings, as local attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16, 32) -> the same."""
        around = F.unfold(self.layer(x)[:, None].tanh(), 3, padding=1)
        return F.fold(around.sigmoid(), x.shape[1:], 3, padding=1).squeeze(1)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_plan_counts_what_folds_leave(recomputes: bool) -> None:
    model = source(lambda: nn.Sequential(*(Local() for _ in range(3))), (16, 32))
    graph, machine = trace_model(model), cluster(1, 4)
    again = [block.name for block in graph.blocks] if recomputes else []
    choices = {operator.name: "shard" for operator in graph.operators}
    plan = plan_of(graph, machine, choices, again, micro_batch=16, optimizer="sgd")
    assert abs(compare(plan, model, graph, machine, with_data=True).error) <= 0.002
