"""`osdp plan`: the command that finds the fastest plan within a memory limit, or within each of several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from osdp.cli import STARTED_S, options
from osdp.cli.exits import guarded
from osdp.cli.terminal import make_console, note, progress_bar

if TYPE_CHECKING:
    from osdp.planning.request import Planned, Request
    from planner.analysis.what_if import WhatIf
    from profiler.cluster.cluster import Cluster
    from profiler.model_source import ModelSource

_NOT_OF_THE_PLAN = ("output", "plot", "as_json", "what_if")
"""Options that change nothing of the plan."""


@guarded
def plan(
    context: typer.Context,
    model: options.Model,
    cluster: options.ClusterName = None,
    nodes: options.Nodes = None,
    gpus_per_node: options.GpusPerNode = None,
    mem: options.Mem = None,
    headroom: options.Headroom = None,
    pin: options.Pins = None,
    batch: options.Batch = None,
    global_batch: options.GlobalBatch = None,
    imbalance: options.Imbalance = None,
    seq: options.SequenceLength = None,
    precision: options.Precision = "fp32",
    optimizer: options.OptimizerName = "adam",
    what_if: options.AskWhatIf = False,
    output: options.Output = None,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest plan within a memory limit."""
    from osdp.planning.memory_options import parse_limits
    from osdp.zoo import load_model

    limits = None if mem is None else parse_limits(mem)
    several = limits is not None and limits.several
    to = Outputs(output, plot, as_json, what_if)
    _check_outputs(to, several)
    with progress_bar():
        target, why = _cluster(cluster, nodes, gpus_per_node)
    limits_bytes = [_limit(target, wanted_bytes) for wanted_bytes in (limits.limits_bytes if limits else (None,))]
    request = _request(limits_bytes[0], precision, optimizer, batch, global_batch, headroom, pin, imbalance)
    with progress_bar():
        source = load_model(model, sequence_length=seq)
    question = Question(source, target, request, why, _how(context, why))
    if several:
        from osdp.cli.commands.frontier import answer_several

        answer_several(question, limits_bytes, to)
    else:
        _answer_one(question, to)


def _request(
    limit_bytes: int,
    precision: str,
    optimizer: str,
    batch: int | None,
    global_batch: int | None,
    headroom: str | None,
    pins: Sequence[str] | None,
    imbalance: str | None,
) -> Request:
    """Return what is asked, read from the texts of the options; raises OsdpError for what they cannot mean."""
    from osdp.planning.headroom import NO_HEADROOM, parse_headroom
    from osdp.planning.imbalance_option import read_imbalance
    from osdp.planning.request import Request
    from planner.cost.stragglers import BALANCED
    from planner.pins import parse_pin

    return Request(
        limit_bytes,
        precision,
        optimizer,
        batch,
        global_batch,
        headroom=NO_HEADROOM if headroom is None else parse_headroom(headroom),
        pins=tuple(parse_pin(text) for text in pins or ()),
        imbalance=BALANCED if imbalance is None else read_imbalance(imbalance),
        imbalance_as_given=imbalance or "",
    )


@dataclass(frozen=True)
class Outputs:
    """What is to be printed and written."""

    output: Path | None
    """File of the plan, or folder of several."""
    plot: Path | None
    """Picture of a frontier."""
    as_json: bool
    what_if: bool


@dataclass(frozen=True)
class Question:
    """What is planned."""

    source: ModelSource
    cluster: Cluster
    request: Request
    why: str
    """Why this cluster, where the user named none."""
    how: str
    """The command, for the files of plans."""


def _check_outputs(to: Outputs, several: bool) -> None:
    """Raise OsdpError for what cannot be written, before anything takes time, and for options without effect."""
    from osdp.planning.request import check_output
    from profiler.errors import OsdpError

    if several and to.what_if:
        raise OsdpError("--what-if asks about one plan", got="several limits in --mem", expected="one limit")
    if not several and to.plot is not None:
        raise OsdpError("--plot draws a frontier, and this is one plan", expected="several limits, --mem 6GB,8GB,12GB")
    if to.output is not None and not several:
        check_output(to.output)


def _limit(cluster: Cluster, wanted_bytes: int | None) -> int:
    """Return the limit that is planned for, and say so if it is not what was asked."""
    from osdp.planning.request import memory_limit
    from profiler.byte_sizes import format_bytes

    limit_bytes = memory_limit(cluster, wanted_bytes)
    if wanted_bytes is not None and limit_bytes < wanted_bytes:
        note(
            f"of {format_bytes(wanted_bytes)}, the driver of {cluster.device.name} leaves "
            f"{format_bytes(limit_bytes)} to programs: planning for that"
        )
    return limit_bytes


def _how(context: typer.Context, why: str) -> str:
    """Return the command that made a plan, for the plan's file."""
    import shlex

    from osdp import __version__

    words = ["osdp", "plan"]
    for name, value in context.params.items():
        if name in _NOT_OF_THE_PLAN or value is None:
            continue
        for one in value if isinstance(value, list | tuple) else (value,):
            words += [f"--{name.replace('_', '-')}", str(one)]
    cluster = f"\nThe cluster is {why}." if why else ""
    return f"Made by osdp {__version__}; every figure is predicted.\n{shlex.join(words)}{cluster}"


def _cluster(name: str | None, nodes: int | None, gpus_per_node: int | None) -> tuple[Cluster, str]:
    """Return the cluster, and why it was taken if the user named none."""
    from osdp.planning.request import default_cluster
    from osdp.zoo import load_cluster

    return (load_cluster(name, nodes, gpus_per_node), "") if name else default_cluster(nodes, gpus_per_node)


def _answer_one(question: Question, to: Outputs) -> None:
    """Find one plan; write it and print it."""
    from osdp import planning

    more = None
    with progress_bar() as progress:
        planned = planning.plan_model(question.source, question.cluster, question.request, progress)
        if to.what_if:
            from osdp.planning.plan_questions import what_if_planned

            more = what_if_planned(planned, question.request, progress)
    if to.output is not None:
        planning.write_plan(to.output, planned.plan, question.how)
    _print_plan(planned, more, question.why, to)


def _print_plan(planned: Planned, more: WhatIf | None, why: str, to: Outputs) -> None:
    total_s = time.perf_counter() - STARTED_S
    if to.as_json:
        from osdp.cli.reports.plan_json import plan_json

        print(plan_json(planned, total_s, more))
        return
    from osdp.cli.reports.plan import Circumstances, print_plan

    print_plan(make_console(), planned, Circumstances(total_s, why, str(to.output or ""), more))
