"""A plan's predicted step as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open.

The events are those of `planner.cost.simulator`: the last one ends at the plan's predicted step time.
"""

import json
from pathlib import Path
from typing import Any

from planner.cost.simulator import Event, simulate
from planner.pricing import PricedPlan
from profiler.yaml_files import write_text_atomic

_THREADS = {"compute": "computation", "communication": "communication", "all-reduce": "communication: all-reduce"}
"""What each stream of the simulator is called."""


def write_timeline(path: Path, plan: PricedPlan) -> None:
    """Write the predicted trace of a step of a plan as it runs. Raises OsdpError if it cannot be written."""
    write_text_atomic(path, json.dumps(timeline(plan), allow_nan=False))


def timeline(plan: PricedPlan) -> dict[str, Any]:
    """Return the predicted trace of a step as plain data; times in microseconds, as the format has them."""
    parts = _parts(plan)
    numbers = {stream: number for number, stream in enumerate(_THREADS)}
    events = [event for event in simulate(plan.options, plan.load) if event.end_s > event.start_s]
    used = [stream for stream in _THREADS if any(event.stream == stream for event in events)]
    names = [("process_name", 0, "predicted step of one rank")]
    names += [("thread_name", numbers[stream], _THREADS[stream]) for stream in used]
    return {
        "traceEvents": [
            *({"ph": "M", "name": what, "pid": 0, "tid": tid, "args": {"name": name}} for what, tid, name in names),
            *(_entry(event, numbers[event.stream], parts) for event in events),
        ],
        "displayTimeUnit": "ms",
        "metadata": {"source": "predicted by osdp", "step_time_s": max(event.end_s for event in events)},
    }


def _entry(event: Event, thread: int, parts: list[tuple[str, list[str]]]) -> dict[str, Any]:
    part, operators = parts[event.segment] if event.segment >= 0 else ("", [])
    return {
        "ph": "X",
        "name": f"{event.label} {part}".rstrip(),
        "cat": event.label,
        "pid": 0,
        "tid": thread,
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": {"operators": operators},
    }


def _parts(plan: PricedPlan) -> list[tuple[str, list[str]]]:
    """Return the name of each segment, and the operators of its stage; a stage of several units has several."""
    operators, found = plan.space.model.graph.operators, []
    for stage, option in zip(plan.space.model.stages, plan.options, strict=True):
        named = [operators[index].name for index in dict.fromkeys(call.operator for call in stage.calls)]
        count = len(option.segments)
        for number in range(1, count + 1):
            found.append((stage.name if count == 1 else f"{stage.name} ({number} of {count})", named))
    return found
