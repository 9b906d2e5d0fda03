"""What `osdp plan --json` prints for programs: numbers in bytes and seconds."""

from __future__ import annotations

import json
from typing import Any

from osdp.cli.plan_report import HIDDEN
from osdp.planning import Planned

SCHEMA = "osdp.plan_report/1"


def plan_json(planned: Planned, total_s: float) -> str:
    """Return the report as one JSON object; `total_s` is seconds since the command started."""
    return json.dumps(plan_object(planned, total_s), indent=2, allow_nan=False)


def plan_object(planned: Planned, total_s: float) -> dict[str, Any]:
    """Return the report as plain data.

    The categories of memory sum to the peak and the terms of time to the step, so communication
    that is hidden under computation is left out.  Of a baseline that does not fit, the figures are
    those of the micro-batch that needs least memory, as if there were enough.
    """
    plan, predicted = planned.plan, planned.plan.predicted
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
                "recompute": baseline.recompute,
                "feasible": baseline.feasible,
                "micro_batch": baseline.load.micro_batch,
                "peak_memory_bytes": baseline.peak_memory_bytes,
                "samples_per_s": baseline.samples_per_s,
            }
            for baseline in planned.found.baselines
        ],
        "choices": plan.choices,
        "recomputed_blocks": plan.recomputed_blocks,
        "seconds": {"trace": planned.trace_s, "search": planned.found.search_s, "total": total_s},
    }
