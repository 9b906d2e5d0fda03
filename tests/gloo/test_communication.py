"""What is sent at run time is what the planner charges for: kind, group, bytes, count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mixtures import mixtures
from parity import FAMILIES, Case, alone, batches, blocks_of, graph_of, initial
from ranks import run_ranks

from planner.cost.ddp import buckets

Sent = Counter[tuple[str, int, int, int]]
"""How often: kind, ranks, stride between them, bytes of the whole tensor."""


def step(model: Any, case: Case, rank: int) -> None:
    """Run forward and backward of a step."""
    for micro_batch in batches(case.family, case.world_size, case.accumulation, steps=1)[0]:
        args, kwargs = micro_batch[rank]
        model(*args, **kwargs).backward()


def record_buckets(rank: int, cases: Sequence[Case]) -> list[tuple[list[int], list[int]]]:
    """Return the bytes of every all-reduce of a second step under DDP, and of the planner's buckets."""
    from osdp import OSDP
    from runtime.observe.collective_log import record_collectives

    found = []
    for case in cases:
        model = OSDP(initial(case.family), case.plan())
        assert model.schedule.by_ddp
        step(model, case, rank)
        with record_collectives() as recorded:
            step(model, case, rank)
        sent = [one.size_bytes for one in recorded if one.kind == "all_reduce"]
        found.append((sent, [bucket.size_bytes for bucket in buckets(graph_of(case.family))]))
    return found


def record(rank: int, cases: Sequence[Case]) -> list[tuple[Sent, Sent, bool]]:
    """Return what was sent in a step, what the schedule says, and whether DDP ran it."""
    from osdp import OSDP
    from runtime.observe.collective_log import record_collectives

    found = []
    for case in cases:
        model = OSDP(initial(case.family), case.plan())
        with record_collectives() as recorded:
            step(model, case, rank)
        sent: Sent = Counter()
        for one in recorded:
            stride = one.ranks[1] - one.ranks[0] if len(one.ranks) > 1 else 1
            # Groups of one rank send nothing.
            if len(one.ranks) > 1:
                sent[one.kind, len(one.ranks), stride, one.size_bytes] += 1
        charged: Sent = Counter()
        # One-sided units send nothing before the optimizer steps (tests/gloo/test_odc.py).
        waiting = tuple(unit for unit in model.schedule.units if not unit.strategy.spec.one_sided)
        for collective, count in replace(model.schedule, units=waiting).collectives().items():
            charged[collective.operation, collective.ranks, collective.stride, collective.size_bytes] += count
        found.append((sent, charged, model.schedule.by_ddp))
    return found


def check(cases: Sequence[Case]) -> None:
    """Compare the cases on every rank."""
    by_rank = run_ranks(record, 4, cases, ranks_per_node=2, timeout_s=60 + 10 * len(cases))
    for results in by_rank:
        for case, (sent, charged, by_ddp) in zip(cases, results, strict=True):
            if by_ddp:
                # Its buckets join units, so that only kind, group and sum of bytes can agree.
                assert total(sent) == total(charged), case
            else:
                assert sent == charged, case


def total(sent: Sent) -> Counter[tuple[str, int, int]]:
    """Return the bytes by kind and group."""
    sums: Counter[tuple[str, int, int]] = Counter()
    for (kind, ranks, stride, size_bytes), count in sent.items():
        sums[kind, ranks, stride] += size_bytes * count
    return sums


def test_ddp_sends_the_buckets_that_the_planner_counts() -> None:
    cases = [Case(family, {}, "replicate", accumulation=2) for family in FAMILIES]
    for results in run_ranks(record_buckets, 4, cases, ranks_per_node=2, timeout_s=100):
        for sent, expected in results:
            assert sent == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_alone(family: str) -> None:
    check([Case(family, {}, name, accumulation=2) for name in alone()])


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_gather_no_more(family: str) -> None:
    check([Case(family, {}, name, recomputed=tuple(blocks_of(family))) for name in alone()])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_random_mixtures(family: str, precision: str, data: st.DataObject) -> None:
    check(data.draw(st.lists(mixtures(family, precision), min_size=2, max_size=2)))
