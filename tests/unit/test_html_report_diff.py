"""The report of two plans beside each other: figures are those of `osdp diff --json`, and differences are marked."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli
from report_pages import HOSTILE, HOW, Page, hostile, planned_within, read_page
from synthetic import transformer

from osdp.planning.request import Planned
from osdp.report.compared_memory import compared_memory_figure
from osdp.report.compared_strips import compared_strips_figure
from osdp.report.diff_contents import DiffContents, diff_contents
from osdp.report.render import render_diff
from planner.analysis.explain import OpenPlan, open_plan
from profiler.byte_sizes import MIB

LIMIT_MIB, WIDE_MIB = 150, 700
NAMES = ("tight.yaml", f"wide{HOSTILE}.yaml")
TINY = ("plan", "--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--batch", "4")


def opened(planned: Planned) -> OpenPlan:
    return open_plan(planned.plan, planned.graph, planned.cluster)


@pytest.fixture(scope="module")
def plans() -> tuple[Planned, Planned]:
    return planned_within(LIMIT_MIB), planned_within(WIDE_MIB)


@pytest.fixture(scope="module")
def diff(plans: tuple[Planned, Planned]) -> DiffContents:
    return diff_contents(opened(plans[0]), opened(plans[1]), NAMES, HOW)


@pytest.fixture(scope="module")
def page(diff: DiffContents) -> Page:
    return read_page(render_diff(diff))


def test_operators_that_differ_are_marked_where_they_are(diff: DiffContents, plans: tuple[Planned, Planned]) -> None:
    tight, wide = (planned.plan for planned in plans)
    graph = plans[0].graph
    differing = []
    for place, operator in enumerate(graph.operators):
        block = "" if operator.block is None else graph.blocks[operator.block].name
        pairs = [(plan.choices[operator.name], plan.recomputations.get(block)) for plan in (tight, wide)]
        if pairs[0] != pairs[1]:
            differing.append(place)
    figure = compared_strips_figure(diff.before.strip, diff.after.strip)
    (marks,) = [trace for trace in figure.traces if trace["name"] == "differs"]
    assert [x - 0.5 for x in marks["x"]] == differing != []
    first = graph.operators[differing[0]].name
    lines = marks["hovertext"][0].split("<br>")
    assert lines[0].startswith(f"{first} (")
    assert tight.choices[first] in lines[1]
    assert wide.choices[first] in lines[2]
    # Each operator and block is drawn once for either plan, and marks are at a height of their own.
    drawn = sum(len(trace["x"]) for trace in figure.traces if trace is not marks)
    assert drawn == sum(len(side.strip.blocks) + len(side.strip.operators) for side in (diff.before, diff.after))


def test_both_peaks_and_limits_are_in_the_curve(diff: DiffContents, plans: tuple[Planned, Planned]) -> None:
    drawn = {trace["name"]: trace for trace in compared_memory_figure(diff.before.memory, diff.after.memory).traces}
    for name, planned in zip(("before", "after"), plans, strict=True):
        peak_mib = planned.plan.predicted.peak_memory_bytes / MIB
        assert max(drawn[name]["y"]) == pytest.approx(peak_mib, abs=1e-3)
        assert drawn[f"peak {name}"]["y"] == [max(drawn[name]["y"])]
        assert drawn[f"limit {name}"]["y"] == [planned.plan.limit_bytes / MIB] * 2
        assert drawn[name]["x"][-1] == pytest.approx(1e3 * planned.plan.predicted.step_time_s, abs=1e-3)


def test_names_are_text_and_other_operators_are_not_compared(plans: tuple[Planned, Planned]) -> None:
    other = planned_within(WIDE_MIB, hostile(transformer(2, 128)))
    found = diff_contents(opened(plans[0]), opened(other), NAMES, HOW)
    text = render_diff(found)
    page = read_page(text)
    assert HOSTILE not in text
    assert len(page.scripts) == 3
    assert f"wide{HOSTILE}.yaml" in page.text
    assert "have different operators" in page.text
    names = [trace["name"] for trace in page.figures["plans"][0]["strips"]["data"]]
    assert "differs" not in names


def test_pictures_have_a_text_beside_them(page: Page) -> None:
    pictures = [attributes for _, attributes in page.elements if attributes.get("role") == "img"]
    assert [picture["id"] for picture in pictures] == ["memory", "strips"]
    assert all(picture["aria-label"] for picture in pictures)
    assert set(page.figures["plans"][0]) == {"memory", "strips"}


def test_figures_are_those_of_the_json(cli: Cli, tmp_path: Path) -> None:
    before, after, path = tmp_path / "before.yaml", tmp_path / "after.yaml", tmp_path / "diff.html"
    for plan, more in ((before, ()), (after, ("--pin", "*=shard"))):
        assert cli(*TINY, *more, "--mem", "1GB", "-o", plan).status == 0
    told = cli.json("diff", before, after)
    done = cli("diff", before, after, "--html", path)
    assert done.status == 0
    assert str(path) in done.err
    page = read_page(path.read_text())
    sizes = [
        str(delta[side])
        for delta in (*told["predicted"]["memory_by_category"].values(), told["predicted"]["peak_memory_bytes"])
        if delta["before"] or delta["after"]
        for side in ("before", "after")
    ]
    assert page.values("data", "value") == sizes
    changed = [change for change in told["choices"] if change["after"] == "shard"]
    rows = [row for row in page.rows if len(row) == 4 and row[2] == "shard"]
    assert [(row[0], row[1]) for row in rows] == [(str(len(one["names"])), one["before"]) for one in changed] != []
    assert f"{told['changed_operators']} operators have another strategy" in page.text
    assert "made anew" not in page.text
    step = told["predicted"]["step_time_s"]
    (row,) = [row for row in page.rows if row[:1] == ["step"]]
    assert float(row[1].split()[0]) == pytest.approx(1e3 * step["before"], rel=1e-2)
    assert row[1].endswith(" ms")
    assert f"osdp diff {before} {after}" in page.text
