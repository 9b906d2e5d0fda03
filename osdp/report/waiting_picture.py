"""How long each rank of a training run waits for the slowest one in a step."""

from collections.abc import Sequence

from osdp.cli.reports.figures import format_seconds
from osdp.report.figure import COLOURS, Figure

FEW_RANKS = 16
"""Bars of fewer ranks are as wide as those of so many."""


def waiting_figure(waits_s: Sequence[float], step_s: float) -> Figure:
    """Return a bar for each rank's step: what it waits, on top of the rest."""
    texts = [
        f"rank {rank} waits {format_seconds(wait_s)}, {wait_s / step_s:.1%} of a step"
        for rank, wait_s in enumerate(waits_s)
    ]
    parts = (
        ("the rest of the step", COLOURS[0], [step_s - wait_s for wait_s in waits_s]),
        ("waits", COLOURS[5], waits_s),
    )
    bars: list[dict[str, object]] = [
        {
            "type": "bar",
            "name": name,
            "x": list(range(len(waits_s))),
            "y": [round(1e3 * part_s, 5) for part_s in parts_s],
            "hovertext": texts,
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": colour},
        }
        for name, colour, parts_s in parts
    ]
    is_few = len(waits_s) <= FEW_RANKS
    axis = {"title": {"text": "rank"}, "range": [-0.5, max(FEW_RANKS, len(waits_s)) - 0.5], "tickformat": "d"}
    layout = {
        "barmode": "stack",
        "height": 260,
        "xaxis": axis | ({"tickvals": list(range(len(waits_s)))} if is_few else {}),
        "yaxis": {"title": {"text": "ms per step"}, "rangemode": "tozero", "fixedrange": True},
        "hovermode": "closest",
    }
    return Figure(bars, layout)
