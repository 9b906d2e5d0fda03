"""Memory over the step: what is held while each part runs forward and backward, by category, against the limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from osdp.plots import MEMORY_ORDER
from osdp.report.figure import COLOURS, IN_COLOUR_OF_TEXT, Figure, hover_text
from osdp.report.step_streams import StepStreams
from planner.analysis.explain import OpenPlan
from planner.cost.memory_over_step import highest_of_stages
from planner.cost.stage_option import StageCandidate
from profiler.byte_sizes import GIB, MIB, format_bytes

CATEGORIES = ("reserve", *MEMORY_ORDER)
"""From below."""
COLOUR_OF = dict(zip(CATEGORIES, (COLOURS[8], *COLOURS[:7]), strict=True))
NO_BYTES = 0.5
"""Less than this is rounding of sums."""


@dataclass(frozen=True)
class Held:
    """The highest memory while one part of the model runs forward or backward, or in the optimizer's step."""

    start_s: float
    """Since the start of the micro-batch."""
    phase: str
    """`forward`, `backward` or `optimizer`."""
    where: str
    """Phase and operator, as plans name their peak."""
    part: str
    """Block, or operator outside blocks; empty for the optimizer."""
    categories: dict[str, int]
    """Bytes by category."""

    @property
    def total_bytes(self) -> int:
        return sum(self.categories.values())


@dataclass(frozen=True)
class MemoryCurve:
    """Memory over a micro-batch and the optimizer's step."""

    held: tuple[Held, ...]
    """In the order of the step."""
    end_s: float
    limit_bytes: int
    tracked_bytes: int | None = None
    """The peak of a step that was run, with what is reserved of the prediction; None if none was."""
    tracked: tuple[int | None, ...] = ()
    """Of a step that was run, the same for each of `held`, in total; None where nothing is known."""
    tracked_name: str = ""
    """What that line is called."""

    @property
    def peak(self) -> Held:
        """The highest of them, the first of equals."""
        return max(self.held, key=lambda held: held.total_bytes)

    @property
    def categories(self) -> tuple[str, ...]:
        """Categories that are ever held, from below."""
        return tuple(name for name in CATEGORIES if any(one.categories.get(name, 0) > NO_BYTES for one in self.held))


def memory_curve(view: OpenPlan, options: Sequence[StageCandidate], streams: StepStreams) -> MemoryCurve:
    """Return the curve of a plan, one option per stage in execution order, at the times of the simulator."""
    starts = _starts(view, streams)
    found, free_s = list[Held](), 0.0
    for peak in highest_of_stages(options, view.load):
        operator = view.space.operator_at(peak)
        part = "" if peak.stage is None else view.space.model.stages[peak.stage].name
        where = f"{peak.phase} of {operator.name}" if operator else peak.phase
        phase = peak.phase if peak.phase in ("forward", "optimizer") else "backward"
        if found:  # The first part holds its gather from the start.
            free_s = max(free_s, starts.get((phase, part), free_s))
        found.append(Held(free_s, phase, where, part, {name: round(size) for name, size in peak.categories.items()}))
    return MemoryCurve(tuple(found), streams.end_s, view.plan.limit_bytes)


def _starts(view: OpenPlan, streams: StepStreams) -> dict[tuple[str, str], float]:
    """Return when each part's forward and backward begin, and the optimizer's step."""
    found: dict[tuple[str, str], float] = {}
    for span in streams.spans:
        found.setdefault((span.task, span.part), span.start_s)
    return found


def memory_figure(curve: MemoryCurve) -> Figure:
    """Return stacked areas by category, the limit as a line and the peak by its name."""
    unit_bytes, unit = (GIB, "GiB") if curve.limit_bytes >= GIB else (MIB, "MiB")
    at_ms = [round(1e3 * time_s, 4) for time_s in (*(held.start_s for held in curve.held), curve.end_s)]
    held = [*curve.held, curve.held[-1]]
    traces: list[dict[str, object]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "held",
            "name": name.replace("_", " "),
            "x": at_ms,
            "y": [round(one.categories.get(name, 0) / unit_bytes, 5) for one in held],
            "line": {"shape": "hv", "width": 0, "color": COLOUR_OF[name]},
            "fillcolor": COLOUR_OF[name],
            "hovertemplate": f"%{{y:.2f}} {unit}",
        }
        for name in curve.categories
    ]
    totals = [round(one.total_bytes / unit_bytes, 5) for one in held]
    where, hover = [hover_text([one.where]) for one in held], f"%{{y:.2f}} {unit}"
    total = _line("in total", at_ms, totals, hover + ", %{text}", shape="hv", width=1)
    traces.append({**total, "text": where, "showlegend": False})
    if curve.tracked:
        sizes = [None if size is None else round(size / unit_bytes, 5) for size in (*curve.tracked, curve.tracked[-1])]
        traces.append(_line(curve.tracked_name, at_ms, sizes, hover, shape="hv", width=2.5, dash="dot"))
    lines = (("limit", curve.limit_bytes, "dash"), ("tracked peak", curve.tracked_bytes, "dashdot"))
    traces += [
        _line(name, [0, at_ms[-1]], [round(size_bytes / unit_bytes, 5)] * 2, hover, dash=dash, width=2)
        for name, size_bytes, dash in lines
        if size_bytes is not None
    ]
    peak = curve.peak
    label = hover_text([f"peak {format_bytes(peak.total_bytes)}", peak.where])
    is_late = peak.start_s > curve.end_s / 2
    layout = {
        "height": 420,
        "xaxis": {"title": {"text": "ms"}, "range": [0, at_ms[-1]], "unifiedhovertitle": {"text": "%{x:.1f} ms"}},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "fixedrange": True},
        "hovermode": "x unified",
        "annotations": [
            {
                "x": round(1e3 * peak.start_s, 4),
                "y": round(peak.total_bytes / unit_bytes, 5),
                "text": label,
                "showarrow": True,
                "ax": -70 if is_late else 70,
                "ay": 60,
                "align": "left",
                "borderpad": 3,
            }
        ],
    }
    return Figure(traces, layout)


def _line(name: str, x: Sequence[float], y: Sequence[float | None], hover: str, **line: object) -> dict[str, object]:
    """Return a line in the colour of text."""
    look = {"type": "scatter", "mode": "lines", "meta": IN_COLOUR_OF_TEXT}
    return {**look, "name": name, "x": x, "y": y, "line": line, "hovertemplate": hover}
