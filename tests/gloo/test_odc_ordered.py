"""`odc_ordered`: the same bits in every run, however ranks are delayed; `odc` does not have them."""

from __future__ import annotations

import time
from functools import partial
from random import Random

import torch
from ranks import run_ranks
from toys import Blocks, batch_of, loss_of, plan_of, seeded

from osdp import OSDP

RANKS, STEPS, MICRO_BATCHES, LONGEST_S = 3, 2, 2, 0.06
build = partial(Blocks, frozen=False)


def _runs(rank: int, *runs: tuple[str, str]) -> list[tuple[bytes, ...]]:
    return [_bits(rank, choice, delay) for choice, delay in runs]


def _bits(rank: int, choice: str, delay: str) -> tuple[bytes, ...]:
    """Train with so many milliseconds' delay before each backward; return the bits of parameters and norms."""
    random = Random(f"{delay} {rank}")
    model = OSDP(seeded(build), plan_of(build(), choice, accumulation=MICRO_BATCHES, ranks=(1, RANKS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step in range(STEPS):
        for k in range(MICRO_BATCHES):
            args, kwargs = batch_of(build(), rank, 10 * step + k)
            loss = loss_of(model(*args, **kwargs)) / MICRO_BATCHES
            in_turn = {"first to last": rank, "last to first": RANKS - 1 - rank}
            share = in_turn[delay] / RANKS if delay in in_turn else random.random()
            time.sleep(LONGEST_S * share)
            loss.backward()
        norms.append(model.clip_grad_norm_(0.1))
        optimizer.step()
        optimizer.zero_grad()
    state = model.full_state_dict(rank0_only=False)
    return tuple(value.numpy().tobytes() for value in (*state.values(), torch.stack(norms)))


def test_ordered_runs_are_equal_bit_by_bit() -> None:
    delays = "first to last", "last to first"
    runs = run_ranks(_runs, RANKS, *((choice, delay) for choice in ("odc_ordered:3", "odc:3") for delay in delays))
    again = run_ranks(_runs, RANKS, ("odc_ordered:3", "at random"))
    for (first, second, *others), (third,) in zip(runs, again, strict=True):
        assert first == second == third
        # Without the order, ranks that come in turn, and in reverse, give other bits: delays do change sums.
        assert others[0] != others[1]
