"""The commands and their options."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osdp.cli import STARTED_S
from osdp.cli.exits import guarded
from osdp.cli.terminal import make_console, note, progress_bar
from osdp.cli.train_command import train

if TYPE_CHECKING:
    from osdp.planning import Planned
    from planner.explain import OpenPlan
    from profiler.cluster import Cluster

app = typer.Typer(
    name="osdp",
    help="Finds the fastest parallel strategy of a PyTorch model that fits into memory, and says why.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL_HELP = "A name from `osdp models`, path/to/model.yaml, package.module:factory or hf:path/to/config.json."
CLUSTER_HELP = "A name from `osdp clusters` or path/to/cluster.yaml."


def _print_version(wanted: bool) -> None:
    if wanted:
        from osdp import __version__

        print(f"osdp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


@app.command()
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
        typer.Option(help="Memory limit per device; 8GB means 8 GiB, that is 8192 MiB. Default: all of it."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Micro-batch: samples of a rank in one forward. Default: searched.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of all ranks in one step. Default: one micro-batch of each rank."),
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sample. Default: the model's.")] = None,
    precision: Annotated[str, typer.Option(help="Compute in fp32 or bf16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adam, adamw or sgd.")] = "adam",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this YAML file, for OSDP() to run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the report.")] = False,
) -> None:
    """Find the fastest plan within a memory limit."""
    from osdp import planning
    from osdp.zoo import load_model
    from profiler.units import format_bytes, parse_bytes

    if output is not None:
        planning.check_output(output)
    wanted_bytes = None if mem is None else parse_bytes(mem)
    with progress_bar() as progress:
        source = load_model(model, sequence_length=seq)
        target, why = _cluster(cluster, nodes, gpus_per_node)
        limit_bytes = planning.memory_limit(target, wanted_bytes)
        if wanted_bytes is not None and limit_bytes < wanted_bytes:
            note(f"of {format_bytes(wanted_bytes)}, the driver of {target.device.name} leaves "
                 f"{format_bytes(limit_bytes)} to programs: planning for that")  # fmt: skip
        request = planning.Request(limit_bytes, precision, optimizer, batch, global_batch)
        planned = planning.plan_model(source, target, request, progress)
    if output is not None:
        planning.write_plan(output, planned.plan, _how(context, why))
    _print_plan(planned, why, output, as_json)


def _how(context: typer.Context, why: str) -> str:
    """Return the command that made a plan, for the plan's file."""
    import shlex

    from osdp import __version__

    given = {name: value for name, value in context.params.items() if name not in ("output", "as_json")}
    words = [word for name, value in given.items() if value is not None
             for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
    cluster = f"\nThe cluster is {why}." if why else ""
    return f"Made by osdp {__version__}; every figure is predicted.\n{shlex.join(['osdp', 'plan', *words])}{cluster}"


def _cluster(name: str | None, nodes: int | None, gpus_per_node: int | None) -> tuple[Cluster, str]:
    """Return the cluster, and why it was taken if the user named none."""
    from osdp.planning import default_cluster
    from osdp.zoo import load_cluster

    return (load_cluster(name, nodes, gpus_per_node), "") if name else default_cluster(nodes, gpus_per_node)


def _print_plan(planned: Planned, why: str, output: Path | None, as_json: bool) -> None:
    total_s = time.perf_counter() - STARTED_S
    if as_json:
        from osdp.cli.plan_json import plan_json

        print(plan_json(planned, total_s))
        return
    from osdp.cli.plan_report import Circumstances, print_plan

    print_plan(make_console(), planned, Circumstances(total_s, why, str(output or "")))


PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `osdp plan -o` wrote.")]
ModelOfPlan = Annotated[
    str | None, typer.Option("--model", help="The model, where it no longer has the name that the plan knows it by.")
]
ClusterOfPlan = Annotated[
    str | None,
    typer.Option("--cluster", help="The cluster, where it no longer has the name that the plan knows it by."),
]


def _reopened(path: Path, model: str | None, cluster: str | None) -> OpenPlan:
    """Read a plan and trace its model again."""
    from osdp.planning import read_plan, reopen

    with progress_bar() as progress:
        found = read_plan(path)
        progress(f"tracing {found.model.name}", 0.0)
        return reopen(found, model, cluster)


@app.command()
@guarded
def explain(
    path: PlanPath,
    operator: Annotated[
        str | None,
        typer.Argument(help="An operator, a block, a module around them, or a pattern such as '*.mlp.*'."),
    ] = None,
    model: ModelOfPlan = None,
    cluster: ClusterOfPlan = None,
) -> None:
    """Say why a plan is as it is, and what every other choice would cost."""
    from osdp.cli.explain_report import print_plan_reasons, print_target_reasons
    from planner.explain import find_target

    view = _reopened(path, model, cluster)
    if operator is None:
        print_plan_reasons(make_console(), view)
    else:
        print_target_reasons(make_console(), view, operator, find_target(view, operator))


@app.command()
@guarded
def schedule(
    path: PlanPath,
    model: ModelOfPlan = None,
    cluster: ClusterOfPlan = None,
) -> None:
    """Print what the runtime would do: the units, what they communicate, and when."""
    from runtime.compiler import compile_plan

    view = _reopened(path, model, cluster)
    print(compile_plan(view.plan, view.space.graph, view.load.cluster))


app.command()(train)


@app.command()
@guarded
def models() -> None:
    """List the models that come with OSDP."""
    from osdp.cli.list_reports import print_models

    print_models(make_console())


@app.command()
@guarded
def clusters(
    name: Annotated[str | None, typer.Argument(help=f"Only this one. {CLUSTER_HELP}")] = None,
    sources: Annotated[bool, typer.Option("--sources", help="Every figure, and where it comes from.")] = False,
) -> None:
    """List the clusters that come with OSDP."""
    from osdp.cli.list_reports import print_clusters

    print_clusters(make_console(), name, sources)
