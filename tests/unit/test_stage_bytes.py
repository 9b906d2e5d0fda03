"""Bytes at moments that see the last reduction above them, past stages that reduce nothing; bounds with these."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import chain, cluster
from thoroughness import draws

from planner.cost.peak_memory import held_moments
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidate_set import CandidateSet
from planner.options.search_space import Space
from planner.solve.lagrangian_bound import ChainBound, MemoryEvent, events_near

SLOW = settings(max_examples=draws(5, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow])

candidate_sets = st.builds(
    lambda rows, gpus, accumulation, seed: some_candidates(rows, gpus, accumulation, seed),
    st.lists(st.integers(1, 6), min_size=3, max_size=4),
    st.sampled_from([2, 4]),
    st.integers(1, 2),
    st.integers(0, 10**6),
)


def some_candidates(rows: list[int], gpus: int, accumulation: int, seed: int) -> CandidateSet:
    """Return candidates of which every stage but the lowest, whose input needs no gradient, has an option that reduces
    nothing, and one or two others."""
    random, count = np.random.default_rng(seed), len(rows)
    space = Space(chain([(1024 * r, 1024) for r in rows], [10.0] * count, [50.0] * count))
    found = space.candidates(Workload(cluster(nodes=2, gpus=gpus), "adam", "fp32", 1, accumulation), None)
    kept = []
    for columns in found.columns:
        silent, others = np.flatnonzero(columns.reduces == 0), np.flatnonzero(columns.reduces)
        kept.append(sorted([int(random.choice(silent)), *map(int, random.permutation(others)[:2])]))
    assert all(len(some) > 1 for some in kept[1:])
    return found.only(kept)


def bytes_of(bound: ChainBound, event: MemoryEvent, picks: tuple[int, ...]) -> float:
    """Return the bytes of a plan at a moment, as the rule says: quiet stages, the last that reduces, and free ones."""
    total, is_pending = 0.0, True
    for index, (row, k) in enumerate(zip(bound.stage_bytes(event), picks, strict=True)):
        held = row.free[k]
        if event.stage is not None and index > event.stage and is_pending and row.last is not None:
            reduces = bool(bound.candidates.columns[bound.candidates.stage_classes[index]].reduces[k])
            ways = row.last if reduces else row.quiet
            assert ways is not None
            held, is_pending = ways[k], not reduces
        total += float(held)
    return total


def every_pick(candidates: CandidateSet) -> list[tuple[int, ...]]:
    return list(product(*(range(len(candidates.options[c])) for c in candidates.stage_classes)))


@SLOW
@given(candidate_sets)
def test_what_is_seen_of_the_last_reduction_is_what_the_plan_holds(candidates: CandidateSet) -> None:
    bound, tried, past_quiet = ChainBound(candidates), 0, 0
    for picks in every_pick(candidates):
        options = candidates.picked(picks)
        resting = sum(option.rest for option in options)
        moments = list(held_moments([(option, 1) for option in options], candidates.load))
        for held, stage, moment, *_ in moments:
            seen = moment.neighbours
            if moment.phase == "forward" or not seen.above or seen.below or seen.gathers_below:
                continue
            event = MemoryEvent(stage, moment.sees)
            assert bytes_of(bound, event, picks) == pytest.approx(held + resting, rel=1e-12)
            tried += 1
            past_quiet += stage + 1 < len(options) and not options[stage + 1].reduces
    assert tried
    assert past_quiet


@SLOW
@given(candidate_sets, st.floats(0.1, 10))
def test_dynamic_program_is_the_minimum_with_the_last_reduction(candidates: CandidateSet, price: float) -> None:
    bound, load = ChainBound(candidates), candidates.load
    per_byte = price * 1e-10
    picks = every_pick(candidates)
    seconds = [step_time(candidates.picked(each), load).total_s for each in picks]
    seen = candidates.columns[candidates.stage_classes[0]].highest
    events = [MemoryEvent(0, sees) for sees in seen if not sees[0] and sees[1].above and not sees[1].below]
    assert events
    for event in events:
        held = [bytes_of(bound, event, each) for each in picks]
        least = min(one + per_byte * size for one, size in zip(seconds, held, strict=True))
        found = float(bound.least(bound.stage_bytes(event), np.array([per_byte]))[0])
        assert found == pytest.approx(least, rel=1e-9)


@SLOW
@given(candidate_sets, st.floats(1.0, 1.5), st.sampled_from([1e2, 1e5]))
def test_a_price_that_is_far_too_high_still_gives_a_bound(
    candidates: CandidateSet, factor: float, too_high: float
) -> None:
    """A dual far to the right of its maximum is negative: no plan would ever have been looked for."""
    bound, event = ChainBound(candidates), events_near(candidates, None)[0]
    limit = factor * bound.least_bytes(event)
    good_s, price = bound.refined(limit, event)
    found_s, _ = bound.near(limit, event, (price or 1e-10) * too_high)
    assert 0 < found_s <= good_s * (1 + 1e-9)
