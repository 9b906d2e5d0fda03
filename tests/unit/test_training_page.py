"""The page of a training run: figures are the run's, it is there while the run goes on, and restarts continue it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from report_pages import HOSTILE, Page, read_page

from osdp.cli.reports.train import plan_text
from osdp.planning.clusters import load_cluster
from osdp.planning.request import Planned, Request, plan_model
from osdp.report import training_page
from osdp.report.training_page import TrainingPage
from osdp.training.config import load_config
from osdp.training.job import prepare
from osdp.training.progress import Restarts
from osdp.training.reporters import Accuracy, Counted, Event, Memory, Saved, Skipped, Start, Step, Summary
from osdp.zoo import load_model
from planner.analysis.explain import open_plan
from profiler.byte_sizes import GIB, MIB
from profiler.errors import OsdpError
from runtime.observe.part_peaks import PartPeak

COMMAND = f"osdp train {HOSTILE}"
WAITS_S = (0.0, 0.125)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan_model(load_model("gpt2-tiny"), load_cluster("cpu-gloo"), Request(GIB))


def page_at(path: Path, planned: Planned) -> TrainingPage:
    return TrainingPage(path, lambda plan: open_plan(plan, planned.graph, planned.cluster), COMMAND)


def start(planned: Planned, first_step: int = 0, restarts: int = 0) -> Start:
    config = load_config("gpt2", {"steps": 4, "device": "cpu"})
    return Start(planned.plan, config, 0.5, "cpu", first_step, None, restarts)


def step(number: int, loss: float) -> Step:
    return Step(number, loss, 2.0, 0.1, 8, 56, 0.5, 3 * MIB, 1.0, WAITS_S)


def told(path: Path, planned: Planned, *events: Event) -> Page:
    """Report events to a new page and read it."""
    page = page_at(path, planned)
    for event in events:
        page.report(event)
    return read_page(path.read_text())


def drawn(page: Page, picture: str) -> dict[str, tuple[list[float], list[float]]]:
    return {line["name"]: (line["x"], line["y"]) for line in page.figures["plans"][0][picture]["data"]}


def test_figures_are_those_of_the_run(tmp_path: Path, planned: Planned) -> None:
    plan = planned.plan
    # By hand: 8 samples in 0.25 s are 32 a second.
    accuracies = (Accuracy("sums", 3, 4),)
    summary = Summary(plan, 2, 2, 0.25, 32.0, 224.0, Memory(5 * MIB, 0, "counted"), accuracies, 1, None, (0.0, 0.05))
    events = start(planned), step(1, 5.0), step(2, 4.0), Skipped(3), Saved(Path(f"saved/{HOSTILE}")), summary
    page = told(tmp_path / "run.html", planned, *events)
    facts = dict(zip(page.facts[::3], zip(page.facts[1::3], page.facts[2::3], strict=True), strict=True))
    assert facts["steps"] == ("2 of 4", f"newest checkpoint: saved/{HOSTILE}")
    assert facts["loss"][0] == "4"
    assert facts["measured samples/s"][0] == "32.00"
    assert facts["measured samples/s"][1].startswith(f"{32 / plan.predicted.samples_per_s:.2f} x the predicted ")
    assert facts["measured peak memory"][0] == "5.0 MiB"
    assert facts["longest wait"] == ("50.0 ms", "20.0% of a step: rank 1 for rank 0")
    assert facts["skipped steps"][0] == "1"
    assert facts["held-out accuracy"] == ("75.0%", "3 of 4 sums right")
    assert "The run is over" in page.text
    assert drawn(page, "loss") == {"loss": ([1, 2], [5.0, 4.0])}
    times = drawn(page, "step-time")
    assert times["measured"] == ([1, 2], [500.0, 500.0])
    assert times["predicted"][1] == pytest.approx([1e3 * plan.predicted.step_time_s] * 2, abs=1e-5)
    memory = drawn(page, "memory-of-steps")
    reserve_bytes = plan.predicted.memory_by_category["reserve"]
    held = {
        "measured peak": 3 * MIB,
        "predicted peak": plan.predicted.peak_memory_bytes - reserve_bytes,
        "limit without the reserve": GIB - reserve_bytes,
    }
    for name, size_bytes in held.items():
        assert memory[name][1] == pytest.approx([size_bytes / GIB] * 2, abs=1e-5)
    (waits,) = [bars for bars in page.figures["plans"][0]["waiting"]["data"] if bars["name"] == "waits"]
    assert (waits["y"], waits["x"], waits["orientation"]) == ([0, 1], [0.0, 50.0], "h")
    assert ["1", "50.0 ms", "20.0%"] in page.rows
    assert ["2", "4", "0.1", "2", "500.0 ms", "16.00", "3.0 MiB", "125.0 ms"] in page.rows
    # The plan's own report is below, and nothing of the run is markup.
    assert plan.model.fingerprint in page.text
    assert {"memory", "strip", "streams"} <= set(page.figures["plans"][0])
    assert HOSTILE not in (tmp_path / "run.html").read_text()
    assert len(page.scripts) == 3


def test_what_a_step_held_is_beside_the_prediction(tmp_path: Path, planned: Planned) -> None:
    """A tied head and a layer in a block count as the stage that they are in; the highest moment of each counts."""
    parts = (
        PartPeak("forward", "", 1 * MIB),
        PartPeak("forward", "wte", 2 * MIB),
        PartPeak("forward", "blocks.0", 4 * MIB),
        PartPeak("forward", "blocks.0.mlp.up", 3 * MIB),
        PartPeak("forward", "norm", 5 * MIB),
        PartPeak("forward", "lm_head", 7 * MIB),
        PartPeak("backward", "", 6 * MIB),
        PartPeak("optimizer", "", 8 * MIB),
        PartPeak("zero", "", 9 * MIB),
    )
    page = told(tmp_path / "run.html", planned, start(planned), Counted(parts), step(1, 5.0))
    (line,) = [line for line in page.figures["plans"][0]["memory"]["data"] if line["name"].startswith("measured")]
    view = open_plan(planned.plan, planned.graph, planned.cluster)
    names = [stage.name for stage in view.space.model.stages]
    first, last, optimizer = 0, len(names) - 1, 2 * len(names)
    wanted = {first: 2, names.index("blocks.0"): 4, last: 7, last + 1: 6, optimizer: 8, optimizer + 1: 8}
    reserve_bytes = planned.plan.predicted.memory_by_category["reserve"]
    assert {place: size for place, size in enumerate(line["y"]) if size is not None} == pytest.approx(
        {place: (size * MIB + reserve_bytes) / GIB for place, size in wanted.items()}, abs=1e-5
    )


def test_a_run_that_is_killed_has_a_page(tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written at the start, at the first step and with checkpoints; at others only if that costs next to nothing."""
    monkeypatch.setattr(training_page, "MOST_SHARE", 0.0)
    path = tmp_path / "run.html"
    page, first = page_at(path, planned), start(planned)
    states = []
    for event in (first, step(1, 5.0), step(2, 4.0), Saved(Path("saved")), step(3, math.nan)):
        page.report(event)
        states.append(json.loads(read_page(path.read_text()).figures["run"])["steps"])
    assert [len(steps) for steps in states] == [0, 1, 1, 2, 2]
    assert [one["waits_s"] for one in states[-1]] == [[0.125], [0.125]]  # of many ranks, they would be many
    assert "Written after step 2 of 4" in path.read_text()
    monkeypatch.setattr(training_page, "MOST_SHARE", 1e9)
    page.report(step(4, 3.0))
    (losses,) = drawn(read_page(path.read_text()), "loss").values()
    assert losses == ([1, 2, 3, 4], [5.0, 4.0, None, 3.0])


def test_a_restart_goes_on_in_the_page(tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_page, "MOST_SHARE", 1e9)
    path = tmp_path / "run.html"
    told(path, planned, start(planned), step(1, 5.0), step(2, math.inf), step(3, 9.0))
    again = start(planned, first_step=2, restarts=1)
    summary = Summary(planned.plan, 2, 0, 0.0, 0.0, 0.0, None, (), 0, Restarts(1, 1, 2.5))
    page = told(path, planned, again, step(3, 3.0), step(4, 2.0), summary)
    assert drawn(page, "loss")["loss"] == ([1, 2, 3, 4], [5.0, None, 3.0, 2.0])
    facts = dict(zip(page.facts[::3], zip(page.facts[1::3], page.facts[2::3], strict=True), strict=True))
    assert facts["restarts"] == ("1", "1 step lost and run again, 2.5 s lost")
    assert [row[-1] for row in page.rows if len(row) == 8 and row[0] in "1234"] == ["125.0 ms"] * 4
    # A run that goes on has not measured yet who waits, and one from the beginning has no other steps.
    assert "waiting" not in told(path, planned, start(planned, first_step=3)).figures["plans"][0]
    assert drawn(told(path, planned, start(planned), step(1, 7.0)), "loss")["loss"] == ([1], [7.0])
    # Nor has one where the page is of another model, or the file is no page, or is not there.
    model = dataclasses.replace(planned.plan.model, name="other")
    other = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, model=model))
    told(path, other, start(other), step(1, 7.0))
    for text in (path.read_text(), '<script id="figures" type="application/gzip">AAAA</script>', "", None):
        path.unlink() if text is None else path.write_text(text)
        assert drawn(told(path, planned, again, step(3, 3.0)), "loss")["loss"] == ([3], [3.0])


def test_a_page_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, planned: Planned) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    page = page_at(folder / "run.html", planned)
    page.report(start(planned))
    (folder / "run.html").unlink()
    folder.rmdir()
    with pytest.warns(UserWarning, match="the report is not written"):
        page.report(step(1, 5.0))


def test_long_runs_are_thinned_out(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_page, "MOST_STEPS", 4)
    page = told(tmp_path / "run.html", planned, start(planned), *(step(n, 1.0) for n in range(1, 9)), Saved(tmp_path))
    assert drawn(page, "loss")["loss"][0] == [1, 5, 7, 8]


def test_what_cannot_be_written_is_refused_before_any_rank_is_started(tmp_path: Path, planned: Planned) -> None:
    config = load_config("gpt2", {"device": "cpu", "html": str(tmp_path / "run.pdf")})
    with pytest.raises(OsdpError, match=r"run\.pdf cannot be written"):
        prepare(config)
    named = dataclasses.replace(start(planned), config=dataclasses.replace(config, html="run.html"))
    assert "report     run.html" in plan_text(named)
