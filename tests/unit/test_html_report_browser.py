"""Reports in a browser: they render, the slider moves the plan, hovering tells what the plan says.

Needs the system's Chromium and Playwright, and is skipped without.  Screenshots are in pytest's temporary folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from report_pages import HOW, hostile, planned_within
from synthetic import transformer
from thoroughness import THOROUGH

from osdp.planning.request import Planned
from osdp.report.contents import make_report
from osdp.report.diff_contents import diff_contents
from osdp.report.render import write_report
from osdp.report.training_page import TrainingPage
from osdp.training.config import load_config
from osdp.training.reporters import Start, Step
from planner.analysis.explain import open_plan

LIMITS_MIB = (150, 700)
SERIOUS = ("serious", "critical")
PICTURES = ("frontier", "memory", "strip", "streams")
HOVER = ".hoverlayer .hovertext"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (the extra `test`)")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium on PATH (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def plans() -> list[Planned]:
    return [planned_within(limit) for limit in LIMITS_MIB]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def frontier(folder: Path, plans: list[Planned]) -> Path:
    write_report(folder / "frontier.html", make_report(plans, HOW))
    return folder / "frontier.html"


@dataclass
class Visit:
    """A page in the browser, with what went wrong in it."""

    page: Any
    faults: list[str] = field(default_factory=list)

    def open(self, path: Path, last: str = "streams") -> None:
        """Open a report and wait until its last picture is drawn."""
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: self.faults.append(dialog.message) or dialog.dismiss())
        self.page.on("request", lambda request: self.request(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(f"#{last} .barlayer .point")

    def request(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.faults.append(url)

    def text(self, selector: str) -> str:
        return " ".join(self.page.locator(selector).all_inner_texts())


@pytest.fixture
def visit(browser: Any, request: pytest.FixtureRequest) -> Iterator[Visit]:
    width, scheme = getattr(request, "param", (1600, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    yield Visit(context.new_page())
    context.close()


@pytest.fixture(scope="module")
def wide(browser: Any, frontier: Path) -> Iterator[Visit]:
    """The frontier on a wide screen, opened once."""
    context = browser.new_context(viewport={"width": 1600, "height": 900}, color_scheme="light")
    visit = Visit(context.new_page())
    visit.open(frontier)
    yield visit
    context.close()


@pytest.mark.parametrize(
    "visit",
    [(400, "light"), (1600, "dark")] if THOROUGH else [(400, "dark")],
    indirect=True,
    ids=lambda given: f"{given[0]} {given[1]}",
)
def test_it_renders_without_faults_for_everyone(visit: Visit, frontier: Path, folder: Path) -> None:
    visit.open(frontier)
    width = visit.page.viewport_size["width"]
    visit.page.screenshot(path=folder / f"frontier-{width}.png", full_page=True)
    check(visit, PICTURES)


@pytest.mark.parametrize("visit", [(400, "dark")], indirect=True, ids=["phone"])
def test_two_plans_beside_each_other_likewise(visit: Visit, folder: Path, plans: list[Planned]) -> None:
    path = folder / "diff.html"
    views = (open_plan(planned.plan, planned.graph, planned.cluster) for planned in plans)
    write_report(path, diff_contents(*views, ("before.yaml", "after.yaml"), HOW))
    visit.open(path, "strips")
    check(visit, ("memory", "strips"))


@pytest.mark.parametrize("visit", [(400, "light")], indirect=True, ids=["phone"])
def test_a_training_likewise(visit: Visit, folder: Path, plans: list[Planned]) -> None:
    path, planned = folder / "training.html", plans[0]
    page = TrainingPage(path, lambda plan: open_plan(plan, planned.graph, planned.cluster), "osdp train")
    page.report(Start(planned.plan, load_config("gpt2", {"steps": 2, "device": "cpu"}), 0.5, "cpu", 0, None))
    page.report(Step(1, 5.0, 2.0, 0.1, 8, 56, 0.5, 1 << 20, 1.0, (0.0, 0.125)))
    visit.open(path)
    check(visit, ("loss", "step-time", "memory-of-steps", "waiting", *PICTURES[1:]))


def check(visit: Visit, pictures: tuple[str, ...]) -> None:
    """Check that pictures fill the page, that nothing sticks out, that all can read it, and that nothing went wrong."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed (the extra `test`)")
    width = visit.page.viewport_size["width"]
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    for name in pictures:
        box = visit.page.locator(f"#{name} svg.main-svg").first.bounding_box()
        assert box["width"] > 0.8 * min(width, 1280)
    found = axe.Axe().run(visit.page).response["violations"]
    assert [(one["id"], one["help"]) for one in found if one["impact"] in SERIOUS] == []
    assert visit.faults == []


def test_the_slider_moves_the_plan(wide: Visit, plans: list[Planned]) -> None:
    """By keyboard, as a reader without a mouse does."""
    visit = wide
    for index, (key, planned) in enumerate(zip(("Home", "End"), plans, strict=True)):
        visit.page.locator("#limit").press(key)
        plan = planned.plan
        visit.page.wait_for_function(f"document.getElementById('limit').value === '{index}'")
        assert f"{plan.predicted.samples_per_s:,.0f}"[:3] in visit.text(".facts:visible dd")
        assert visit.text("#limit-text") == f"{LIMITS_MIB[index]:.1f} MiB"
        shown = visit.page.locator("data:visible").evaluate_all("all => all.map(one => Number(one.value))")
        assert shown == [*plan.predicted.memory_by_category.values(), plan.predicted.peak_memory_bytes]
        totals = visit.page.evaluate("document.getElementById('memory').data.find(t => t.name === 'in total').y")
        assert max(totals) == pytest.approx(plan.predicted.peak_memory_bytes / 2**20, abs=1e-3)
        strategies = visit.page.evaluate("document.getElementById('strip').data.map(t => t.name)")
        assert set(plan.choices.values()) <= {name for joined in strategies for name in joined.split(" and ")}
        marked = visit.page.evaluate("document.getElementById('frontier').data[0].y")
        assert marked == [plan.predicted.samples_per_s]
        assert f"in {plan.predicted.peak_phase}" in visit.page.locator("#memory").get_attribute("aria-label")
    assert visit.faults == []


def hover(visit: Visit, picture: str, trace: int, point: int) -> str:
    """Return what the page shows under the pointer at one bar; `trace` is an index of what plotly drew."""
    visit.page.locator(f"#{picture}").scroll_into_view_if_needed()
    bars = visit.page.locator(f"#{picture} .barlayer .trace").nth(trace)
    box = bars.locator(".point").nth(point).bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visit.page.wait_for_selector(f"#{picture} {HOVER}")
    found: str = visit.page.locator(f"#{picture} {HOVER}").first.text_content()
    return found


def test_hovering_tells_what_the_plan_says(wide: Visit, plans: list[Planned]) -> None:
    visit, planned = wide, plans[0]
    visit.page.locator("#limit").press("Home")
    visit.page.wait_for_function("document.getElementById('limit').value === '0'")
    names = visit.page.evaluate("document.getElementById('strip').data.map(t => t.hovertext)")
    for operator in (planned.graph.operators[0], planned.graph.operators[8]):
        trace, point = next(
            (trace, len(texts) - 1 - texts[::-1].index(text))
            for trace, texts in enumerate(names)
            for text in texts
            if text.startswith(f"{operator.name} (")
        )
        shown = hover(visit, "strip", trace, point)
        assert shown.startswith(f"{operator.name} ({operator.kind})")
        assert planned.plan.choices[operator.name] in shown
        visit.page.mouse.move(0, 0)
        visit.page.wait_for_selector(f"#strip {HOVER}", state="detached")
    assert "forward" in hover(visit, "streams", 0, 0)
    assert visit.faults == []


def test_a_model_of_html_runs_no_script(visit: Visit, folder: Path) -> None:
    path = folder / "hostile.html"
    write_report(path, make_report([planned_within(LIMITS_MIB[1], hostile(transformer(2, 128)))], HOW))
    visit.open(path)
    assert "<script>alert(1)</script>" in visit.text("h1")
    assert "<script>alert(1)</script>" in hover(visit, "strip", 0, 0)
    assert visit.faults == []
