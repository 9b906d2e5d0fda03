"""Memory over the step of two plans: what each holds in total, against its limit."""

from collections.abc import Sequence

from osdp.report.figure import COLOURS, IN_COLOUR_OF_TEXT, Figure, hover_text
from osdp.report.memory_curve import MemoryCurve
from profiler.byte_sizes import GIB, MIB

COLOUR_OF = {"before": COLOURS[0], "after": COLOURS[5]}


def compared_memory_figure(before: MemoryCurve, after: MemoryCurve) -> Figure:
    """Return a line for each plan's total with its peak marked, and one for each limit, or for both if equal."""
    sides = {"before": before, "after": after}
    unit_bytes, unit = (GIB, "GiB") if max(before.limit_bytes, after.limit_bytes) >= GIB else (MIB, "MiB")
    end_ms = 1e3 * max(curve.end_s for curve in sides.values())
    traces, peaks = list[dict[str, object]](), list[dict[str, object]]()
    for name, curve in sides.items():
        held = [*curve.held, curve.held[-1]]
        at_ms = [round(1e3 * time_s, 4) for time_s in (*(one.start_s for one in curve.held), curve.end_s)]
        totals = [round(one.total_bytes / unit_bytes, 5) for one in held]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": at_ms,
                "y": totals,
                "text": [hover_text([one.where]) for one in held],
                "line": {"shape": "hv", "width": 2, "color": COLOUR_OF[name]},
                "hovertemplate": f"%{{y:.2f}} {unit}, %{{text}}",
            }
        )
        peaks.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"peak {name}",
                "x": [round(1e3 * curve.peak.start_s, 4)],
                "y": [round(curve.peak.total_bytes / unit_bytes, 5)],
                "marker": {"size": 11, "color": COLOUR_OF[name]},
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
    traces += [_limit(*line, end_ms, unit_bytes, unit) for line in _limits(before, after)]
    layout = {
        "height": 420,
        "xaxis": {"title": {"text": "ms"}, "range": [0, end_ms], "unifiedhovertitle": {"text": "%{x:.1f} ms"}},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "fixedrange": True},
        "hovermode": "x unified",
    }
    return Figure([*traces, *peaks], layout)


def _limits(before: MemoryCurve, after: MemoryCurve) -> Sequence[tuple[str, int, str | None]]:
    """Return name, bytes and colour of the limits; None is the colour of text."""
    if before.limit_bytes == after.limit_bytes:
        return [("limit of both", before.limit_bytes, None)]
    return [
        ("limit before", before.limit_bytes, COLOUR_OF["before"]),
        ("limit after", after.limit_bytes, COLOUR_OF["after"]),
    ]


def _limit(
    name: str, limit_bytes: int, colour: str | None, end_ms: float, unit_bytes: int, unit: str
) -> dict[str, object]:
    line: dict[str, object] = {"dash": "dash", "width": 2}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [0, end_ms],
        "y": [round(limit_bytes / unit_bytes, 5)] * 2,
        "line": line if colour is None else line | {"color": colour},
        "meta": IN_COLOUR_OF_TEXT if colour is None else "",
        "hovertemplate": f"%{{y:.2f}} {unit}",
    }
