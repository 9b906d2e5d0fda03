"""The report of a plan as a page, read without a browser: its figures, its safety, and that it is one file."""

from __future__ import annotations

import base64
import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from command_line import Cli
from report_pages import HOSTILE, HOW, Page, hostile, page_of, planned_within, read_page
from synthetic import transformer
from thoroughness import THOROUGH

from osdp.cli.reports.plan_json import plan_object
from osdp.planning.plan_file import read_plan
from osdp.planning.request import Planned
from osdp.report.contents import PlanContents, make_report, plan_contents
from osdp.report.memory_curve import memory_figure
from osdp.report.model_strip import PricesWanted, price_text
from osdp.report.render import render
from osdp.report.step_streams import streams_figure
from planner.analysis.explain import Target, alternatives, open_plan
from profiler.byte_sizes import GIB, MIB
from profiler.model_graph import Recompute

LIMIT_MIB, WIDE_MIB = 150, 700


@pytest.fixture(scope="module")
def planned() -> Planned:
    return planned_within(LIMIT_MIB)


@pytest.fixture(scope="module")
def contents(planned: Planned) -> PlanContents:
    return plan_contents(planned, HOW, PricesWanted.ALL)


@pytest.fixture(scope="module")
def page(planned: Planned) -> Page:
    return page_of([planned])


# ---- What it says --------------------------------------------------------------------------------


def test_figures_are_those_of_the_json(page: Page, planned: Planned) -> None:
    told = plan_object(planned, 0.0)
    predicted = told["predicted"]
    assert told["verdict"] in page.text
    facts = dict(zip(page.facts[::3], page.facts[1::3], strict=True))
    assert float(facts["samples/s"].replace(",", "")) == pytest.approx(predicted["samples_per_s"], rel=1e-3)
    assert facts["certified gap"] == f"{told['gap']:.2%}"
    free_mib = (told["limit_bytes"] - predicted["peak_memory_bytes"]) / MIB
    assert facts["free under the limit"] == f"{free_mib:.1f} MiB"
    shown = page.values("data", "value")
    assert shown == [str(size) for size in (*predicted["memory_by_category"].values(), predicted["peak_memory_bytes"])]
    rows = {tuple(row[:2]): row for row in page.rows if len(row) == 6}
    for baseline in told["baselines"]:
        recompute = {"nothing": "no", "selective": "selective", "everything": "yes"}[baseline["recomputation"]]
        row = next(row for (name, how), row in rows.items() if name.startswith(baseline["name"]) and how == recompute)
        if baseline["feasible"]:
            assert row[2] == str(baseline["micro_batch"])
            assert float(row[4].replace(",", "")) == pytest.approx(baseline["samples_per_s"], rel=1e-3)
        else:
            assert row[5] == "does not fit"


def test_the_plan_to_download_is_the_plan(page: Page, planned: Planned, tmp_path: Path) -> None:
    (address,) = [href for href in page.values("a", "href") if href and href.startswith("data:")]
    kind, _, data = address.partition(";base64,")
    assert kind == "data:application/yaml"
    path = tmp_path / "plan.yaml"
    path.write_bytes(base64.b64decode(data))
    assert read_plan(path) == planned.plan
    assert path.read_text().startswith("".join(f"# {line}\n" for line in HOW.splitlines()))


def test_command_fingerprints_and_sources_are_there(page: Page, planned: Planned) -> None:
    assert HOW in page.text
    assert planned.plan.model.fingerprint in page.text
    assert planned.plan.cluster.fingerprint in page.text
    sources = [row for row in page.rows if len(row) == 4 and row[2] == "assumed"]
    assert ["matmul fp32", "10 TFLOP/s", "assumed", "assumed: a round number for a test"] in sources


def test_the_strip_has_every_operator_with_its_choice(contents: PlanContents, planned: Planned) -> None:
    strip, plan, graph = contents.strip, planned.plan, planned.graph
    assert [cell.name for cell in strip.operators] == [operator.name for operator in graph.operators]
    assert {cell.name: cell.strategy for cell in strip.operators} == plan.choices
    for cells in (strip.operators, strip.blocks):
        assert sum(cell.parameters for cell in cells) == graph.numel
        assert [cell.first for cell in cells] == [sum(one.count for one in cells[:i]) for i in range(len(cells))]
    again = {cell.name: cell.recompute for cell in strip.blocks if cell.recompute is not None}
    assert {name for name, how in again.items() if how is Recompute.EVERYTHING} == set(plan.recomputed_blocks)
    assert {name for name, how in again.items() if how is Recompute.SELECTIVE} == {*plan.selectively_recomputed_blocks}
    # A matrix product of a token with a weight is two FLOPs for each element: forward, and twice that in backward.
    (qkv,) = [cell for cell in strip.operators if cell.name == "blocks.1.qkv"]
    tokens = graph.sequence_length * plan.micro_batch
    assert qkv.forward_flops == pytest.approx(2 * tokens * 3 * 256 * 256)
    assert qkv.parameters_bytes == 4 * 3 * 256 * 256


def test_prices_are_those_of_explain(page: Page, contents: PlanContents, planned: Planned) -> None:
    view = open_plan(planned.plan, planned.graph, planned.cluster)
    names = [stage.name for stage in view.space.model.stages]
    (block,) = [cell for cell in contents.strip.blocks if cell.name == "blocks.1"]
    assert block.part is not None
    prices = contents.strip.parts[block.part]
    found = [alternatives(view, Target(frozenset({names.index(f"blocks.{i}")}))) for i in range(3)]
    assert list(prices.alternatives) in found
    shown = [row for row in page.rows if len(row) == 4 and row[3] in ("yes", "no")]
    assert len(shown) == sum(len(part.alternatives) for part in contents.strip.parts)
    assert [row[3] for row in shown] == [
        "yes" if other.peak_bytes <= planned.plan.usable_bytes else "no"
        for part in contents.strip.parts
        for other in part.alternatives
    ]


@pytest.mark.parametrize(("limit_mib", "micro_batch"), [(LIMIT_MIB, None), (LIMIT_MIB, 1), (WIDE_MIB, 2)])
def test_the_highest_point_of_the_curve_is_the_peak(limit_mib: int, micro_batch: int | None) -> None:
    predicted = (found := planned_within(limit_mib, micro_batch=micro_batch)).plan.predicted
    curve = plan_contents(found, HOW, PricesWanted.NONE).memory
    assert curve.peak.categories == pytest.approx(predicted.memory_by_category, abs=1)
    assert curve.peak.where == predicted.peak_phase
    starts = [held.start_s for held in curve.held]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert starts[-1] < curve.end_s == pytest.approx(predicted.step_time_s)
    figure = memory_figure(curve)
    stacked = [trace for trace in figure.traces if "stackgroup" in trace]
    highest = max(map(sum, zip(*(trace["y"] for trace in stacked), strict=True)))
    assert highest == pytest.approx(predicted.peak_memory_bytes / MIB, abs=1e-3)


def test_streams_fill_the_step(contents: PlanContents, planned: Planned) -> None:
    streams, predicted = contents.streams, planned.plan.predicted
    assert streams.end_s == pytest.approx(predicted.step_time_s)
    computing = sorted((s.start_s, s.end_s) for s in streams.spans if s.stream == "compute")
    assert all(one[1] <= other[0] + 1e-12 for one, other in pairwise(computing))
    idle_s = streams.end_s - sum(end - start for start, end in computing)
    assert streams.waiting_s == pytest.approx(idle_s)
    drawn = streams_figure(streams).traces
    assert sum(len(trace["x"]) for trace in drawn) == len(streams.spans) + len(streams.waits)


# ---- Several limits ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frontier() -> Page:
    return page_of([planned_within(LIMIT_MIB), planned_within(WIDE_MIB)])


def test_a_frontier_has_all_plans(frontier: Page) -> None:
    plans = [planned_within(limit).plan for limit in (LIMIT_MIB, WIDE_MIB)]
    assert len(frontier.figures["plans"]) == 2
    for found, (limit_gib, speed) in zip(plans, frontier.figures["points"], strict=True):
        assert limit_gib == found.limit_bytes / GIB
        assert speed == found.predicted.samples_per_s
    drawn = {trace["name"]: trace["y"] for trace in frontier.figures["frontier"]["data"][1:]}
    assert drawn.pop("OSDP") == [found.predicted.samples_per_s for found in plans]
    assert drawn
    assert all(
        speed is None or speed <= own
        for line in drawn.values()
        for speed, own in zip(line, [found.predicted.samples_per_s for found in plans], strict=True)
    )
    ((_, slider),) = [element for element in frontier.elements if element[0] == "input"]
    assert (slider["type"], slider["max"]) == ("range", "1")
    assert json.loads(slider["data-labels"] or "") == ["150.0 MiB", "700.0 MiB"]


def test_prices_at_each_limit_are_under_the_pointer(frontier: Page) -> None:
    """Of a block in the middle of those with the same choice, as `osdp explain` prices it."""
    for limit, figures in zip((LIMIT_MIB, WIDE_MIB), frontier.figures["plans"], strict=True):
        found = planned_within(limit)
        view = open_plan(found.plan, found.graph, found.cluster)
        names = [stage.name for stage in view.space.model.stages]
        texts = [text for trace in figures["strip"]["data"] for text in trace["hovertext"]]
        (shown,) = [text for text in texts if text.startswith("blocks.1 (")]
        priced = [
            [price_text(other) for other in alternatives(view, Target(frozenset({names.index(f"blocks.{block}")})))[:5]]
            for block in range(3)
        ]
        assert shown.split("<br>")[-5:] in priced


def test_one_plan_has_no_slider(page: Page) -> None:
    assert not [element for element in page.elements if element[0] == "input"]
    assert page.figures["frontier"] is None


# ---- One safe file -------------------------------------------------------------------------------


def test_names_are_text() -> None:
    graph = hostile(transformer(2, 128))
    found = [planned_within(WIDE_MIB, graph, micro_batch=2)]
    text = render(make_report(found, f"{HOW} {HOSTILE}", [HOSTILE]))
    page = read_page(text)
    assert HOSTILE not in text
    assert len(page.scripts) == text.count("<script") == 3
    assert page.text.count(HOSTILE) > 20
    assert f"blocks.0.qkv{HOSTILE}" in [row[0] for row in page.rows if row]
    # Plotly reads hover texts as HTML, so names are escaped once more there.
    shown = [text for trace in page.figures["plans"][0]["strip"]["data"] for text in trace["hovertext"]]
    assert shown
    assert all("&lt;script&gt;alert(1)&lt;/script&gt;" in one and "<script" not in one for one in shown)


@pytest.mark.parametrize("name", ["page", "frontier"])
def test_nothing_is_fetched(name: str, request: pytest.FixtureRequest) -> None:
    found: Page = request.getfixturevalue(name)
    names = ("src", "href", "srcset", "action", "data", "poster")
    addresses = [value for _, attributes in found.elements for key, value in attributes.items() if key in names]
    assert addresses
    assert {urlsplit(address or "").scheme for address in addresses} == {"data"}
    styles = " ".join(found.styles) + " ".join(
        attributes["style"] or "" for _, attributes in found.elements if "style" in attributes
    )
    assert not re.search(r"url\(|@import", styles)


def test_pictures_have_a_text_beside_them(frontier: Page) -> None:
    pictures = [attributes for _, attributes in frontier.elements if attributes.get("role") == "img"]
    assert [picture["id"] for picture in pictures] == ["frontier", "memory", "strip", "streams"]
    assert all(picture.get("aria-label") or picture.get("data-labels") for picture in pictures)
    headings = [tag for tag, _ in frontier.elements if re.fullmatch(r"h\d", tag)]
    assert headings[0] == "h1"
    assert set(headings[1:]) == {"h2"}


def test_a_large_model_is_under_6_mb() -> None:
    """48 blocks of six operators, and 24 limits: with --thorough all of them, else what two make of each more."""
    graph = transformer(48, 512)
    first = planned_within(4000, graph, micro_batch=1)
    others = [
        replace(first, plan=replace(first.plan, limit_bytes=first.plan.limit_bytes + more)) for more in range(1, 24)
    ]

    def page_bytes(count: int) -> int:
        return len(render(make_report([first, *others[: count - 1]], HOW)).encode())

    if THOROUGH:
        assert page_bytes(24) < 6e6
    else:
        one, two = page_bytes(1), page_bytes(2)
        assert two > one
        assert one + 23 * (two - one) < 6e6


# ---- The command ---------------------------------------------------------------------------------

TINY = ("plan", "--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--batch", "4", "--gpus-per-node", "2")


def test_the_command_writes_it(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    done = cli(*TINY, "--simple", "--html", path, "--json")
    assert done.status == 0
    assert str(path) in done.err
    told, page = json.loads(done.out), read_page(path.read_text())
    assert told["verdict"] in page.text
    assert "osdp plan --model gpt2-tiny --cluster titan-rtx-8 --batch 4" in page.text
    assert " --simple" in page.text
    assert " False" not in page.text
    assert "--html" not in page.text


def test_a_frontier_of_the_command(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert cli(*TINY, "--mem", "100MB,1GB,2GB", "--html", path).status == 0
    page = read_page(path.read_text())
    assert len(page.figures["plans"]) == 2
    assert any(len(row) == 1 and "fits" in row[0] for row in page.rows)


def test_a_plan_that_was_made_before_has_a_report(cli: Cli, tmp_path: Path) -> None:
    plan, made, explained = tmp_path / "plan.yaml", tmp_path / "made.html", tmp_path / "explained.html"
    assert cli(*TINY, "--mem", "1GB", "--what-if", "-o", plan, "--html", made, "--json").status == 0
    done = cli("explain", plan, "--html", explained)
    assert done.status == 0
    assert str(explained) in done.err
    first, second = (read_page(path.read_text()) for path in (made, explained))
    assert first.figures["plans"] == second.figures["plans"]
    assert first.facts == second.facts
    answers = [
        [row for row in page.rows if row[:1] == ["25% more memory"] or row[-1:] == ["bottleneck"]]
        for page in (first, second)
    ]
    assert answers[0] == answers[1] != []
    assert "Compared with one strategy" in first.text
    assert "Compared with one strategy" not in second.text


def test_what_was_verified_is_on_the_page(cli: Cli, tmp_path: Path) -> None:
    plan, path = tmp_path / "plan.yaml", tmp_path / "verified.html"
    assert cli(*TINY, "--mem", "1GB", "-o", plan).status == 0
    done = cli("verify", plan, "--html", path, "--json")
    assert done.status == 0
    told, page = json.loads(done.out), read_page(path.read_text())
    (line,) = [trace for trace in page.figures["plans"][0]["memory"]["data"] if trace["name"] == "tracked peak"]
    reserve_bytes = read_plan(plan).predicted.reserve_bytes
    assert line["y"] == pytest.approx([(told["tracked_peak_bytes"] + reserve_bytes) / GIB] * 2, abs=1e-5)
    lines = {trace["name"]: trace["y"] for trace in page.figures["plans"][0]["memory"]["data"]}
    assert max(lines["tracked"]) == line["y"][0]
    # Every part of the model holds in its forward and in its backward what is predicted.
    assert lines["tracked"] == pytest.approx(lines["in total"], abs=0.01 * told["tracked_peak_bytes"] / GIB)
    assert len(set(lines["tracked"])) > 8
    assert f"predicted {told['error']:+.2%} against tracked" in page.text
    activations = told["predicted"]["activations"], told["tracked"]["activations"]
    assert ["activations", *(f"{size / MIB:.1f} MiB" for size in activations)] in page.rows


def test_one_operator_has_no_report(cli: Cli, tmp_path: Path) -> None:
    done = cli("explain", tmp_path / "plan.yaml", "wte", "--html", tmp_path / "report.html")
    assert done.status == 2
    assert "--html is of a whole plan" in done.err


@pytest.mark.parametrize(
    ("name", "words"),
    [("report.pdf", ".html"), ("missing/report.html", "no such directory"), ("folder.html", "it is a directory")],
)
def test_a_file_that_cannot_be_written_is_refused_first(cli: Cli, tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.html").mkdir()
    done = cli(*TINY, "--html", tmp_path / name)
    assert done.status == 2
    assert words in done.err
    assert done.out == ""


@pytest.mark.parametrize("library", ["plotly", "jinja2"])
def test_a_missing_library_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    done = cli(*TINY, "--html", tmp_path / "report.html")
    assert done.status == 2
    assert f"--html needs {library}" in done.err
    assert "pip install -e '.[report]'" in done.err
    assert not (tmp_path / "report.html").exists()
