"""Real steps for the viewers of predicted ones: which rank writes what and where, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import python

from osdp.training.viewer_files import SNAPSHOT_STEP, TIMELINE_STEP, StepRecorder

CHECKOUT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
CPU, GPU = torch.device("cpu"), torch.device("cuda")
OF_EVERY_RUN = ("--model", "gpt2-tiny", "--global-batch", "8", "--device", "cpu", "--ranks-per-node", "2")


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python(), "-m", "osdp", "train", *OF_EVERY_RUN, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=180)


def test_rank_0_writes_one_real_step_beside_the_predicted_one(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text("predicted")
    files = ("--timeline", "step.json", "--memory-snapshot", "step.pickle", "--trace", "traces")
    done = train(tmp_path, "--steps", "7", *files, "--fsdp-type", "FSDP")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("osdp: warning: there is no CUDA allocator to record on a CPU") == 1
    assert len(done.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"step.json", "step.measured.json", "traces"}
    assert (tmp_path / "step.json").read_text() == "predicted"
    events = json.loads((tmp_path / "step.measured.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    # One step: one call of the optimizer, and the collectives of FSDP2.
    assert sum(name.startswith("Optimizer.step#") for name in names) == 1
    assert any("allgather" in name for name in names)
    assert any("reduce_scatter" in name for name in names)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--steps", "6", "--timeline", "step.pickle"), "FILE.json"),
        (("--steps", "6", "--memory-snapshot", "no/step.pickle"), "mkdir -p no"),
        (("--steps", "5", "--timeline", "step.json"), "at least 6"),
        (("--steps", "4", "--memory-snapshot", "step.pickle"), "at least 5"),
    ],
)
def test_what_cannot_be_recorded_is_refused(tmp_path: Path, arguments: tuple[str, ...], part: str) -> None:
    done = train(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert part in done.stderr


class FakeHistory:
    """Stands in for the recording of CUDA's allocator, which needs a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.calls.append("synchronize"))

    def record(self, enabled: str | None = "all", **_: Any) -> None:
        self.calls.append("stop" if enabled is None else "record")

    def dump(self, path: str) -> None:
        self.calls.append("dump")
        Path(path).write_text("a snapshot")


def steps(recorder: StepRecorder, history: FakeHistory, fails: bool = False) -> list[bool]:
    """Run the steps that a recorder looks at; return in which it slows."""
    slow = []
    for _ in range(TIMELINE_STEP + 1):
        with recorder.step():
            slow.append(recorder.slows)
            history.calls.append("step")
            if fails and recorder.slows:
                raise RuntimeError("lost")
    return slow


def test_on_a_gpu_the_allocator_is_recorded_for_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = FakeHistory(monkeypatch)
    recorder = StepRecorder(str(tmp_path / "step.pickle"), None, GPU, rank=0)
    slow = steps(recorder, history)
    assert [number for number, slows in enumerate(slow, 1) if slows] == [SNAPSHOT_STEP]
    before, after = ["step"] * (SNAPSHOT_STEP - 1), ["step"] * (TIMELINE_STEP + 1 - SNAPSHOT_STEP)
    assert history.calls == [*before, "record", "step", "synchronize", "dump", "stop", *after]
    assert [path.name for path in tmp_path.iterdir()] == ["step.measured.pickle"]


def test_a_step_that_fails_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = FakeHistory(monkeypatch)
    with pytest.raises(RuntimeError, match="lost"):
        steps(StepRecorder(str(tmp_path / "step.pickle"), None, GPU, rank=0), history, fails=True)
    assert history.calls[-3:] == ["record", "step", "stop"]
    assert not list(tmp_path.iterdir())


def test_other_ranks_write_nothing_but_leave_the_same_steps_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = FakeHistory(monkeypatch)
    recorder = StepRecorder(str(tmp_path / "step.pickle"), str(tmp_path / "step.json"), GPU, rank=1)
    slow = steps(recorder, history)
    assert [number for number, slows in enumerate(slow, 1) if slows] == [SNAPSHOT_STEP, TIMELINE_STEP]
    assert set(history.calls) == {"step"}
    assert not list(tmp_path.iterdir())


def test_only_one_rank_warns(recwarn: pytest.WarningsRecorder) -> None:
    for rank in (0, 1):
        assert StepRecorder("step.pickle", None, CPU, rank).last_step == 0
    assert len(recwarn) == 1
