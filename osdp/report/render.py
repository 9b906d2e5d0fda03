"""Writes a report: Jinja2 fills the page, plotly.js draws it in the reader's browser, and nothing is fetched."""

import base64
import gzip
import json
import re
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from osdp import __version__
from osdp.cli.reports.diff import bytes_texts, changed_names, seconds_texts, setting_name, setting_text, term_name
from osdp.cli.reports.figures import format_count, format_parameters, format_rate, format_seconds
from osdp.cli.reports.rows import choice_name
from osdp.report.compared_memory import compared_memory_figure
from osdp.report.compared_strips import compared_strips_figure
from osdp.report.contents import PlanContents, Report
from osdp.report.diff_contents import DiffContents
from osdp.report.figure import Figure, colours_of
from osdp.report.frontier_picture import frontier_figure
from osdp.report.memory_curve import memory_figure
from osdp.report.model_strip import price_text, recompute_text, strip_figure
from osdp.report.over_steps import loss_figure, peak_figure, step_time_figure
from osdp.report.step_streams import streams_figure
from osdp.report.training_contents import TrainingContents
from osdp.report.waiting_picture import waiting_figure
from osdp.training.reporters import Step
from profiler.byte_sizes import format_bytes
from profiler.errors import OsdpError, install_advice
from profiler.yaml_files import write_text_atomic

FIGURES = r'<script id="figures" type="application/gzip">([^<]*)</script>'
SUFFIXES = (".html", ".htm")
MOST_ROWS, MOST_PRICES = 6000, 1500
"""Operators, and alternatives, that all tables of a page together list: more would make it large."""


def check_html(path: Path, option: str = "--html") -> None:
    """Raise OsdpError if no report can be written to `path`, which was given by `option`."""
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ImportError as error:
        advice = f"{install_advice('report')}; or leave {option} out"
        raise OsdpError(f"{option} needs {error.name}, which is not installed", advice=advice) from None
    if path.suffix not in SUFFIXES:
        what = f"{path} cannot be written: a report is a page for a browser"
        raise OsdpError(what, got=path.suffix or "no suffix", expected=", ".join(SUFFIXES))
    if path.is_dir():
        raise OsdpError(f"{path} cannot be written", got="it is a directory", expected="a file, such as report.html")
    if not path.parent.is_dir():
        raise OsdpError(f"{path} cannot be written", got="no such directory", advice=f"mkdir -p {path.parent}")


def write_report(path: Path, report: Report | DiffContents | TrainingContents) -> None:
    """Write a report to `path`, whole or not at all.  Raises OsdpError as `check_html` does."""
    check_html(path)
    match report:
        case Report():
            text = render(report)
        case DiffContents():
            text = render_diff(report)
        case TrainingContents():
            text = render_training(report)
    write_text_atomic(path, text)


def render(report: Report) -> str:
    """Return a report as one HTML page."""
    return _page("plan.html", _figures(report), **_of_plans(report))


def render_diff(diff: DiffContents) -> str:
    """Return two plans beside each other as one HTML page."""
    figures = {
        "memory": compared_memory_figure(diff.before.memory, diff.after.memory).plain,
        "strips": compared_strips_figure(diff.before.strip, diff.after.strip).plain,
    }
    downloads = [_data_uri(side.plan_yaml) for side in (diff.before, diff.after)]
    return _page("diff.html", {"plans": [figures]}, diff=diff, downloads=downloads)


def render_training(run: TrainingContents) -> str:
    """Return a training run as one HTML page, which `steps_in` reads again."""
    plan = run.start.plan
    figures = _figures(run.report)
    if run.steps:
        figures["plans"][0] |= {
            "loss": loss_figure(run.steps).plain,
            "step-time": step_time_figure(run.steps, plan).plain,
            "memory-of-steps": peak_figure(run.steps, plan).plain,
        }
    if run.waits_s:
        figures["plans"][0]["waiting"] = waiting_figure(run.waits_s, run.step_s).plain
    # A text of its own: a loss may not be a number, for which browsers' JSON has no word.
    figures["run"] = json.dumps({"model": plan.model.name, "steps": [asdict(step) for step in run.steps_to_keep]})
    return _page("training.html", figures, run=run, **_of_plans(run.report))


def steps_in(path: Path, model: str, last: int) -> tuple[Step, ...]:
    """Return the steps up to the one of a number in the page of a run of a model; none if the file is none."""
    try:
        found = re.search(FIGURES, path.read_text())
        run = json.loads(json.loads(gzip.decompress(base64.b64decode(found[1])))["run"]) if found else {}
        steps = [Step(**step | {"waits_s": tuple(step["waits_s"])}) for step in run.get("steps", ())]
        return tuple(step for step in steps if step.number <= last) if run.get("model") == model else ()
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        return ()


def _of_plans(report: Report) -> dict[str, Any]:
    """Return what `plan_sections.html` needs."""
    return {
        "report": report,
        "downloads": [_data_uri(contents.plan_yaml) for contents in report.plans],
        "lists_operators": sum(len(one.strip.operators) for one in report.plans) <= MOST_ROWS,
        "lists_prices": sum(len(part.alternatives) for one in report.plans for part in one.strip.parts) <= MOST_PRICES,
    }


def _page(name: str, figures: dict[str, Any], **shown: Any) -> str:
    """Return a page of the folder `page`; `figures` is what its script reads, and `shown` what its template does."""
    read = files("osdp.report") / "page"
    template = _environment().get_template(name)
    page: str = template.render(
        version=__version__,
        figures=_packed(json.dumps(figures)),
        style=(read / "page.css").read_text(),
        wiring=(read / "page.js").read_text(),
        plotly=_packed_plotly(),
        **shown,
    )
    return page


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("osdp.report", "page")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = (
        bytes_texts,
        changed_names,
        choice_name,
        format_bytes,
        format_count,
        format_parameters,
        format_rate,
        format_seconds,
        price_text,
        recompute_text,
        seconds_texts,
        setting_name,
        setting_text,
        term_name,
    )
    environment.filters |= {function.__name__: function for function in shown}
    return environment


@cache
def _packed_plotly() -> str:
    return _packed((files("plotly") / "package_data" / "plotly.min.js").read_text())


def _figures(report: Report) -> dict[str, Any]:
    """Return the figures as the page's script reads them."""
    colours = colours_of(cell.strategy for one in report.plans for cell in one.strip.operators)
    points = [one.point for one in report.plans if one.point is not None]
    frontier = frontier_figure(points).plain if len(points) > 1 else None
    return {
        "plans": [_plan_figures(one, colours) for one in report.plans],
        "frontier": frontier,
        "points": [[point.limit_bytes / (1 << 30), point.samples_per_s] for point in points],
    }


def _plan_figures(one: PlanContents, colours: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Figure] = {
        "memory": memory_figure(one.memory),
        "strip": strip_figure(one.strip, colours),
        "streams": streams_figure(one.streams),
    }
    return {name: figure.plain for name, figure in found.items()}


def _packed(text: str) -> str:
    """Return a text in a third of its size, as the page's script unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _data_uri(text: str) -> str:
    return "data:application/yaml;base64," + base64.b64encode(text.encode()).decode()
