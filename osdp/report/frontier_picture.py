"""The frontier: samples per second over the memory limit, with the uniform configurations as lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from osdp.planning.request import Planned
from osdp.report.figure import COLOURS, Figure
from profiler.byte_sizes import GIB


@dataclass(frozen=True)
class FrontierPoint:
    """What one limit allows."""

    limit_bytes: int
    samples_per_s: float
    uniform: dict[str, float]
    """Samples per second of every kind of uniform configuration that fits, by name."""


def frontier_point(planned: Planned) -> FrontierPoint:
    """Return the point of one plan, with the fastest of each kind of uniform configuration that fits."""
    uniform: dict[str, float] = {}
    for baseline in planned.found.baselines:
        if baseline.feasible:
            uniform[baseline.name] = max(uniform.get(baseline.name, 0.0), baseline.samples_per_s)
    return FrontierPoint(planned.plan.limit_bytes, planned.plan.predicted.samples_per_s, uniform)


def frontier_figure(points: Sequence[FrontierPoint]) -> Figure:
    """Return a line for the plans and one for each uniform configuration; the first trace marks the plan shown."""
    limits = [point.limit_bytes / GIB for point in points]
    names = dict.fromkeys(name for point in points for name in point.uniform)

    def line(name: str, found: list[float | None], colour: str, dash: str) -> dict[str, object]:
        return {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": limits,
            "y": found,
            "line": {"color": colour, "dash": dash},
            "hovertemplate": f"{name}: %{{y:.4g}} samples/s in %{{x:.4g}} GiB<extra></extra>",
        }

    shown = {
        "type": "scatter",
        "mode": "markers",
        "name": "plan shown",
        "x": limits[:1],
        "y": [points[0].samples_per_s],
        "marker": {"size": 16, "symbol": "circle-open", "color": COLOURS[5], "line": {"width": 3}},
        "hoverinfo": "skip",
    }
    plans = line("OSDP", [point.samples_per_s for point in points], COLOURS[0], "solid")
    uniform = [
        line(name, [point.uniform.get(name) for point in points], colour, "dot")
        for name, colour in zip(names, COLOURS[1:] * len(names), strict=False)
    ]
    layout = {
        "height": 380,
        "xaxis": {"title": {"text": "memory limit per device (GiB)"}},
        "yaxis": {"title": {"text": "samples/s"}, "rangemode": "tozero", "fixedrange": True},
        "hovermode": "closest",
    }
    return Figure([shown, plans, *uniform], layout)
