"""Curves over the steps of a training run: loss, time of a step, peak memory; each beside what was predicted."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from osdp.cli.reports.figures import format_count
from osdp.report.figure import COLOURS, IN_COLOUR_OF_TEXT, Figure
from osdp.training.reporters import Step
from planner.plan import Plan
from profiler.byte_sizes import GIB, MIB

FEW_STEPS = 10
"""So many are marked one by one."""


def loss_figure(steps: Sequence[Step]) -> Figure:
    """Return the loss, with learning rate and gradient norm where it is pointed at."""
    texts = [
        f"learning rate {step.learning_rate:.3g}"
        + ("" if step.gradient_norm is None else f", gradient norm {step.gradient_norm:.4g}")
        for step in steps
    ]
    line = _line(
        "loss",
        steps,
        [step.loss if isfinite(step.loss) else None for step in steps],
        COLOURS[0],
        texts,
        "loss %{y:.5g}<br>%{text}",
    )
    return _figure([line], "loss", from_zero=False)


def step_time_figure(steps: Sequence[Step], plan: Plan) -> Figure:
    """Return the time of the median step since the last report, and the predicted one."""
    texts = [f"{format_count(step.samples_per_s)} samples/s" for step in steps]
    times = [round(1e3 * step.step_s, 5) for step in steps]
    lines = [
        _line("measured", steps, times, COLOURS[0], texts, "%{y:.4g} ms, %{text}"),
        _level("predicted", steps, 1e3 * plan.predicted.step_time_s, "dot", "predicted %{y:.4g} ms"),
    ]
    return _figure(lines, "ms per step")


def peak_figure(steps: Sequence[Step], plan: Plan) -> Figure:
    """Return the measured peak so far, the predicted one and what the limit leaves: all without the reserve."""
    unit_bytes, unit = (GIB, "GiB") if plan.limit_bytes >= GIB else (MIB, "MiB")
    known = [step for step in steps if step.peak_bytes]
    sizes = [round(step.peak_bytes / unit_bytes, 5) for step in known]
    left_bytes = plan.limit_bytes - plan.predicted.reserve_bytes
    lines = [
        _line("measured peak", known, sizes, COLOURS[0], [""] * len(known), f"%{{y:.4g}} {unit}"),
        _level("predicted peak", steps, plan.predicted.tensors_bytes / unit_bytes, "dot", f"%{{y:.4g}} {unit}"),
        _level("limit without the reserve", steps, left_bytes / unit_bytes, "dash", f"%{{y:.4g}} {unit}"),
    ]
    return _figure(lines, unit)


def _line(
    name: str, steps: Sequence[Step], values: Sequence[float | None], colour: str, texts: Sequence[str], hover: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) < 60 else "lines",
        "name": name,
        "x": [step.number for step in steps],
        "y": list(values),
        "text": list(texts),
        "line": {"color": colour, "width": 2},
        "hovertemplate": f"step %{{x}}: {hover}<extra></extra>",
    }


def _level(name: str, steps: Sequence[Step], value: float, dash: str, hover: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [step.number for step in (*steps[:1], *steps[-1:])],
        "y": [round(value, 5)] * min(2, 2 * len(steps)),
        "line": {"dash": dash, "width": 2},
        "meta": IN_COLOUR_OF_TEXT,
        "hovertemplate": f"{name}: {hover}<extra></extra>",
    }


def _figure(lines: Sequence[Mapping[str, Any]], unit: str, *, from_zero: bool = True) -> Figure:
    numbers = lines[0]["x"]
    layout = {
        "height": 300,
        "showlegend": len(lines) > 1,
        "xaxis": {"title": {"text": "step"}} | ({"dtick": 1} if numbers and numbers[-1] <= FEW_STEPS else {}),
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero" if from_zero else "normal", "fixedrange": True},
        "hovermode": "closest",
    }
    return Figure([dict(line) for line in lines], layout)
