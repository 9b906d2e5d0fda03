"""`osdp plan`: finds the fastest plan within a memory limit, or within each of several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Context

from osdp.cli import options
from osdp.cli.exits import guarded
from osdp.cli.terminal import STARTED_S, make_console, note, print_json, progress_bar
from profiler.garbage_collection import without_garbage_collection

if TYPE_CHECKING:
    from osdp.planning.named_model import NamedModel
    from osdp.planning.request import Planned, Request
    from planner.analysis.what_if import WhatIf
    from planner.search.search import Effort
    from profiler.cluster.cluster import Cluster
    from profiler.errors import OsdpError

_NOT_OF_THE_PLAN = ("output", "plot", "html", "memory_snapshot", "timeline", "as_json", "what_if")


@guarded
@without_garbage_collection()  # walking again and again through what it imports would take a third of its time
def plan(
    context: Context,
    model: options.ModelOrNone = None,
    cluster: options.ClusterName = None,
    nodes: options.Nodes = None,
    gpus_per_node: options.GpusPerNode = None,
    mem: options.Mem = None,
    headroom: options.Headroom = None,
    pin: options.Pins = None,
    batch: options.Batch = None,
    global_batch: options.GlobalBatch = None,
    imbalance: options.Imbalance = None,
    expert_imbalance: options.ExpertImbalance = 1.0,
    seq: options.SequenceLength = None,
    precision: options.Precision = "fp32",
    master_weights: options.MasterWeights = None,
    optimizer: options.OptimizerName = None,
    optimizer_bytes_per_parameter: options.OptimizerBytes = None,
    simple: options.Simple = False,
    best: options.Best = False,
    solver: options.Solver = "labels",
    time_limit: options.TimeLimit = None,
    what_if: options.WhatIf = False,
    output: options.Output = None,
    plot: options.Plot = None,
    html: options.Html = None,
    memory_snapshot: options.MemorySnapshot = None,
    timeline: options.Timeline = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the fastest plan within a memory limit."""
    from osdp.planning.allocator_headroom import default_headroom, roomier_headroom
    from osdp.planning.clusters import choose_cluster
    from osdp.planning.imbalance_option import read_imbalance
    from osdp.planning.memory_options import parse_headroom, parse_limits
    from osdp.planning.named_model import NamedModel
    from osdp.planning.request import Request
    from planner.cost.stragglers import BALANCED
    from planner.optimizers import optimizer_name
    from planner.pins import parse_pin

    if model is None:
        raise _no_model()
    limits = None if mem is None else parse_limits(mem)
    several = limits is not None and limits.several
    views = _Views(memory_snapshot, timeline)
    views.check(several)
    _check_outputs(output, plot, what_if, several)
    if html is not None:
        from osdp.report.render import check_html

        check_html(html)
    with progress_bar():
        target, why = choose_cluster(cluster, nodes, gpus_per_node)
    limits_bytes = [_limit(target, wanted_bytes) for wanted_bytes in (limits.limits_bytes if limits else (None,))]
    request = Request(
        limits_bytes[0],
        precision,
        optimizer_name(optimizer, optimizer_bytes_per_parameter),
        batch,
        global_batch,
        headroom=default_headroom(target) if headroom is None else parse_headroom(headroom),
        roomier=roomier_headroom(target) if headroom is None else None,
        pins=tuple(parse_pin(text) for text in pin or ()),
        imbalance=BALANCED if imbalance is None else read_imbalance(imbalance),
        imbalance_as_given=imbalance or "",
        master_weights=master_weights or "",
        expert_imbalance=expert_imbalance,
        effort=_effort(solver, time_limit, several or what_if),
        style=_style(simple, best, several),
    )
    task = _PlanTask(NamedModel(model, seq), target, request, why, _how(context, why), output, html, as_json, views)
    if several:
        _plan_several(task, sorted(set(limits_bytes)), plot)
    else:
        _plan_one(task, what_if)


def _no_model() -> OsdpError:
    """Return the error of a command without a model, whose advice is an example for each kind of start."""
    from profiler.errors import OsdpError

    examples = (
        "osdp plan --model gpt2-1.5b --mem 8GB                     a model of `osdp models`, on the visible GPUs",
        "osdp plan --model my_code:make_model --cluster h100-8     a function of yours, for GPUs that are elsewhere",
        "osdp plan --model gpt2 --mem 4GB:12GB:2GB -o plans/       the fastest plan for each of several limits",
    )
    return OsdpError(
        "there is no model to plan for",
        got="no --model",
        expected=options.MODEL_HELP,
        advice="\n       ".join(examples),
    )


def _style(simple: bool, best: bool, several: bool) -> str:
    """Return the style of the plan that is wanted; raises OsdpError for two of them, and for a simple frontier."""
    from osdp.planning.request import BEST, SIMPLE
    from profiler.errors import OsdpError

    if simple and best:
        raise OsdpError("--simple and --best exclude each other", got="both", expected="one of them, or neither")
    if simple and several:
        raise OsdpError("a frontier is of the fastest plans", got="--simple and several limits", expected="one limit")
    return SIMPLE if simple else BEST if best else ""


def _effort(solver: str, time_limit_s: float | None, is_more: bool) -> Effort:
    """Return how the plan is looked for; raises OsdpError for an unknown solver, and for more than one plan."""
    from planner.search.search import MOST_MADE, Effort
    from profiler.errors import OsdpError

    if solver not in ("labels", "ilp"):
        raise OsdpError("unknown solver", got=solver, expected="labels or ilp", advice="leave --solver out")
    if is_more and (solver != "labels" or time_limit_s is not None):
        what, got = "--solver and --time-limit are of one plan", "also several limits, or --what-if"
        raise OsdpError(what, got=got, expected="one limit", advice="leave them out")
    return Effort(MOST_MADE if solver == "labels" else 0, float("inf") if time_limit_s is None else time_limit_s)


@dataclass(frozen=True)
class _Views:
    """Files of one plan for other programs to show."""

    memory_snapshot: Path | None
    timeline: Path | None

    def check(self, several: bool) -> None:
        """Raise OsdpError for several plans, and for what cannot be written, before anything takes time."""
        from osdp.planning.viewer_paths import check_viewer_paths, given
        from profiler.errors import OsdpError

        for option, _ in given(self.memory_snapshot, self.timeline):
            if several:
                raise OsdpError(f"{option} shows one plan", got="several limits in --mem", expected="one limit")
        check_viewer_paths(self.memory_snapshot, self.timeline)

    def write(self, planned: Planned) -> None:
        """Write what is asked for."""
        if self.memory_snapshot is not None:
            from osdp.planning.memory_snapshot import write_snapshot

            write_snapshot(self.memory_snapshot, planned.as_run)
        if self.timeline is not None:
            from osdp.planning.step_timeline import write_timeline

            write_timeline(self.timeline, planned.as_run)


@dataclass(frozen=True)
class _PlanTask:
    """What is planned, and where the result goes."""

    source: NamedModel
    cluster: Cluster
    request: Request
    why: str
    """Why this cluster, where the user named none."""
    how: str
    """The command, for the files of plans."""
    output: Path | None
    """File of the plan, or folder of several."""
    html: Path | None
    """File of the report for a browser."""
    as_json: bool
    views: _Views


def _check_outputs(output: Path | None, plot: Path | None, what_if: bool, several: bool) -> None:
    """Raise OsdpError for what cannot be written, before anything takes time, and for options without effect."""
    from osdp.planning.plan_file import check_output
    from osdp.plots import check_picture
    from profiler.errors import OsdpError

    if several and what_if:
        raise OsdpError("--what-if applies to one plan", got="several limits in --mem", expected="one limit")
    if not several and plot is not None:
        raise OsdpError("--plot draws a frontier, and this is one plan", expected="several limits, --mem 6GB,8GB,12GB")
    if output is not None and not several:
        check_output(output)
    if plot is not None:
        check_picture(plot, "--plot")


def _limit(cluster: Cluster, wanted_bytes: int | None) -> int:
    """Return the limit that is planned for, and say so if it is not what was asked."""
    from osdp.planning.clusters import memory_limit
    from profiler.byte_sizes import format_bytes

    limit_bytes = memory_limit(cluster, wanted_bytes)
    if wanted_bytes is not None and limit_bytes < wanted_bytes:
        driver = f"of {format_bytes(wanted_bytes)}, the driver of {cluster.device.name} leaves"
        note(f"{driver} {format_bytes(limit_bytes)} to programs: planning for that")
    return limit_bytes


def _how(context: Context, why: str) -> str:
    """Return the command that made a plan, for the plan's file."""
    import shlex

    from osdp import __version__

    words = ["osdp", "plan"]
    for name, value in context.params.items():
        if name in _NOT_OF_THE_PLAN or value is None or value is False:
            continue
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
            continue
        for one in value if isinstance(value, list | tuple) else (value,):
            words += [f"--{name.replace('_', '-')}", str(one)]
    cluster = f"\nThe cluster is {why}." if why else ""
    return f"Made by osdp {__version__}; every figure is predicted.\n{shlex.join(words)}{cluster}"


def _plan_one(task: _PlanTask, what_if: bool) -> None:
    """Find one plan; write it and print it."""
    from osdp.planning.plan_questions import dealing_planned, what_if_planned
    from osdp.planning.request import plan_model

    with progress_bar() as progress:
        planned = plan_model(task.source, task.cluster, task.request, progress)
        more = what_if_planned(planned, progress) if what_if else None
        dealing = dealing_planned(planned, progress)
    if task.output is not None:
        from osdp.planning.plan_file import write_plan

        write_plan(task.output, planned.plan, task.how)
    _write_html(task, [planned], more=more)
    task.views.write(planned)
    total_s = time.perf_counter() - STARTED_S
    if task.as_json:
        from osdp.cli.reports.plan_json import plan_object

        print_json(plan_object(planned, total_s, more, dealing))
    else:
        from osdp.cli.reports.plan import Circumstances, print_plan

        print_plan(make_console(), planned, Circumstances(total_s, task.why, str(task.output or ""), more, dealing))


def _write_html(
    task: _PlanTask, found: Sequence[Planned], refused: Sequence[str] = (), more: WhatIf | None = None
) -> None:
    """Write the report for a browser, if one was asked for."""
    if task.html is None:
        return
    from osdp.report.contents import make_report
    from osdp.report.render import write_report

    with progress_bar() as progress:
        progress("writing the report", 0.0)
        write_report(task.html, make_report(found, task.how, refused, more))
    note(f"report written to {task.html}")


# --- several limits --------------------------------------------------------------------------


def _plan_several(task: _PlanTask, limits: Sequence[int], plot: Path | None) -> None:
    """Find the plans of several limits; write, draw and print them.  Raises OsdpError if none fits."""
    from osdp.cli.reports.frontier import print_frontier
    from osdp.cli.reports.plan import Circumstances
    from osdp.cli.reports.plan_json import frontier_object
    from osdp.planning.plan_file import write_plan
    from osdp.planning.plan_questions import plan_frontier
    from osdp.plots import plot_frontier

    if task.output is not None:
        _check_folder(task.output, limits)
    with progress_bar() as progress:
        rows = plan_frontier(task.source, task.cluster, task.request, limits, progress)
    if rows[-1].refusal is not None and not any(row.planned for row in rows):
        raise rows[-1].refusal
    if task.output is not None:
        task.output.mkdir(exist_ok=True)
        for row in rows:
            if row.planned is not None:
                write_plan(task.output / _file_name(row.request.limit_bytes), row.planned.plan, task.how)
    if plot is not None:
        plot_frontier(plot, rows)
        note(f"drawn into {plot}")
    found, refusals = [row.planned for row in rows if row.planned], [row.refusal for row in rows if row.refusal]
    _write_html(task, found, [str(refusal.what) for refusal in refusals])
    total_s = time.perf_counter() - STARTED_S
    if task.as_json:
        print_json(frontier_object(rows, total_s))
    else:
        print_frontier(make_console(), rows, Circumstances(total_s, task.why, str(task.output or "")))


def _file_name(limit_bytes: int) -> str:
    """Return the name of the plan of one limit: `8GB.yaml`, `7680MB.yaml`."""
    from profiler.byte_sizes import GIB, MIB

    units = ((GIB, "GB"), (MIB, "MB"), (1, "B"))
    return next(f"{limit_bytes // size}{unit}.yaml" for size, unit in units if limit_bytes % size == 0)


def _check_folder(folder: Path, limits: Sequence[int]) -> None:
    """Raise OsdpError if the plans cannot be written into a folder; it need not be there yet."""
    from osdp.planning.plan_file import check_output
    from profiler.errors import OsdpError

    if folder.is_file() or folder.suffix in (".yaml", ".yml"):
        raise OsdpError(f"{folder} cannot hold several plans", got="a file", expected="a folder, such as plans/")
    if not folder.parent.is_dir():
        got, advice = f"no directory {folder.parent}", f"mkdir -p {folder.parent}"
        raise OsdpError(f"{folder} cannot be made", got=got, advice=advice)
    if folder.is_dir():
        for limit_bytes in limits:
            check_output(folder / _file_name(limit_bytes))
