"""`osdp train --restarts`: a job whose rank or node is lost goes on by itself, as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from programs import process_of, python
from ranks import children
from report_pages import read_page
from thoroughness import THOROUGH

from runtime.state.checkpoint import latest
from runtime.state.checkpoint_manifest import read_manifest

CHECKOUT = Path(__file__).resolve().parents[2]
OPTIONS = ("run.yaml", "--device", "cpu", "--log-every", "1")
CONFIG = {"schema": "osdp.train/1", "model": "fragile:build", "steps": 6, "batch": 4, "clip": 1.0}
"""Eight samples a step on two ranks."""
SAVED = ("--checkpoint", "saved", "--checkpoint-every", "2")
FRAGILE = """
import os, signal, time
from pathlib import Path
from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2

def build():
    model, calls = GPT2(GPT2Config(512, 128, hidden_size=64, layers=2, heads=4)), []

    def before(module, args):
        if args[0].is_meta or not module.training:
            return
        calls.append(1)
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if os.environ["RANK"] == "1" and len(calls) == 4 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(before)
    return model
"""
PATIENCE_S = 180.0


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "fragile.py").write_text(FRAGILE)
    (folder / "run.yaml").write_text(json.dumps(CONFIG))
    paths = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    command = [python(), "-m", "osdp", "train", *OPTIONS, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=os.environ | paths | environment, text=True, **streams)


def train(folder: Path, *arguments: str) -> tuple[int, str, str]:
    started = start(folder, *arguments)
    printed, told = started.communicate(timeout=PATIENCE_S)
    return started.returncode, printed, told


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+)/6  loss (\S+)", printed, re.MULTILINE)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run in which no rank is killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "killed").touch()
    status, printed, told = train(folder, *SAVED)
    assert (status, told) == (0, "")
    assert len(losses(printed)) == 6
    return folder, losses(printed)


def test_a_killed_rank_changes_nothing(tmp_path: Path, undisturbed: tuple[Path, dict[int, float]]) -> None:
    """It dies in its fourth step, of which three are done and two are saved."""
    status, printed, told = train(tmp_path, *SAVED, "--restarts", "2", "--html", "run.html")
    assert status == 0, told
    assert told.startswith("osdp: note: restart 1 of 2: rank 1 was killed by SIGKILL")
    assert losses(printed) == undisturbed[1]
    assert printed.count("\nrestart 1: continues after step 2 on 2 ranks (1 x 2); planned in ") == 1
    assert re.search(r"^1 restart: 1 step lost and run again, \d+\.\d s lost$", printed, re.MULTILINE)
    assert re.findall(r"^step (\d)/6", printed, re.MULTILINE) == list("1233456")
    first, second = (read_manifest(folder / "saved/step-000006").files for folder in (tmp_path, undisturbed[0]))
    assert {**first, ".metadata": None} == {**second, ".metadata": None}  # bit for bit
    # The page of the run that was killed had the first two steps, and that of the second has all.
    page = read_page((tmp_path / "run.html").read_text())
    (line,) = page.figures["plans"][0]["loss"]["data"]
    assert dict(zip(line["x"], line["y"], strict=True)) == pytest.approx(undisturbed[1], rel=1e-3)
    facts = dict(zip(page.facts[::3], page.facts[1::3], strict=True))
    assert (facts["restarts"], facts["steps"]) == ("1", "6 of 6")
    lines = {line["name"]: line["y"] for line in page.figures["plans"][0]["memory"]["data"]}
    assert lines["measured in a step of rank 0"] == pytest.approx(lines["in total"], abs=1.0)  # MiB


def test_bad_input_is_not_tried_again(tmp_path: Path) -> None:
    status, _, told = train(tmp_path, *SAVED, "--restarts", "2", "--mem", "2MB")
    assert status == 2
    assert told.startswith("osdp: error: no plan fits the memory limit\n")
    assert "restart" not in told


def test_samples_of_a_step_are_kept(undisturbed: tuple[Path, dict[int, float]]) -> None:
    """Three ranks cannot share eight samples evenly."""
    status, _, told = train(undisturbed[0], *SAVED, "--steps", "7", "--ranks-per-node", "3")
    assert status == 2
    assert "error: 3 ranks cannot share the samples of a step evenly\n  got: 8 samples per step" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--restarts", "1"), "a restart continues from a checkpoint, and none are written"),
        (("--nodes", "1:2", "--rdzv-endpoint", "h:1", "--plan", "p.yaml"), "a plan file is for one number of ranks"),
        (("--nodes", "2:1"), "the number of nodes is wrong"),
        (("--nodes", "1:2"), "several nodes need a rendezvous endpoint"),
    ],
)
def test_what_cannot_be_started_again_is_refused(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    status, _, said = train(tmp_path, *arguments)
    assert (status, said.startswith(f"osdp: error: {told}\n")) == (2, True), said


@pytest.mark.skipif(not THOROUGH, reason="waits for a node that does not come back")
def test_a_lost_node_is_done_without(tmp_path: Path, undisturbed: tuple[Path, dict[int, float]]) -> None:
    """Two launchers stand for two nodes; the second one is killed with its rank, and the first goes on alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = (*SAVED, "--restarts", "2", "--nodes", "1:2", "--ranks-per-node", "1", "--rdzv-endpoint", endpoint)
    tmp_path.joinpath("killed").touch()
    nodes = []
    for _ in range(2):
        nodes.append(start(tmp_path, *arguments, "--timeout-s", "10", STEP_S="1"))
        time.sleep(1.0)  # The first has the store.
    end_s = time.monotonic() + PATIENCE_S
    while latest(tmp_path / "saved") is None:
        assert time.monotonic() < end_s
        time.sleep(0.1)
    second = process_of(nodes[1].pid)
    ranks = [process_of(rank) for rank in children(second)]
    for process in (second, *ranks):
        os.kill(process, signal.SIGKILL)
    printed, told = nodes[0].communicate(timeout=PATIENCE_S)
    printed += nodes[1].communicate(timeout=PATIENCE_S)[0]
    assert nodes[0].returncode == 0, told
    assert losses(printed) == pytest.approx(undisturbed[1], rel=1e-3)
    assert re.search(
        r"^restart 1: continues after step \d on 1 ranks \(1 x 1\); planned in .* = 8 samples$", printed, re.M
    )
