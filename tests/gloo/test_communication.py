"""DDP sends the buckets that the planner counts; that plans send what is charged for is in test_parity.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parity import FAMILIES, Case, batches, graph_of, initial
from ranks import run_ranks

from planner.cost.ddp import buckets


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
        sent = [one.size_bytes for one in recorded if one.operation == "all_reduce"]
        found.append((sent, [bucket.size_bytes for bucket in buckets(graph_of(case.family))]))
    return found


def test_ddp_sends_the_buckets_that_the_planner_counts() -> None:
    cases = [Case(family, {}, "replicate", accumulation=2, ranks_per_node=1) for family in FAMILIES]
    for results in run_ranks(record_buckets, 2, cases, ranks_per_node=1, timeout_s=100):
        for sent, expected in results:
            assert sent == expected
