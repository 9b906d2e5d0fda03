"""Losses that compare all samples of a micro-batch: traced costs are parabolas in it, and plans count with that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from rehearsals import compare, plan_of
from synthetic import cluster
from test_trace_memory import predicted_peaks, tracked_peaks
from torch import Tensor, nn
from trace_models import MLP, source

from osdp.planning import Request, plan_model
from profiler.affine import Affine, Curve
from profiler.errors import OsdpError
from profiler.trace.affine_fit import FOURTH, SINGLE, SIZES, envelope, line
from profiler.trace.trace import trace_model

FOUR = (*SIZES, FOURTH)


class TwoTowers(nn.Module):
    """Two towers and the symmetric cross entropy of CLIP, as it is written by hand."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.left, self.right = tower(16, width), tower(24, width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(batch, 16), (batch, 24) -> a loss."""
        left, right = F.normalize(self.head(self.left(x)), dim=-1), F.normalize(self.right(y), dim=-1)
        scores = left @ right.t() / 0.07
        labels = torch.arange(len(x), device=x.device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


class SimCLR(nn.Module):
    """One encoder of two views, and cross entropy among the 2b of them, each against all but itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = tower(16, 48), nn.Linear(48, 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(batch, 16) twice -> a loss."""
        both = F.normalize(self.head(torch.relu(self.encoder(torch.cat([x, y])))), dim=-1)
        scores = both @ both.t() / 0.5
        scores = scores.masked_fill(torch.eye(len(both), dtype=torch.bool, device=x.device), -1e9)
        return F.cross_entropy(scores, torch.arange(len(both), device=x.device).roll(len(x)))


class Distances(nn.Module):
    """Squared distances of all pairs in 3 dimensions, in the middle of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(16, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) -> a loss."""
        x = self.below(x)
        near = (x[:, None] - x).square().sum(-1).neg().softmax(-1)  # (batch, batch)
        return self.above(near @ x).square().mean()


def tower(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width))


MODELS = {
    "two towers": source(TwoTowers, (16,), (24,)),
    "one encoder": source(SimCLR, (16,), (16,)),
    "distances": source(Distances, (16,)),
}


@pytest.mark.parametrize("batch", [1, 3, 16, 150])
@pytest.mark.parametrize("model", MODELS)
def test_peaks_agree_with_torchs_memory_tracker(model: str, batch: int) -> None:
    """Never below; close where the matrices of pairs count for more than the rounding of storages to 512 bytes."""
    predicted = predicted_peaks(trace_model(MODELS[model]), batch)
    for traced, tracked in zip(predicted, tracked_peaks(MODELS[model], batch), strict=True):
        assert tracked <= traced
        assert batch < 150 or traced <= 1.2 * tracked


def test_costs_of_pairs_by_hand() -> None:
    """Scores (b, b) of features (b, 32) are 2 b^2 32 FLOPs, and twice that back; two log-probabilities are kept."""
    call = trace_model(MODELS["two towers"]).calls[-1]
    assert call.forward.matmul_flops == Curve(0, 2 * 32 * 32, 2 * 32)
    assert call.backward.matmul_flops == Curve(0, 4 * 32 * 32, 4 * 32)
    assert call.saved_bytes.coefficients[2] == 4 * 2


@pytest.mark.parametrize("batch", [3, 16, 40])
def test_a_plan_agrees_with_a_dry_run(batch: int) -> None:
    model = source(lambda: TwoTowers(256), (16,), (24,))
    graph, machine = trace_model(model), cluster(1, 8)
    plan = plan_of(graph, machine, {operator.name: "shard" for operator in graph.operators}, micro_batch=batch)
    assert -0.01 <= compare(plan, model, graph, machine).error <= 0.03


def test_a_larger_micro_batch_is_charged_for_its_pairs() -> None:
    """The plan for b = 4096 has room for matrices of 4096^2, of which the loss holds several at once."""
    plan = plan_model(MODELS["two towers"], cluster(1, 2), Request(limit_bytes=2**40, micro_batch=4096)).plan
    assert plan.predicted.memory_by_category["activations"] > 3 * 4 * 4096**2


def test_costs_that_step_are_measured_where_the_micro_batch_is_fixed() -> None:
    class Looping(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([super(Looping, self).forward(row) for row in x]).sum()

    looping = source(lambda: Looping(8, 64, 8), (8,))
    with pytest.raises(OsdpError, match="runs different operators"):
        plan_model(looping, cluster(1, 2), Request(limit_bytes=2**40))
    planned = plan_model(looping, cluster(1, 2), Request(limit_bytes=2**40, micro_batch=3))
    assert "measured at micro-batch 3 alone" in " ".join(planned.graph.notes)
    assert len(planned.graph.calls) == 2 * 3
    assert planned.graph.calls[0].forward.matmul_flops == Affine(2 * 8 * 64, 0)
    tracked = tracked_peaks(looping, 3)
    assert all(low <= high for low, high in zip(tracked, predicted_peaks(planned.graph, 3), strict=True))


# --- parabolas ------------------------------------------------------------------------------------

CURVES = st.lists(st.tuples(*(st.integers(0, 10**size) for size in (9, 6, 4))), min_size=1, max_size=6)


@given(CURVES, st.integers(1, 5000))
def test_the_envelope_is_nowhere_below_any_instant(curves: list[tuple[int, int, int]], batch: int) -> None:
    def at(size: int) -> list[int]:
        return [fixed + slope * size + square * size**2 for fixed, slope, square in curves]

    for sizes in (FOUR, (*FOUR, SINGLE)):
        assert envelope([at(size) for size in sizes], sizes)(batch) >= max(at(batch)) * (1 - 1e-12)
    if len(curves) == 1:
        assert envelope([at(size) for size in FOUR], FOUR)(batch) == pytest.approx(max(at(batch)))


def test_a_bend_that_is_no_parabola_is_a_line_nowhere_below() -> None:
    for values in ([10, 20, 50, 90], [10, 20, 30, 50], [10, 30, 40, 45]):
        fitted = line(values, FOUR)
        assert type(fitted) is Affine
        assert all(fitted(size) >= value for size, value in zip(FOUR, values, strict=True))
    assert line([7, 19, 39, 67], FOUR) == Curve(3, 0, 1)
    assert line([7, 19, 39, 67, 9], (*FOUR, SINGLE))(SINGLE) == 9
    assert line([12.0], (5,)) == Affine(12, 0)


def test_what_a_single_sample_has_more_is_of_a_micro_batch_of_one_alone() -> None:
    sizes = (*SIZES, SINGLE)
    assert line([4, 8, 12, 7], sizes) == Curve(0, 2, 0, 5)
    assert line([4, 8, 12, 1], sizes) == Affine(0, 2)
    # One instant on 3 + b, one on 2 b: from a micro-batch of 2 on 1 + 2 b bounds both, and at 1 there are 9 bytes.
    assert envelope([[5, 4], [7, 8], [9, 12], [9, 2]], sizes) == Curve(1, 2, 0, 6)
    assert (Curve(0, 2, 0, 5) + Affine(1, 1)).coefficients == (1, 3, 0, 5)


def test_quantities_add_up() -> None:
    one, two = Curve(1, 2, 3), Affine(5, 1)
    assert one + two == two + one == Curve(6, 3, 3)
    assert one.times(2) == Curve(2, 4, 6)
    assert one.at_least(two) == Curve(5, 2, 3)
    assert one(10) == 321
    assert repr(two) == "Affine(fixed=5, per_sample=1)"  # of which fingerprints are made
