"""Balanced batches: every sample once, alike on all ranks, the same every time, and resumed where they were."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from osdp.uneven_lengths.balanced_batches import BalancedBatchSampler
from osdp.uneven_lengths.packing import Cost
from planner.cost.balanced_sets import METHODS
from profiler.errors import OsdpError

Batches = list[list[int]]
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)
SIZES: dict[str, Any] = {"ranks": st.integers(1, 4), "size": st.integers(1, 3), "micro_batches": st.integers(1, 3)}
SETTINGS: dict[str, Any] = {"method": st.sampled_from(sorted(METHODS)), "equal_sizes": st.booleans()}


def on_ranks(lengths: list[int], ranks: int, *args: int, **kwargs: Any) -> list[BalancedBatchSampler]:
    """Return the sampler of each rank, none of which knows of the others."""
    return [BalancedBatchSampler(lengths, *args, num_replicas=ranks, rank=rank, **kwargs) for rank in range(ranks)]


def steps_of(samplers: list[BalancedBatchSampler], micro_batches: int) -> list[list[int]]:
    """Return the samples of each step of an epoch, over all ranks, sorted."""
    epochs = [list(sampler) for sampler in samplers]
    starts = range(0, len(samplers[0]), micro_batches)
    return [sorted(chain(*(b for epoch in epochs for b in epoch[at : at + micro_batches]))) for at in starts]


def step_cost(epochs: list[Batches], cost: Callable[[int], float]) -> float:
    """Return what an epoch costs if ranks synchronize in every micro-batch."""
    return sum(max(sum(map(cost, batch)) for batch in row) for row in zip(*epochs, strict=True))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, shuffle=st.booleans(), epoch=st.integers(0, 3), **SIZES, **SETTINGS)
def test_every_sample_once(
    lengths: list[int], ranks: int, size: int, micro_batches: int, shuffle: bool, epoch: int, **kwargs: Any
) -> None:
    samplers = on_ranks(lengths, ranks, size, micro_batches, shuffle=shuffle, seed=3, **kwargs)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    epochs = [list(sampler) for sampler in samplers]
    assert {len(found) for found in epochs} == {len(samplers[0])}
    taken = Counter(chain(*chain(*epochs)))
    assert set(taken) == set(range(len(lengths)))
    # What fills up is as few as DistributedSampler has; in the order of the dataset it is the same samples.
    reference = Counter(chain(*(DistributedSampler(lengths, ranks, r, shuffle=False) for r in range(ranks))))
    assert taken.total() == reference.total()
    assert shuffle or taken == reference
    if kwargs["equal_sizes"]:
        assert all(len(batch) == size for found in epochs for batch in found[:-1])
        assert {len(found[-1]) for found in epochs} == {-(-len(lengths) // ranks) % size or size}
    assert all(batch for found in epochs for batch in found)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, **SIZES, **SETTINGS)
def test_without_the_last_step_no_sample_twice(
    lengths: list[int], ranks: int, size: int, micro_batches: int, **kwargs: Any
) -> None:
    whole, rest = divmod(len(lengths), ranks * size * micro_batches)
    if not whole:
        with pytest.raises(OsdpError, match="no step that is filled"):
            on_ranks(lengths, ranks, size, micro_batches, drop_last=True, **kwargs)
        return
    samplers = on_ranks(lengths, ranks, size, micro_batches, drop_last=True, **kwargs)
    taken = Counter(chain(*chain(*map(list, samplers))))
    assert set(taken.values()) == {1}
    assert len(taken) == len(lengths) - rest
    assert len(samplers[0]) == whole * micro_batches


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, **SIZES, **SETTINGS)
def test_a_step_has_the_samples_that_it_would_have_anyway(
    lengths: list[int], ranks: int, size: int, micro_batches: int, **kwargs: Any
) -> None:
    """In the order of the dataset, the next ones; shuffled, whatever the lengths and the method."""
    batch = ranks * size * micro_batches
    whole = len(lengths) // batch
    plain = steps_of(on_ranks(lengths, ranks, size, micro_batches, shuffle=False, **kwargs), micro_batches)
    assert plain[:whole] == [list(range(at * batch, (at + 1) * batch)) for at in range(whole)]
    shuffled = steps_of(on_ranks(lengths, ranks, size, micro_batches, seed=5, **kwargs), micro_batches)
    alike = steps_of(on_ranks([7] * len(lengths), 1, batch, seed=5), 1)
    assert shuffled[:whole] == alike[:whole]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    lengths = list(range(1, 65))

    def epoch(seed: int, number: int) -> Batches:
        sampler = BalancedBatchSampler(lengths, 4, 2, num_replicas=2, rank=1, seed=seed)
        sampler.set_epoch(number)
        return list(sampler)

    # Seed 1 in epoch 0 is not seed 0 in epoch 1.
    found = [epoch(0, 0), epoch(0, 1), epoch(1, 0), epoch(1, 1)]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])
    assert found == [epoch(0, 0), epoch(0, 1), epoch(1, 0), epoch(1, 1)]
    sampler = BalancedBatchSampler(lengths, 4)
    assert list(sampler) == list(sampler)


def test_long_samples_run_side_by_side() -> None:
    """Rows 9 8 | 4 1: the ranks run 8 and 9, then 4 and 1."""
    samplers = on_ranks([4, 9, 1, 8], 2, 1, 2, shuffle=False)
    assert [list(sampler) for sampler in samplers] == [[[3], [0]], [[1], [2]]]


@pytest.mark.parametrize("method", METHODS)
def test_balancing_takes_less_than_the_order_of_samples(method: str) -> None:
    rng = np.random.default_rng(0)
    lengths = np.ceil(np.exp(rng.normal(5, 0.7, 2048))).astype(int)
    cost = Cost(1.0, 0.01)

    def of(sample: int) -> float:
        return cost(int(lengths[sample]))

    plain = [list(DistributedSampler(range(2048), 4, rank)) for rank in range(4)]
    unbalanced = [[[i] for i in samples] for samples in plain]
    costs = [step_cost(unbalanced, of)]
    for accumulation in (1, 2, 8):
        samplers = on_ranks(lengths.tolist(), 4, 1, accumulation, cost=cost, method=method)
        costs.append(step_cost([list(sampler) for sampler in samplers], of))
    least = sum(of(i) for i in range(2048)) / 4
    # One sample for each rank is a step that cannot be balanced; the more there are, the better.
    assert costs[1] == pytest.approx(costs[0], rel=0.05)
    assert costs[1] > costs[2] > costs[3] > least
    assert costs[3] - least < 0.5 * (costs[0] - least)


def test_costs_decide_and_not_lengths() -> None:
    """By length 5 1 are as much as 3 3; by squares 25 are more than 9 9 1."""
    made: dict[str, Any] = {"num_replicas": 2, "rank": 0, "shuffle": False, "equal_sizes": False}
    by_length = BalancedBatchSampler([5, 3, 3, 1], 2, **made)
    by_square = BalancedBatchSampler([5, 3, 3, 1], 2, cost=lambda length: length**2, **made)
    assert list(by_length) == [[0, 3]]
    assert list(by_square) == [[0]]


# --- resuming


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, **SIZES, **SETTINGS)
def test_resumed_anywhere(lengths: list[int], ranks: int, size: int, micro_batches: int, **kwargs: Any) -> None:
    def make(epoch: int) -> BalancedBatchSampler:
        sampler = on_ranks(lengths, ranks, size, micro_batches, seed=2, **kwargs)[-1]
        sampler.set_epoch(epoch)
        return sampler

    wanted, after = list(make(4)), list(make(5))
    for taken in range(len(wanted) + 1):
        first, second = make(4), make(0)
        batches = iter(first)
        before = [next(batches) for _ in range(taken)]
        state = first.state_dict()
        assert state == first.state_dict(taken)
        second.load_state_dict(state)
        second.set_epoch(second.epoch)
        assert second.state_dict() == state
        assert before + list(second) == wanted
        # The pass after that is the whole epoch again.
        assert list(second) == wanted
        # Whoever goes on to another epoch, from wherever, is at its start.
        second.load_state_dict(state)
        second.set_epoch(5)
        assert second.state_dict()["batch"] == 0
        assert list(second) == after


def test_resumed_on_other_ranks_between_steps() -> None:
    """What is trained after it is the same, step by step; within a step it could not be."""
    lengths = [1 + (7 * i) % 23 for i in range(50)]
    four = on_ranks(lengths, 4, 1, 2, seed=1)
    wanted = steps_of(four, 2)
    for ranks, size, micro_batches in ((2, 2, 2), (1, 8, 1), (2, 1, 4), (4, 2, 1)):
        others = on_ranks(lengths, ranks, size, micro_batches, seed=1, method="greedy")
        for sampler in others:
            sampler.load_state_dict(four[0].state_dict(6))
        assert len(list(others[0])) == len(others[0]) - 3 * micro_batches
        for sampler in others:
            sampler.load_state_dict(four[0].state_dict(6))
        epochs = [list(sampler) for sampler in others]
        found = [
            sorted(chain(*(b for epoch in epochs for b in epoch[at : at + micro_batches])))
            for at in range(0, 3 * micro_batches, micro_batches)
        ]
        assert found == wanted[3:6]
        with pytest.raises(OsdpError, match="between two whole steps"):
            others[0].load_state_dict(four[0].state_dict(5))
        others[0].load_state_dict(four[0].state_dict(len(four[0])))
        assert list(others[0]) == []


def test_states_of_others_are_refused() -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    state = BalancedBatchSampler(lengths, 2, seed=1).state_dict()
    cases: list[tuple[BalancedBatchSampler, dict[str, Any], str]] = [
        (BalancedBatchSampler(lengths, 2, seed=2), state, "another seed"),
        (BalancedBatchSampler(lengths[:6], 2, seed=1), state, "another samples"),
        (BalancedBatchSampler(lengths, 4, seed=1), state, "another global_batch"),
        (BalancedBatchSampler(lengths, 2, seed=1, shuffle=False), state, "another shuffle"),
        (BalancedBatchSampler(lengths, 2, seed=1, drop_last=True), state, "another drop_last"),
        (BalancedBatchSampler(lengths, 2, seed=1), {"epoch": 0}, "no state of balanced batches"),
        (BalancedBatchSampler(lengths, 2, seed=1), {**state, "batch": 5}, "batch of balanced batches"),
        (BalancedBatchSampler(lengths, 2, seed=1), {**state, "epoch": "1"}, "epoch of balanced batches"),
    ]
    for sampler, given_state, said in cases:
        with pytest.raises(OsdpError, match=said):
            sampler.load_state_dict(given_state)
        assert len(list(sampler)) == len(sampler)


# --- in a DataLoader


class Numbers:
    """A dataset whose samples are their own numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


def test_a_loader_takes_them_and_workers_run_ahead() -> None:
    lengths = list(range(1, 21))
    sampler = BalancedBatchSampler(lengths, 2, num_replicas=2, rank=0)
    wanted = list(BalancedBatchSampler(lengths, 2, num_replicas=2, rank=0))
    assert [batch.tolist() for batch in DataLoader(Numbers(), batch_sampler=sampler)] == wanted
    ahead = DataLoader(Numbers(), batch_sampler=sampler, num_workers=1, prefetch_factor=3)
    assert len(ahead) == len(wanted)
    batches = iter(ahead)
    before = next(batches).tolist()
    assert sampler.state_dict()["batch"] > 1
    sampler.load_state_dict(sampler.state_dict(1))
    assert [before, *(batch.tolist() for batch in DataLoader(Numbers(), batch_sampler=sampler))] == wanted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lengths": []}, "no samples"),
        ({"lengths": [3, 0]}, "length 0"),
        ({"lengths": [3.0, float("nan")]}, "length nan"),
        ({"cost": lambda length: -length}, "-1.0 for a sample of length 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"accumulation": 0}, "accumulation"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_replicas": 2, "rank": 2}, "0 to 1"),
        ({"seed": -1}, "seed"),
        ({"method": "lpt"}, "karmarkar_karp or greedy"),
        ({"drop_last": True, "batch_size": 4}, "no step that is filled"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(OsdpError, match=said):
        BalancedBatchSampler(**{"lengths": [1, 2, 3], "batch_size": 1, **arguments})


def test_an_epoch_or_a_place_that_cannot_be_is_refused() -> None:
    sampler = BalancedBatchSampler([1, 2, 3], 1)
    with pytest.raises(OsdpError, match="epoch"):
        sampler.set_epoch(-1)
    with pytest.raises(OsdpError, match="at most 3"):
        sampler.state_dict(4)


def test_the_documented_loop_runs() -> None:
    """The example in docs/balanced-batches.md, with a dataset of numbers."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "balanced-batches.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    trained: list[int] = []
    lengths, collate = [1 + 5 * i for i in range(20)], list
    exec(example, {"lengths": lengths, "dataset": Numbers(), "collate": collate, "train": trained.extend})
    # Three epochs of 20 samples, on one rank that has nothing to fill up.
    assert Counter(trained) == dict.fromkeys(range(20), 3)
