"""What keeps a run's figures: the same scalars for all, a plan as text, and nothing that is not installed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from osdp.cli.reports.train import plan_text, step_line, summary_lines
from osdp.planning import Request, plan_model
from osdp.training.config import load_config
from osdp.training.job import prepare
from osdp.training.reporters import Accuracy, Event, Memory, Start, Step, Summary
from osdp.training.trackers import TRACKERS, Board
from osdp.zoo import load_cluster, load_model
from planner.plan import Plan
from profiler.errors import OsdpError

WANTED = {
    1: {"loss": 5.0, "learning_rate": 0.1, "samples_per_s": 16.0, "gradient_norm": 2.0},
    2: {"loss": 4.0, "learning_rate": 0.2, "samples_per_s": 32.0},
}
"""By hand: 8 samples a step, of 0.5 and 0.25 s."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_model(load_model("gpt2-tiny"), load_cluster("cpu-gloo"), Request(limit_bytes=2**30)).plan


def events(plan: Plan) -> list[Event]:
    """A run of two steps that goes on after two others; the first step is reported before memory is known."""
    config = load_config("gpt2", {"steps": 4, "device": "cpu"})
    return [
        Start(plan, config, 0.5, "cpu", 0, None),
        Step(1, 5.0, 2.0, 0.1, 8, 56, 0.5),
        Step(2, 4.0, None, 0.2, 8, 56, 0.25, peak_bytes=1000, left_s=0.5),
        Summary(plan, 2, 2, 0.25, 32.0, 224.0, Memory(2000, 0, "counted"), (Accuracy("held out sums", 3, 4),)),
    ]


def memory(plan: Plan, peak_bytes: int) -> dict[str, float]:
    reserve_bytes = plan.predicted.memory_by_category["reserve"]
    predicted_bytes = plan.predicted.peak_memory_bytes - reserve_bytes
    return {"memory/peak_bytes": peak_bytes, "memory/predicted_bytes": predicted_bytes, "memory/limit_bytes": 2**30}


def test_tensorboard_reads_what_was_written(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(tmp_path, plan_text)
    for event in events(plan):
        board.report(event)
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(1, 5.0), (2, 4.0)]
    assert [(one.step, one.value) for one in found.Scalars("samples_per_s")] == [(1, 16.0), (2, 32.0)]
    assert [(one.step, one.value) for one in found.Scalars("memory/peak_bytes")] == [(2, 1000.0), (2, 2000.0)]
    assert found.Scalars("memory/limit_bytes")[0].value == 2**30
    assert found.Scalars("accuracy/held_out_sums")[0].value == 0.75
    (text,) = found.Tensors("plan/text_summary")
    assert "osdp.plan/" in text.tensor_proto.string_val[0].decode()


class Recorder:
    """Stands for a run of wandb's, and for the module mlflow."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, str] = {}
        self.opened: list[str] = []
        self.ended = 0

    def init(self, project: str, config: dict[str, Any], resume: str) -> Recorder:
        assert config["steps"] == 4
        self.opened.append(project)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, dict(values)))

    def finish(self) -> None:
        self.ended += 1

    def start_run(self, run_name: str) -> None:
        self.opened.append(run_name)

    def log_params(self, values: dict[str, Any]) -> None:
        assert values["steps"] == 4
        assert None not in values.values()

    def log_text(self, text: str, name: str) -> None:
        self.summary[name] = text

    log_metrics, end_run = log, finish


@pytest.mark.parametrize(("name", "opened", "text"), [("wandb", "osdp", "plan"), ("mlflow", "gpt2-tiny", "plan.txt")])
def test_trackers_get_the_same_figures(name: str, opened: str, text: str, plan: Plan, monkeypatch: Any) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, name, recorder)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    tracker = TRACKERS[name](plan_text)
    for event in events(plan):
        tracker.report(event)
    assert recorder.opened == [opened]
    assert "osdp.plan/" in recorder.summary[text]
    assert recorder.logged == [
        (1, WANTED[1]),
        (2, WANTED[2] | memory(plan, 1000)),
        (2, {"accuracy/held_out_sums": 0.75} | memory(plan, 2000)),
    ]
    assert recorder.ended == 1


def test_wandb_offline(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracker = TRACKERS["wandb"](plan_text)
    for event in events(plan):
        tracker.report(event)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow_in_files(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
    tracker = TRACKERS["mlflow"](plan_text)
    for event in events(plan):
        tracker.report(event)
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.metrics["loss"] == 4.0
    assert run.data.metrics["memory/peak_bytes"] == 2000


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_one_that_is_not_installed_is_refused_before_the_start(name: str) -> None:
    config = load_config("gpt2", {"tracker": name, "device": "cpu"})
    with patch("importlib.util.find_spec", return_value=None), pytest.raises(OsdpError) as caught:
        prepare(config)
    assert f"{name} is not installed\n  got: --tracker {name}" in str(caught.value)
    with pytest.raises(OsdpError, match="--tracker is not known"):
        load_config("gpt2", {"tracker": "notebook"})


@pytest.mark.parametrize(
    ("left_s", "told"),
    [(0.4, "0:00"), (59.6, "1:00"), (725, "12:05"), (11_525, "3:12:05"), (2 * 86_400 + 65, "2 d 0:01:05")],
)
def test_the_time_that_is_left(left_s: float, told: str) -> None:
    step = Step(7, 5.0, None, 0.1, 8, 56, 0.5, left_s=left_s)
    assert step_line(step, 10).endswith(f"tokens/s  {told} left")
    assert step_line(step, 7).endswith("tokens/s")


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (109.0, "1.09 x the predicted: the prediction holds"),
        (89.0, "0.89 x the predicted: osdp profile --model gpt2-tiny --batch "),
        (111.0, "1.11 x the predicted: osdp profile"),
    ],
)
def test_measured_and_predicted_throughput_are_compared(measured: float, told: str, plan: Plan) -> None:
    predicted = dataclasses.replace(plan.predicted, samples_per_s=100.0)
    assumed = dataclasses.replace(plan, predicted=predicted)
    summary = Summary(assumed, 3, 1, 1.0, measured, 7 * measured, None, ())
    assert any(line.startswith(f"measured throughput is {told}") for line in summary_lines(summary))
    untimed = dataclasses.replace(summary, timed_steps=0)
    assert not any("measured throughput" in line for line in summary_lines(untimed))
