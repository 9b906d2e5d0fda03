"""`osdp plan`: the command that finds the fastest plan within a memory limit, or within each of several."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osdp.cli import STARTED_S
from osdp.cli.exits import guarded
from osdp.cli.terminal import make_console, note, progress_bar

if TYPE_CHECKING:
    from osdp.planning import Planned, Request
    from planner.whatif import WhatIf
    from profiler.cluster import Cluster
    from profiler.source import ModelSource

MODEL_HELP = "A name from `osdp models`, path/to/model.yaml, package.module:factory or hf:path/to/config.json."
CLUSTER_HELP = "A name from `osdp clusters` or path/to/cluster.yaml."
_NOT_OF_THE_PLAN = ("output", "plot", "as_json", "what_if")
"""Options that change nothing of the plan."""


@guarded
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    cluster: Annotated[
        str | None,
        typer.Option(help=f"{CLUSTER_HELP} Default: the GPUs that are visible, or else titan-rtx-8."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes, instead of the cluster's own number.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks on each node, likewise.")] = None,
    mem: Annotated[
        str | None,
        typer.Option(
            help="Memory limit per device; 8GB means 8 GiB, that is 8192 MiB. Several (6GB,8GB) or a range "
            "start:stop:step (6GB:24GB:2GB) give the frontier. Default: all of it."
        ),
    ] = None,
    headroom: Annotated[
        str | None, typer.Option(help="What is left free under the limit: 512MB, or 5% of it. Default: nothing.")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=CHOICE",
            help="Decide a part yourself: 'blocks.*.mlp=shard', 'blocks.0=recompute' (or keep). Repeatable.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Micro-batch: samples of a rank in one forward. Default: searched.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of all ranks in one step. Default: one micro-batch of each rank."),
    ] = None,
    imbalance: Annotated[
        str | None,
        typer.Option(
            help="How unlike micro-batches are: the coefficient of variation of their compute time (0.5), or a "
            "file with the length of a sample in each line. Default: all alike."
        ),
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sample. Default: the model's.")] = None,
    precision: Annotated[str, typer.Option(help="Compute in fp32 or bf16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adam, adamw or sgd.")] = "adam",
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also say what binds, and what more memory or faster parts would buy.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan to this YAML file, for OSDP() to run; of a frontier, "
                     "the plans into this folder."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a frontier into this file (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the report.")] = False,
) -> None:  # fmt: skip
    """Find the fastest plan within a memory limit."""
    from osdp.headroom import NO_HEADROOM, parse_headroom
    from osdp.imbalance import read_imbalance
    from osdp.limits import parse_limits
    from osdp.planning import Request
    from osdp.zoo import load_model
    from planner.imbalance import BALANCED
    from planner.pins import parse_pin

    limits = None if mem is None else parse_limits(mem)
    several = limits is not None and limits.several
    to = Outputs(output, plot, as_json, what_if)
    _check_outputs(to, several)
    free = NO_HEADROOM if headroom is None else parse_headroom(headroom)
    pins = tuple(parse_pin(text) for text in pin or ())
    uneven = read_imbalance(imbalance) if imbalance is not None else BALANCED
    with progress_bar():
        source = load_model(model, sequence_length=seq)
        target, why = _cluster(cluster, nodes, gpus_per_node)
    wanted_bytes = limits.limits_bytes if limits else (None,)
    limits_bytes = [_limit(target, wanted) for wanted in wanted_bytes]
    request = Request(limits_bytes[0], precision, optimizer, batch, global_batch, headroom=free, pins=pins,
                      imbalance=uneven, imbalance_as_given=imbalance or "")
    question = Question(source, target, request, why, _how(context, why))
    if several:
        from osdp.cli.frontier_command import answer_several

        answer_several(question, limits_bytes, to)
    else:
        _answer_one(question, to)


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
    from osdp.planning import check_output
    from profiler.errors import OsdpError

    if several and to.what_if:
        raise OsdpError("--what-if asks about one plan", got="several limits in --mem", expected="one limit")
    if not several and to.plot is not None:
        raise OsdpError("--plot draws a frontier, and this is one plan", expected="several limits, --mem 6GB,8GB,12GB")
    if to.output is not None and not several:
        check_output(to.output)


def _limit(cluster: Cluster, wanted_bytes: int | None) -> int:
    """Return the limit that is planned for, and say so if it is not what was asked."""
    from osdp.planning import memory_limit
    from profiler.units import format_bytes

    limit_bytes = memory_limit(cluster, wanted_bytes)
    if wanted_bytes is not None and limit_bytes < wanted_bytes:
        note(f"of {format_bytes(wanted_bytes)}, the driver of {cluster.device.name} leaves "
             f"{format_bytes(limit_bytes)} to programs: planning for that")  # fmt: skip
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
    from osdp.planning import default_cluster
    from osdp.zoo import load_cluster

    return (load_cluster(name, nodes, gpus_per_node), "") if name else default_cluster(nodes, gpus_per_node)


def _answer_one(question: Question, to: Outputs) -> None:
    """Find one plan; write it and print it."""
    from osdp import planning

    more = None
    with progress_bar() as progress:
        planned = planning.plan_model(question.source, question.cluster, question.request, progress)
        if to.what_if:
            from osdp.questions import what_if_planned

            more = what_if_planned(planned, question.request, progress)
    if to.output is not None:
        planning.write_plan(to.output, planned.plan, question.how)
    _print_plan(planned, more, question.why, to)


def _print_plan(planned: Planned, more: WhatIf | None, why: str, to: Outputs) -> None:
    total_s = time.perf_counter() - STARTED_S
    if to.as_json:
        from osdp.cli.plan_json import plan_json

        print(plan_json(planned, total_s, more))
        return
    from osdp.cli.plan_report import Circumstances, print_plan

    print_plan(make_console(), planned, Circumstances(total_s, why, str(to.output or ""), more))
