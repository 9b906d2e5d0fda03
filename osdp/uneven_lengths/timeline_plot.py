"""A picture of timelines, by matplotlib, which is optional: a row for each rank, one picture above the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from osdp.plots import check_picture

if TYPE_CHECKING:  # The process that starts ranks checks the path without waiting for torch.
    from osdp.uneven_lengths.timeline import Activity, Timeline

COLOURS: dict[Activity, str] = {"compute": "#4c78a8", "communication": "#f2a93b", "waiting": "#d9d9d9"}
HEIGHT = 0.8
"""Of a bar, where rows are 1 apart."""


def check_plot(path: Path) -> None:
    """Raise OsdpError if no picture can be drawn into `path`."""
    check_picture(path, "--timeline", "no --timeline, as waiting is printed too")


def plot_timelines(path: Path, found: Mapping[str, Sequence[Timeline]], title: str) -> None:
    """Draw the ranks' timelines of each contestant, one under the other on the same axis of time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = sum(len(timelines) for timelines in found.values())
    figure = Figure(figsize=(10, 1.6 + 0.45 * rows + 0.5 * len(found)), layout="constrained")
    pictures = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, timelines) in zip(pictures, found.items(), strict=True):
        for rank, timeline in enumerate(timelines):
            for kind, colour in COLOURS.items():
                bars = [(span.start_s, span.end_s - span.start_s) for span in timeline.spans if span.activity == kind]
                axes.broken_barh(bars, (rank - HEIGHT / 2, HEIGHT), facecolors=colour)
        waited = ", ".join(f"{timeline.bubble_s:.3f}" for timeline in timelines)
        axes.set_title(f"{name}: waiting {waited} s", loc="left", fontsize="medium")
        axes.set_yticks(range(len(timelines)), [f"rank {rank}" for rank in range(len(timelines))])
        axes.invert_yaxis()
    pictures[-1].set_xlabel("seconds since the step began")
    figure.suptitle(title)
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        ncols=len(COLOURS),
        loc="outside lower center",
    )
    figure.savefig(path)
