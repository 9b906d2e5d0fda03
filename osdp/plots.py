"""Pictures, by matplotlib, which is optional: a frontier, the memory of a step, timelines of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.byte_sizes import GIB, MIB
from profiler.errors import OsdpError, install_advice

if TYPE_CHECKING:  # What checks a path before it starts ranks does not wait for torch.
    from osdp.planning.plan_questions import FrontierRow
    from osdp.uneven_lengths.timeline import Activity, Timeline

FORMATS = (".png", ".svg", ".pdf")
MEMORY_ORDER = (
    "parameters",
    "optimizer",
    "gradients",
    "unsharded_parameters",
    "communication_buffers",
    "activations",
    "optimizer_temporaries",
)
"""Categories from below, those that live between steps first."""
COLOURS: dict[Activity, str] = {"compute": "#4c78a8", "communication": "#f2a93b", "waiting": "#d9d9d9"}
BAR_HEIGHT = 0.8
"""Where rows are 1 apart."""


@dataclass(frozen=True)
class Moment:
    """The live bytes from a moment on."""

    at_s: float
    """Since the start of the step."""
    categories: dict[str, int]
    """Bytes by category."""


def check_drawing(what: str, otherwise: str = "") -> None:
    """Raise OsdpError, for `what`, if matplotlib is not installed; `otherwise` is what to do without."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        advice = install_advice("plot") + otherwise
        raise OsdpError(f"{what} needs matplotlib, which is not installed", advice=advice) from None


def check_picture(path: Path, option: str) -> None:
    """Raise OsdpError if no picture can be drawn into `path`, which was given by `option`."""
    check_drawing(option, f"; or leave {option} out")
    if path.suffix not in FORMATS:
        what = f"{path} cannot be drawn: its format is not supported"
        raise OsdpError(what, got=path.suffix or "no suffix", expected=", ".join(FORMATS))
    if not path.parent.is_dir():
        raise OsdpError(f"{path} cannot be written", got="no such directory", advice=f"mkdir -p {path.parent}")


def plot_frontier(path: Path, rows: Sequence[FrontierRow]) -> None:
    """Draw samples per second over the memory limit: the plans, and the best uniform configuration that fits."""
    from matplotlib.figure import Figure

    plans = [row.planned for row in rows if row.planned is not None]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    limits, speeds = zip(*((p.plan.limit_bytes / GIB, p.plan.predicted.samples_per_s) for p in plans), strict=True)
    axes.plot(limits, speeds, marker="o", label="OSDP")
    uniform = [(p.plan.limit_bytes / GIB, best.samples_per_s) for p in plans for best in [p.best_baseline] if best]
    if uniform:
        axes.plot(*zip(*uniform, strict=True), marker="x", linestyle="--", label="best of DDP, ZeRO-2, FSDP, HSDP")
    first = plans[0].plan
    title = f"{first.model.name} on {first.cluster.name}, predicted"
    axes.set(title=title, xlabel="memory limit per device (GiB)", ylabel="samples/s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def plot_timelines(path: Path, found: Mapping[str, Sequence[Timeline]], title: str) -> None:
    """Draw the ranks' timelines of each contestant, one under the other on the same axis of time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = sum(len(timelines) for timelines in found.values())
    figure = Figure(figsize=(10, 1.6 + 0.45 * rows + 0.5 * len(found)), layout="constrained")
    pictures = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, timelines) in zip(pictures, found.items(), strict=True):
        for rank, timeline in enumerate(timelines):
            for what, colour in COLOURS.items():
                bars = [(span.start_s, span.end_s - span.start_s) for span in timeline.spans if span.activity == what]
                axes.broken_barh(bars, (rank - BAR_HEIGHT / 2, BAR_HEIGHT), facecolors=colour)
        waited = ", ".join(f"{timeline.bubble_s:.3f}" for timeline in timelines)
        axes.set_title(f"{name}: waiting {waited} s", loc="left", fontsize="medium")
        axes.set_yticks(range(len(timelines)), [f"rank {rank}" for rank in range(len(timelines))])
        axes.invert_yaxis()
    pictures[-1].set_xlabel("seconds since the step began")
    figure.suptitle(title)
    handles = [Patch(color=colour, label=activity) for activity, colour in COLOURS.items()]
    figure.legend(handles=handles, ncols=len(COLOURS), loc="outside lower center")
    figure.savefig(path)


def draw_memory(path: Path, moments: Sequence[Moment], title: str, predicted_bytes: float | None = None) -> None:
    """Draw the bytes that live over a step by category, and the peak that was predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name in MEMORY_ORDER if any(moment.categories.get(name) for moment in moments)]
    rows = [[moment.categories.get(name, 0) / MIB for moment in moments] for name in names]
    at_ms = [1e3 * moment.at_s for moment in moments]
    axes.stackplot(at_ms, rows, labels=[name.replace("_", " ") for name in names], step="post")
    peak_mib = max(map(sum, zip(*rows, strict=True)))
    if predicted_bytes is not None:
        axes.axhline(predicted_bytes / MIB, color="black", linestyle="--", label="peak, predicted")
    xlabel = "ms since the start of the step, slowed down by counting"
    axes.set(title=f"{title}: live tensors, at most {peak_mib:,.1f} MiB", ylabel="MiB", xlabel=xlabel)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    whole = path.with_suffix(f".{os.getpid()}.tmp.png")
    figure.savefig(whole, dpi=110)
    whole.replace(path)
