"""How long each rank of a training run waits for the slowest one in a step."""

from collections.abc import Sequence

from osdp.cli.reports.figures import format_seconds
from osdp.report.figure import COLOURS, Figure

FEW_RANKS = 16
"""Bars of so many lie one below the other; of more they stand side by side."""


def waiting_figure(waits_s: Sequence[float], step_s: float) -> Figure:
    """Return a bar for each rank's step: what it waits, beside the rest."""
    texts = [
        f"rank {rank} waits {format_seconds(wait_s)}, {wait_s / step_s:.1%} of a step"
        for rank, wait_s in enumerate(waits_s)
    ]
    parts = (
        ("the rest of the step", COLOURS[0], [step_s - wait_s for wait_s in waits_s]),
        ("waits", COLOURS[5], waits_s),
    )
    is_few = len(waits_s) <= FEW_RANKS
    along, across = ("y", "x") if is_few else ("x", "y")
    bars: list[dict[str, object]] = [
        {
            "type": "bar",
            "orientation": "h" if is_few else "v",
            "name": name,
            along: list(range(len(waits_s))),
            across: [round(1e3 * part_s, 5) for part_s in parts_s],
            "hovertext": texts,
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": colour},
        }
        for name, colour, parts_s in parts
    ]
    ranks = {"title": {"text": "rank"}, "tickformat": "d", "showgrid": False}
    layout: dict[str, object] = {
        "barmode": "stack",
        "height": 120 + 30 * len(waits_s) if is_few else 280,
        f"{across}axis": {"title": {"text": "ms per step"}, "rangemode": "tozero"},
        f"{along}axis": ranks | ({"tickvals": list(range(len(waits_s))), "autorange": "reversed"} if is_few else {}),
        "hovermode": "closest",
    }
    return Figure(bars, layout)
