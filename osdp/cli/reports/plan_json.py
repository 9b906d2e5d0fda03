"""What `osdp plan --json` prints for programs: numbers in bytes and seconds."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from osdp.cli.reports.dealing import dealing_object
from osdp.cli.reports.figures import assumed_of
from osdp.cli.reports.verdict import verdict
from osdp.planning.allocator_headroom import RETRY_S, ROOMY, TIGHT
from osdp.planning.plan_questions import FrontierRow
from osdp.planning.request import Planned, samples_with_retries_per_s
from planner.analysis.dealing import Dealing
from planner.analysis.plan_diff import HIDDEN
from planner.analysis.what_if import WhatIf

SCHEMA = "osdp.plan_report/1"
FRONTIER_SCHEMA = "osdp.frontier/1"


def plan_object(
    planned: Planned, total_s: float, more: WhatIf | None = None, dealing: Dealing | None = None
) -> dict[str, Any]:
    """Return the report as plain data; `total_s` is seconds since the command started.

    The categories of memory sum to the peak and the terms of time to the step, so communication
    that is hidden under computation is left out.  Of a baseline that does not fit, the figures are
    those of the micro-batch that needs least memory, as if there were enough.
    """
    plan, predicted = planned.plan, planned.plan.predicted
    simple = planned.found.simple
    what_if = {} if more is None else {"what_if": {**asdict(more), "binds": more.binds}}
    return {
        "schema": SCHEMA,
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "limit_bytes": plan.limit_bytes,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "predicted": {
            "peak_memory_bytes": predicted.peak_memory_bytes,
            "memory_by_category": predicted.memory_by_category,
            "peak_phase": predicted.peak_phase,
            "step_time_s": predicted.step_time_s,
            "time_by_term": {term: value for term, value in predicted.time_by_term.items() if term != HIDDEN},
            "samples_per_s": predicted.samples_per_s,
        },
        "gap": plan.gap,
        "baselines": [
            {
                "name": baseline.name,
                "recompute": bool(baseline.recompute),
                "recomputation": baseline.recompute.name.lower(),
                "feasible": baseline.feasible,
                "micro_batch": baseline.load.micro_batch,
                "peak_memory_bytes": baseline.peak_memory_bytes,
                "samples_per_s": baseline.samples_per_s,
            }
            for baseline in planned.found.baselines
        ],
        "choices": plan.choices,
        "recomputed_blocks": plan.recomputed_blocks,
        "seconds": {"trace": planned.trace_s, "search": planned.search_s, "total": total_s},
        "headroom_bytes": plan.headroom_bytes,
        "pins": plan.asked.pins,
        "not_run_yet": [],  # a published key; every strategy that is planned runs
        **what_if,
        **({} if dealing is None else {"dealing": dealing_object(dealing)}),
        "verdict": verdict(planned),
        "assumed_of_cluster": assumed_of(planned.cluster),
        "simple_samples_per_s": simple.samples_per_s if simple else None,
        "selectively_recomputed_blocks": plan.selectively_recomputed_blocks,
        "tighter": None if planned.tighter is None else _tighter(planned, planned.tighter),
        "offloaded_blocks": plan.offloaded_blocks,
    }


def _tighter(planned: Planned, tighter: Planned) -> dict[str, float]:
    """Return the plan with less headroom that is predicted to be faster, until retries are counted."""
    return {
        "headroom_bytes": tighter.plan.headroom_bytes,
        "samples_per_s": tighter.plan.predicted.samples_per_s,
        "samples_with_retries_per_s": samples_with_retries_per_s(tighter.found, TIGHT),
        "samples_with_retries_per_s_of_this": samples_with_retries_per_s(planned.found, ROOMY),
        "retries_of_a_step": TIGHT.retries,
        "retry_s": RETRY_S,
    }


def frontier_object(rows: Sequence[FrontierRow], total_s: float) -> dict[str, Any]:
    """Return a frontier as plain data; at least one limit has a plan."""
    plan = next(row.planned.plan for row in rows if row.planned)
    return {
        "schema": FRONTIER_SCHEMA,
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "frontier": [_row_object(row, total_s) for row in rows],
    }


def _row_object(row: FrontierRow, total_s: float) -> dict[str, Any]:
    """Return one limit: the plan's object, or what the smallest plan needs."""
    found: dict[str, Any] = {"limit_bytes": row.request.limit_bytes, "feasible": row.planned is not None}
    if row.planned is not None:
        return found | plan_object(row.planned, total_s) | {"taken_from_limit_bytes": row.taken_from_bytes}
    assert row.refusal is not None, "set where no plan fits"
    refusal = row.refusal.refusal
    return found | {"needed_bytes": refusal.advised_bytes or refusal.needed_bytes, "why": row.refusal.expected}
