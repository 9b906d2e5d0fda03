"""The step on two streams: what the simulator runs when, and where computation waits for communication."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from osdp.cli.reports.figures import format_seconds
from osdp.report.figure import COLOURS, HATCHED, Figure, hover_text
from planner.analysis.explain import OpenPlan
from planner.cost.simulator import Event, simulate
from planner.cost.stage_option import StageCandidate

EXPOSED = "compute waits"
COLOUR_OF = {
    "forward": COLOURS[0],
    "backward": COLOURS[4],
    "copy-in": COLOURS[7],
    "optimizer": COLOURS[2],
    "all-gather": COLOURS[1],
    "reduce-scatter": COLOURS[3],
    "all-reduce": COLOURS[6],
    "exposed": COLOURS[8],
    "waiting": COLOURS[8],
    EXPOSED: COLOURS[5],
}
STREAMS = ("all-reduce", "communication", "compute")
"""From below."""


@dataclass(frozen=True)
class Span:
    """One task on one stream."""

    stream: str
    task: str
    """What it is, such as `forward` or `all-gather`."""
    part: str
    """Block, or operator outside blocks; empty where it is of the whole step."""
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class StepStreams:
    """The last micro-batch of a step and the optimizer, as the simulator plays them."""

    spans: tuple[Span, ...]
    """In order of issue, without those that take no time."""
    micro_batches: int
    """Of a step; the last of them is shown."""

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def communication_s(self) -> float:
        """Seconds of collectives."""
        return sum(span.duration_s for span in self.spans if span.stream != "compute")

    @property
    def waits(self) -> tuple[Span, ...]:
        """Where the compute stream is idle."""
        computing = [span for span in self.spans if span.stream == "compute"]
        found, free_s = [], 0.0
        for span in computing:
            if span.start_s - free_s > 1e-9 * self.end_s:
                found.append(Span("compute", EXPOSED, span.part, free_s, span.start_s))
            free_s = max(free_s, span.end_s)
        return tuple(found)

    @property
    def waiting_s(self) -> float:
        """Seconds in which the compute stream is idle."""
        return sum(span.duration_s for span in self.waits)


def step_streams(view: OpenPlan, options: Sequence[StageCandidate]) -> StepStreams:
    """Return the spans of a plan, one option per stage in execution order."""
    parts = part_of_segments(view, options)
    events = simulate(options, replace(view.load, accumulation=1))
    return StepStreams(
        tuple(_span(event, parts) for event in events if event.end_s > event.start_s), view.load.accumulation
    )


def part_of_segments(view: OpenPlan, options: Sequence[StageCandidate]) -> list[str]:
    """Return the name of the stage that each segment is of."""
    pairs = zip(view.space.model.stages, options, strict=True)
    return [stage.name for stage, option in pairs for _ in option.segments]


def _span(event: Event, parts: Sequence[str]) -> Span:
    is_whole = event.segment < 0 or event.label == "optimizer"
    return Span(event.stream, event.label, "" if is_whole else parts[event.segment], event.start_s, event.end_s)


def streams_figure(streams: StepStreams) -> Figure:
    """Return the spans as bars over time, one row for each stream."""
    shown = [*streams.spans, *streams.waits]
    traces = []
    for task, colour in COLOUR_OF.items():
        spans = [span for span in shown if span.task == task]
        if not spans:
            continue
        texts = [
            hover_text(
                [
                    f"{task} {span.part}".strip(),
                    f"{format_seconds(span.duration_s)}, from {format_seconds(span.start_s)}",
                ]
            )
            for span in spans
        ]
        marker: dict[str, object] = {"color": colour}
        if task == EXPOSED:
            marker["pattern"] = {"shape": "x", "size": 5, **HATCHED}
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": task,
                "y": [span.stream for span in spans],
                "base": [round(1e3 * span.start_s, 4) for span in spans],
                "x": [round(1e3 * span.duration_s, 4) for span in spans],
                "hovertext": texts,
                "hovertemplate": "%{hovertext}<extra></extra>",
                "marker": marker,
            }
        )
    rows = [stream for stream in STREAMS if any(span.stream == stream for span in streams.spans)]
    layout = {
        "barmode": "overlay",
        "bargap": 0.15,
        "height": 130 + 60 * len(rows),
        "xaxis": {"title": {"text": "ms"}, "range": [0, 1e3 * streams.end_s]},
        "yaxis": {"categoryorder": "array", "categoryarray": rows, "fixedrange": True},
        "hovermode": "closest",
    }
    return Figure(traces, layout)
