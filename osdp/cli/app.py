"""The commands and their options."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup
from typer.main import get_command

from osdp.cli.commands.doctor import doctor
from osdp.cli.commands.export import export
from osdp.cli.commands.plan import plan
from osdp.cli.commands.profile import profile
from osdp.cli.commands.strategies import partition, strategies
from osdp.cli.commands.train import train
from osdp.cli.commands.verify import verify
from osdp.cli.exits import guarded
from osdp.cli.options import CLUSTER_HELP, AsJson, ClusterOfPlan, Html, ModelOfPlan, PlanPath, Quiet, cluster_starts
from osdp.cli.terminal import make_console, note, progress_bar, show
from osdp.plain_text import plain

if TYPE_CHECKING:
    from planner.analysis.explain import OpenPlan


class _Commands(TyperGroup):
    """The commands, whose parser repeats what it was given in plain text."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _plain_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _plain_errors():
            return super().invoke(ctx)


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # The parser is click's or typer's own copy of it, with classes of its own.
        if (message_of := getattr(error, "format_message", None)) is not None:
            error.format_message = lambda: plain(message_of())  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="osdp",
    cls=_Commands,
    help="Finds the fastest parallel plan for a PyTorch model that fits into memory, and explains it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from osdp import __version__

        print(f"osdp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Take the options that belong to no command."""


app.command()(plan)


def _reopened(path: Path, model: str | None, cluster: str | None) -> OpenPlan:
    """Read a plan and trace its model again."""
    from osdp.planning.plan_file import read_plan, reopen

    with progress_bar() as progress:
        found = read_plan(path)
        progress(f"tracing {found.model.name}", 0.0)
        return reopen(found, model, cluster)


def _how(*words: str | Path) -> str:
    """Return the version and the command that make a report."""
    from osdp import __version__

    return f"Made by osdp {__version__}; every figure is predicted.\n{shlex.join(['osdp', *map(str, words)])}"


@app.command()
@guarded
def explain(
    path: PlanPath,
    operator: Annotated[str | None, Argument(help="An operator, block or module, or a pattern: '*.mlp.*'.")] = None,
    model: ModelOfPlan = None,
    cluster: ClusterOfPlan = None,
    what_if: Annotated[bool, Option("--what-if/--no-what-if", help="For a whole plan: find its bottleneck.")] = True,
    html: Html = None,
    quiet: Quiet = False,
) -> None:
    """Explain a plan. Prints why each part has its choice, what alternatives would cost, and the bottleneck."""
    from osdp.cli.reports.explain import print_plan_reasons, print_target_reasons
    from osdp.planning.plan_questions import what_if_open
    from planner.analysis.explain import find_target
    from profiler.errors import OsdpError

    if html is not None:
        from osdp.report.render import check_html

        check_html(html)
        if operator is not None:
            raise OsdpError("--html is of a whole plan", got=f"also {operator}", advice="leave one of them out")
    view = _reopened(path, model, cluster)
    if operator is not None:
        print_target_reasons(make_console(), view, operator, find_target(view, operator))
        return
    more, why_not = None, ""
    if what_if:
        try:
            with progress_bar() as progress:
                more = what_if_open(view, progress)
        except OsdpError as error:  # Nothing fits any more, or a file of lengths is gone.
            why_not = ": ".join(part for part in (error.what, error.expected) if part)
    if html is not None:
        from osdp.report.contents import explained_report
        from osdp.report.render import write_report

        write_report(html, explained_report(view, _how("explain", path), more))
        note(f"report written to {html}")
    print_plan_reasons(make_console(), view, more, why_not)


@app.command()
@guarded
def diff(
    before: PlanPath,
    after: Annotated[Path, Argument(metavar="OTHER", help="The plan file to compare it with.")],
    html: Html = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare two plan files. Prints how choices, predicted memory and predicted time differ."""
    from osdp.cli.reports.diff import diff_object, print_diff
    from osdp.planning.plan_file import read_plan
    from planner.analysis.plan_diff import compare

    if html is not None:
        from osdp.report.diff_contents import diff_contents
        from osdp.report.render import check_html, write_report

        check_html(html)
        old, new = (_reopened(path, None, None) for path in (before, after))
        write_report(html, diff_contents(old, new, (str(before), str(after)), _how("diff", before, after)))
        note(f"report written to {html}")
    show(as_json, diff_object, print_diff, compare(read_plan(before), read_plan(after)), str(before), str(after))


@app.command()
@guarded
def schedule(path: PlanPath, model: ModelOfPlan = None, cluster: ClusterOfPlan = None, quiet: Quiet = False) -> None:
    """Print the schedule of a plan. Lists FSDP units, their collectives, and when the runtime runs each."""
    from runtime.compile_plan import compile_plan

    view = _reopened(path, model, cluster)
    print(plain(str(compile_plan(view.plan, view.space.graph, view.load.cluster))))


@cache
def command() -> Any:
    """Return what runs the command line, which takes twice as long to make as the parser takes for a command."""
    return get_command(app)


app.command()(export)
app.command()(verify)
app.command()(profile)
app.command()(train)
app.command()(strategies)
app.command()(partition)
app.command()(doctor)


@app.command()
@guarded
def models() -> None:
    """List the models that come with OSDP."""
    from osdp.cli.reports.lists import print_models

    print_models(make_console())


@app.command()
@guarded
def clusters(
    name: Annotated[str | None, Argument(help=f"Only this one. {CLUSTER_HELP}", autocompletion=cluster_starts)] = None,
    sources: Annotated[bool, Option("--sources", help="List every figure and where it comes from.")] = False,
) -> None:
    """List the clusters that come with OSDP."""
    from osdp.cli.reports.lists import print_clusters

    print_clusters(make_console(), name, sources)
