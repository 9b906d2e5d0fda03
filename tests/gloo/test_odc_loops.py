"""Loops over models whose units pull and push: uneven ranks, skipped steps, gradients that are read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import THOROUGH, some
from torch import Tensor, nn
from toys import Blocks, batch_of, loss_of, plan_of, refusal, seeded

build = partial(Blocks, frozen=False)
SAMPLE = build()
"""What batches are made for."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose every step is plain to see."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def osdp(choice: str, ranks: tuple[int, int], accumulation: int = 1, choices: Mapping[str, str] | None = None) -> Any:
    """Return a model under a plan that gives all but some operators the same."""
    from osdp import OSDP

    return OSDP(seeded(build), plan_of(SAMPLE, choice, choices, accumulation=accumulation, ranks=ranks))


def mean_loss(model: nn.Module, batches: list[Any]) -> Tensor:
    """Return the mean over batches of the same size."""
    return torch.stack([loss_of(model(*args, **kwargs)) for args, kwargs in batches]).mean()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    """Run a step of the mean loss of some batches."""
    mean_loss(model, batches).backward()
    optimizer.step()
    optimizer.zero_grad()


def batches_at(step: int, ranks: int) -> list[Any]:
    """Return the batches of all ranks."""
    return [batch_of(SAMPLE, rank, step) for rank in range(ranks)]


def assert_same(model: Any, reference: nn.Module) -> None:
    """Compare parameters."""
    torch.testing.assert_close(model.full_state_dict(False), dict(reference.state_dict()), rtol=1e-5, atol=1e-6)


# --- ranks that do different numbers of micro-batches


SETTINGS = (
    ("odc:4", (1, 4), {}),
    ("odc:2", (2, 2), {}),
    ("odc:2", (1, 4), {"head": "odc:4"}),
    ("odc_ordered:4", (1, 4), {"head": "replicate"}),
    ("odc:2", (2, 2), {"head": "replicate"}),
)
"""How models are sharded that train with uneven ranks: default, nodes and ranks of each, exceptions."""


@dataclass(frozen=True)
class Uneven:
    """What one process trains, of the mean over all micro-batches of all ranks."""

    counts: list[list[int]]
    """By step: how many micro-batches each rank has."""
    norms: list[Tensor]
    """Of each step's gradient, before clipping."""
    reference: nn.Module
    """At the end."""


def _uneven(rank: int, alone: list[Uneven]) -> None:
    """Train steps with so many micro-batches of each rank, under all settings."""
    for planned, ((choice, ranks, choices), wanted) in enumerate(zip(SETTINGS, alone, strict=True), start=1):
        says_last = "replicate" in choices.values()
        try:
            _is_the_mean(rank, osdp(choice, ranks, planned, choices), wanted, planned, says_last)
        except AssertionError as error:
            raise AssertionError(f"{choice} {ranks} {choices}: {error}") from error


def _is_the_mean(rank: int, model: Any, wanted: Uneven, planned: int, says_last: bool) -> None:
    """Compare each step with one of a single process."""
    optimizer = sgd(model)
    for step, (of_ranks, norm) in enumerate(zip(wanted.counts, wanted.norms, strict=True)):
        for k in range(of_ranks[rank]):
            args, kwargs = batch_of(SAMPLE, rank, 10 * step + k)
            is_last = k + 1 == of_ranks[rank]
            if says_last and is_last:
                model.sync()
            with model.no_sync() if says_last and not is_last else nullcontext():
                (loss_of(model(*args, **kwargs)) / planned).backward()
        torch.testing.assert_close(model.clip_grad_norm_(0.1), norm, rtol=1e-5, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, wanted.reference)


def _alone(counts: list[list[int]], planned: int, least: int) -> Uneven:
    """Train what ranks train, of which each has at least so many micro-batches, in one process."""
    reference, norms = seeded(build), []
    optimizer, own = sgd(reference), [[max(least, count) for count in of_ranks] for of_ranks in counts]
    for step, of_ranks in enumerate(own):
        batches = [batch_of(SAMPLE, rank, 10 * step + k) for rank, count in enumerate(of_ranks) for k in range(count)]
        # Where all ranks run equally many, the user's own division counts, as under every strategy.
        share = planned / of_ranks[0] if len(set(of_ranks)) == 1 else 1.0
        (mean_loss(reference, batches) / share).backward()
        norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        assert norms[-1] > 0.1
        optimizer.step()
        optimizer.zero_grad()
    return Uneven(own, norms, reference)


def test_uneven_ranks_train_the_mean_over_all_micro_batches() -> None:
    draw = Random(0)
    counts = [[draw.randint(0, 4) for _ in range(4)] for _ in range(6 if THOROUGH else 1)]
    assert all(any(of_ranks) for of_ranks in counts)
    assert any(0 in of_ranks for of_ranks in counts)
    counts = [[2, 2, 2, 2], [0, 4, 0, 0], *counts]
    # What is replicated is reduced with a rank's last micro-batch, so there has to be one.
    leasts = [int("replicate" in choices.values()) for _, _, choices in SETTINGS]
    run_ranks(_uneven, 4, [_alone(counts, planned, least) for planned, least in enumerate(leasts, start=1)])


LONGER = 4 if THOROUGH else 2
"""Ranks of loops that are longer than the plan, on all ranks alike."""


def _plain_accumulation(rank: int) -> None:
    """Accumulate thrice what the plan says, on all ranks: the user's division counts, as under other strategies."""
    model, reference = osdp(f"odc:{LONGER}", (1, LONGER)), seeded(build)
    optimizer, other = sgd(model), sgd(reference)
    for step in range(3):
        for k in range(3):
            args, kwargs = batch_of(SAMPLE, rank, 10 * step + k)
            (loss_of(model(*args, **kwargs)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_of(reference, other, [batch for k in range(3) for batch in batches_at(10 * step + k, LONGER)])
    assert_same(model, reference)


def _sleeps(rank: int) -> float:
    """Return how long five micro-batches took while rank 1 slept for four seconds."""
    model = osdp("odc:2", (1, 2))
    optimizer = sgd(model)
    step_of(model, optimizer, [batch_of(SAMPLE, rank)])
    started_s = time.monotonic()
    if rank == 1:
        time.sleep(4.0)
    for k in range(5):
        args, kwargs = batch_of(SAMPLE, rank, k)
        loss_of(model(*args, **kwargs)).backward()
    took_s = time.monotonic() - started_s
    optimizer.step()
    return took_s


def test_nobody_waits_inside_a_step() -> None:
    took_s, slept_s = run_ranks(_sleeps, 2)
    assert took_s < 3.0
    assert slept_s >= 4.0


# --- loops that do not go as planned


def is_skipped(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Look at the norm and leave the step out."""
    args, kwargs = batch_of(SAMPLE, rank, 5)
    loss_of(model(*args, **kwargs)).backward()
    model.clip_grad_norm_(1.0)
    optimizer.zero_grad()


def is_given_up(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Give a step up before anything was read."""
    args, kwargs = batch_of(SAMPLE, rank, 5)
    loss_of(model(*args, **kwargs)).backward()
    model.zero_grad()


def is_given_up_by_some(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Give a step up in which one rank had no micro-batch, and so nothing to forget."""
    if rank != 2:
        args, kwargs = batch_of(SAMPLE, rank, 5)
        loss_of(model(*args, **kwargs)).backward()
    model.zero_grad()


def fails(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Raise in the middle of a backward, on all ranks."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    args, kwargs = batch_of(SAMPLE, rank, 5)
    handle = model.module.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(model(*args, **kwargs)).backward()
    handle.remove()
    model.zero_grad()


def evaluates_alone(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Evaluate on one rank only, which no strategy with collectives allows."""
    if rank == 1:
        args, kwargs = batch_of(SAMPLE, rank, 5)
        with torch.no_grad():
            model(*args, **kwargs)


def is_loaded(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Go on with other values, then load the old ones back."""
    state = {name: value.clone() for name, value in model.full_state_dict(rank0_only=False).items()}
    model.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    args, kwargs = batch_of(SAMPLE, rank, 5)
    with torch.no_grad():
        assert loss_of(model(*args, **kwargs)) == 0
    model.load_state_dict(state)


EVENTFUL = 3 if THOROUGH else 2
"""Steps, before each of which but the first something happens."""
EVENTS = (is_skipped, is_given_up, is_given_up_by_some, fails, evaluates_alone, is_loaded)


def _goes_on(rank: int) -> None:
    ways = ("odc:4", (1, 4)), ("odc:2", (2, 2))
    cases = [(event, ways[(place + turn) % 2]) for place, event in enumerate(EVENTS) for turn in (0, 1)]
    reference = seeded(build)
    other = sgd(reference)
    for step in range(EVENTFUL):
        step_of(reference, other, batches_at(step, 4))
    for event, (choice, ranks) in some(cases, 2):
        model = osdp(choice, ranks)
        optimizer = sgd(model)
        for step in range(EVENTFUL):
            if step:
                event(model, optimizer, rank)
            step_of(model, optimizer, [batch_of(SAMPLE, rank, step)])
        try:
            assert_same(model, reference)
        except AssertionError as error:
            raise AssertionError(f"{event.__name__} under {choice}: {error}") from error


def test_training_goes_on() -> None:
    run_ranks(_goes_on, 4)


def _two_optimizers(rank: int) -> None:
    """Train halves of a model by an optimizer each, which meet one after the other."""
    model, reference = osdp(f"odc:{LONGER}", (1, LONGER), choices={"head": "shard"}), seeded(build)
    pairs = []
    for trained in (model, reference):
        parameters = list(trained.parameters())
        half = len(parameters) // 2
        pairs.append((torch.optim.SGD(parameters[:half], lr=0.5), torch.optim.Adam(parameters[half:], lr=0.01)))
    for step in range(3):
        args, kwargs = batch_of(SAMPLE, rank, step)
        loss_of(model(*args, **kwargs)).backward()
        mean_loss(reference, batches_at(step, LONGER)).backward()
        for pair in pairs:
            for optimizer in pair:
                optimizer.step()
            for optimizer in pair:
                optimizer.zero_grad()
    assert_same(model, reference)


def _longer_loops(rank: int) -> None:
    _plain_accumulation(rank)
    _two_optimizers(rank)


def test_two_optimizers_and_more_micro_batches_than_planned() -> None:
    run_ranks(_longer_loops, LONGER)


def _reads(rank: int) -> None:
    """Read gradients that were completed, and twice what was not dropped in between."""
    model, reference = osdp("odc:2", (1, 2)), seeded(build)
    for micro_batch in range(2):
        args, kwargs = batch_of(SAMPLE, rank, micro_batch)
        loss_of(model(*args, **kwargs)).backward()
        mean_loss(reference, batches_at(micro_batch, 2)).backward()
        model.finish_gradients()
        wanted = [parameter.grad for parameter in reference.parameters()]
        assert all(gradient is not None for gradient in wanted)
        got = [parameter.grad.full_tensor() for parameter in model.parameters()]
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def _reads_and_asks(rank: int) -> str:
    _reads(rank)
    return _closure(rank)


def _closure(rank: int) -> str:
    model = osdp("odc:2", (1, 2))
    args, kwargs = batch_of(SAMPLE, rank)
    loss_of(model(*args, **kwargs)).backward()
    return refusal(lambda: sgd(model).step(lambda: loss_of(model(*args, **kwargs))))


def test_gradients_can_be_read_and_closures_are_refused() -> None:
    assert "closure" in run_ranks(_reads_and_asks, 2)[0]


# --- what is sent


def _sent(rank: int) -> tuple[Counter[int], Counter[int]]:
    """Return the bytes of the all-reduces in an optimizer's step, and those that the schedule has."""
    from runtime.observe.collective_log import record_collectives

    model = osdp("odc:2", (2, 2))
    optimizer = sgd(model)
    args, kwargs = batch_of(SAMPLE, rank)
    for _ in range(2):
        loss_of(model(*args, **kwargs)).backward()
        with record_collectives() as recorded:
            optimizer.step()
    charged = Counter(
        c.size_bytes for unit in model.schedule.units for c in unit.collectives if c.operation == "all_reduce"
    )
    assert {(one.operation, len(one.ranks), one.ranks[1] - one.ranks[0]) for one in recorded} == {("all_reduce", 2, 2)}
    return Counter(one.size_bytes for one in recorded), charged


def test_groups_reduce_what_the_planner_charges_for() -> None:
    for sent, charged in run_ranks(_sent, 4, ranks_per_node=2):
        parameters = len(list(build().parameters()))
        sizes = [*charged.elements(), 4 * (4 + parameters)]  # and what ranks tell each other
        # All at once, each at a multiple of 256 bytes.
        assert len(sizes) == 4
        assert sent == Counter([sum(-(-size // 256) * 256 for size in sizes)])
