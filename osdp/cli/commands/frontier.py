"""`osdp plan` with several memory limits: the frontier of memory against samples per second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from osdp.cli import STARTED_S
from osdp.cli.terminal import make_console, note, progress_bar
from osdp.planning.plan_questions import FrontierRow, plan_frontier
from osdp.planning.request import check_output, write_plan
from profiler.byte_sizes import GIB, MIB
from profiler.errors import OsdpError

if TYPE_CHECKING:
    from osdp.cli.commands.plan import Outputs, Question


def answer_several(question: Question, limits_bytes: Sequence[int], to: Outputs) -> None:
    """Find the plans of several limits; write and print them.  Raises OsdpError if none fits."""
    limits = sorted(set(limits_bytes))
    if to.output is not None:
        _check_folder(to.output, limits)
    if to.plot is not None:
        from osdp.cli.reports.frontier_plot import check_plot

        check_plot(to.plot)
    with progress_bar() as progress:
        rows = plan_frontier(question.source, question.cluster, question.request, limits, progress)
    *_, last = rows
    if last.refusal is not None and not any(row.planned for row in rows):
        raise last.refusal
    if to.output is not None:
        _write(to.output, rows, question.how)
    if to.plot is not None:
        from osdp.cli.reports.frontier_plot import plot_frontier

        plot_frontier(to.plot, rows)
        note(f"drawn into {to.plot}")
    _print(rows, question.why, to)


def _print(rows: Sequence[FrontierRow], why: str, to: Outputs) -> None:
    total_s = time.perf_counter() - STARTED_S
    if to.as_json:
        from osdp.cli.reports.plan_json import frontier_json

        print(frontier_json(rows, total_s))
        return
    from osdp.cli.reports.frontier import print_frontier
    from osdp.cli.reports.plan import Circumstances

    print_frontier(make_console(), rows, Circumstances(total_s, why, str(to.output or "")))


def file_name(limit_bytes: int) -> str:
    """Return the name of the plan of one limit: `8GB.yaml`, `7680MB.yaml`."""
    for unit_bytes, unit in ((GIB, "GB"), (MIB, "MB")):
        if limit_bytes % unit_bytes == 0:
            return f"{limit_bytes // unit_bytes}{unit}.yaml"
    return f"{limit_bytes}B.yaml"


def _check_folder(folder: Path, limits: Sequence[int]) -> None:
    """Raise OsdpError if the plans cannot be written into a folder; it need not be there yet."""
    if folder.is_file() or folder.suffix in (".yaml", ".yml"):
        raise OsdpError(f"{folder} cannot hold several plans", got="a file", expected="a folder, such as plans/")
    if not folder.parent.is_dir():
        raise OsdpError(
            f"{folder} cannot be made", got=f"no directory {folder.parent}", advice=f"mkdir -p {folder.parent}"
        )
    if folder.is_dir():
        for limit_bytes in limits:
            check_output(folder / file_name(limit_bytes))


def _write(folder: Path, rows: Sequence[FrontierRow], how: str) -> None:
    folder.mkdir(exist_ok=True)
    for row in rows:
        if row.planned is not None:
            write_plan(folder / file_name(row.request.limit_bytes), row.planned.plan, how)
