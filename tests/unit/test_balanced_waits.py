"""How long ranks wait for samples that are dealt by their cost: by hand, and against batches of the sampler."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import draws

from osdp.uneven_lengths.balanced_batches import BalancedBatchSampler
from planner.cost.stragglers import Imbalance, Waits, histogram

LENGTHS = histogram([1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 5.0, 9.0])


def dealt(imbalance: Imbalance, ranks: int, micro_batch: int, accumulation: int) -> Waits:
    """Return the waits of the same samples, dealt by cost."""
    balanced = Imbalance(imbalance.variation, imbalance.lengths, "a test", balanced=True)
    return balanced.waits(ranks, micro_batch, accumulation)


def sampled(lengths: list[float], ranks: int, micro_batch: int, accumulation: int) -> tuple[float, float]:
    """Return the factors of an epoch of the sampler's batches."""
    settings = {"num_replicas": ranks, "shuffle": False, "drop_last": True}
    epochs = [
        [
            sum(lengths[i] for i in batch)
            for batch in BalancedBatchSampler(lengths, micro_batch, accumulation, **settings, rank=r)
        ]
        for r in range(ranks)
    ]
    costs = np.array(epochs).reshape(ranks, -1, accumulation)
    mean = costs.sum() / ranks
    return float(costs.max(axis=0).sum() / mean), float(costs.sum(axis=2).max(axis=0).sum() / mean)


def test_two_lengths_by_hand() -> None:
    """Four samples of 1 or 3 for two ranks of two each: the best pairs, of all sixteen draws."""
    pairs = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))
    largest = [min(max(d[a] + d[b], d[e] + d[f]) for (a, b), (e, f) in pairs) for d in product((1, 3), repeat=4)]
    assert sum(largest) / 16 == 4.5
    found = dealt(Imbalance(lengths=histogram([1.0, 3.0])), 2, 2, 1)
    assert found.per_micro_batch == found.per_step == pytest.approx(4.5 / 4, rel=0.01)
    # As four micro-batches of one, both rows cost the largest of two: the rows of 1 1 | 3 3 wait for nobody.
    rows = [sum(sorted(d)[1::2]) for d in product((1, 3), repeat=4)]
    each = dealt(Imbalance(lengths=histogram([1.0, 3.0])), 2, 1, 2)
    assert each.per_micro_batch == pytest.approx(sum(rows) / 16 / 4, rel=0.01)
    assert each.per_step == pytest.approx(4.5 / 4, rel=0.01)


@pytest.mark.parametrize(("ranks", "micro_batch", "accumulation"), [(2, 1, 4), (4, 3, 1), (4, 2, 4), (8, 1, 8)])
def test_lengths_are_dealt_as_the_sampler_does(ranks: int, micro_batch: int, accumulation: int) -> None:
    values, shares = np.array(LENGTHS).T
    lengths = np.random.default_rng(11).choice(values, 40_000, p=shares).tolist()
    each, once = sampled(lengths, ranks, micro_batch, accumulation)
    found = dealt(Imbalance(lengths=LENGTHS), ranks, micro_batch, accumulation)
    assert found.per_micro_batch == pytest.approx(each, rel=0.03)
    assert found.per_step == pytest.approx(once, rel=0.03)
    assert found.fill == Imbalance(lengths=LENGTHS).waits(ranks, micro_batch, accumulation).fill


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 2), (4, 8)])
def test_micro_batches_are_dealt_whole(ranks: int, accumulation: int) -> None:
    """A coefficient of variation says nothing of samples: micro-batches of any size are dealt as if they were one."""
    sigma = math.sqrt(math.log1p(0.5**2))
    drawn = np.exp(sigma * np.random.default_rng(3).standard_normal(40_000)).tolist()
    each, once = sampled(drawn, ranks, 1, accumulation)
    for micro_batch in (1, 16):
        found = dealt(Imbalance(0.5), ranks, micro_batch, accumulation)
        assert found.per_micro_batch == pytest.approx(each, rel=0.03)
        assert found.per_step == pytest.approx(once, rel=0.03)


@settings(max_examples=draws(15), deadline=None)
@given(
    st.lists(st.integers(1, 512), min_size=2, max_size=30),
    st.integers(1, 16),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 2, 8]),
)
def test_dealing_never_waits_longer(lengths: list[int], ranks: int, micro_batch: int, accumulation: int) -> None:
    for imbalance in (Imbalance(lengths=histogram(lengths)), Imbalance(0.7)):
        drawn = imbalance.waits(ranks, micro_batch, accumulation)
        found = dealt(imbalance, ranks, micro_batch, accumulation)
        assert 1 <= found.per_step <= drawn.per_step
        assert found.per_step <= found.per_micro_batch <= drawn.per_micro_batch
        assert found == dealt(imbalance, ranks, micro_batch, accumulation)


def test_a_sample_for_each_rank_leaves_nothing_to_deal() -> None:
    for imbalance, micro_batch in (
        (Imbalance(lengths=LENGTHS, source="a test"), 1),
        (Imbalance(0.5, source="a test"), 4),
    ):
        assert dealt(imbalance, 8, micro_batch, 1) == imbalance.waits(8, micro_batch, 1)


def test_steps_of_very_many_samples_are_made_smaller() -> None:
    """What balances a few dozen samples of each rank to nearly nothing does so with thousands."""
    assert dealt(Imbalance(lengths=LENGTHS), 8, 4096, 16).per_step < 1.01
    assert dealt(Imbalance(0.5), 512, 1, 64).per_step < 1.05
