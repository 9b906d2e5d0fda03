"""A picture of a frontier, by matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from osdp.planning.plan_questions import FrontierRow
from osdp.plots import check_picture
from profiler.byte_sizes import GIB


def check_plot(path: Path) -> None:
    """Raise OsdpError if no picture can be drawn into `path`."""
    check_picture(path, "--plot", "no --plot, as the report has bars")


def plot_frontier(path: Path, rows: Sequence[FrontierRow]) -> None:
    """Draw samples per second over the memory limit: the plans, and the best uniform configuration that fits."""
    from matplotlib.figure import Figure

    plans = [row.planned for row in rows if row.planned is not None]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [p.plan.limit_bytes / GIB for p in plans],
        [p.plan.predicted.samples_per_s for p in plans],
        marker="o",
        label="OSDP",
    )
    uniform = [(p.plan.limit_bytes / GIB, best.samples_per_s) for p in plans for best in [p.best_baseline] if best]
    if uniform:
        axes.plot(*zip(*uniform, strict=True), marker="x", linestyle="--", label="best of DDP, ZeRO-2, FSDP, HSDP")
    first = plans[0].plan
    axes.set(
        title=f"{first.model.name} on {first.cluster.name}, predicted",
        xlabel="memory limit per device (GiB)",
        ylabel="samples/s",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
