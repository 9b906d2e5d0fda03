"""Graphs that come with OSDP: those that the tracer makes, used where they are right, and without PyTorch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from thoroughness import THOROUGH

from osdp.planning import named_model, zoo_graphs
from osdp.planning.named_model import NamedModel, TraceSettings
from osdp.planning.zoo_graphs import DEVICE_TYPE, PRECISIONS, MadeFrom, tracer_hash, write_zoo_graphs, zoo_graph
from osdp.resources import resource_dir
from osdp.zoo import load_model, model_names
from profiler.trace.trace import trace_model

FOLDER = resource_dir("configs") / "graphs"
AGAIN = "run: python scripts/trace_zoo.py"
ALL = [(name, precision) for name in model_names() for precision in PRECISIONS]
FEW = [("bert-tiny", "fp32"), ("gpt2-1.5b", "bf16"), ("llama-1b", "bf16")]
LATEST = pytest.mark.skipif(not torch.__version__.startswith("2.13.0"), reason="graphs are of torch 2.13.0")


def test_they_are_of_this_tracer_and_of_these_models() -> None:
    """What `MadeFrom.now` has of torch aside, which other tests know."""
    made = json.loads((FOLDER / "traced.json").read_text())
    assert made["tracer"] == tracer_hash(), AGAIN
    assert made["models"] == MadeFrom.now().models, AGAIN
    assert sorted(path.name for path in FOLDER.glob("*.gz")) == sorted(f"{a}-{b}.json.gz" for a, b in ALL), AGAIN
    pinned = (FOLDER.parents[1] / "constraints.txt").read_text().split()
    assert f"torch=={made['torch']}" in pinned, AGAIN


@LATEST
@pytest.mark.parametrize(("name", "precision"), ALL if THOROUGH else FEW)
def test_they_are_what_a_trace_makes(name: str, precision: str) -> None:
    """Unless thorough, of three families one; the GPT-2 is what other tests plan as it comes."""
    assert zoo_graph(name, None, precision) == trace_model(load_model(name), precision, DEVICE_TYPE), AGAIN


@LATEST
def test_a_first_plan_imports_no_pytorch(tmp_path: Path) -> None:
    program = f"""
import os, sys
os.environ["{named_model.FOLDER}"] = {str(tmp_path)!r}
from osdp.cli import main
sys.argv = ["osdp", "plan", "--model", "gpt2-mini", "--mem", "1GB"]
assert not main()
assert "torch" not in sys.modules and not os.listdir({str(tmp_path)!r})
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "The model was traced before" in ended.stdout


@LATEST
def test_only_what_was_asked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another length, device, dtype of parameters or load of experts needs its own trace; a micro-batch does not."""
    traced: list[TraceSettings] = []
    monkeypatch.setenv(named_model.FOLDER, "")
    monkeypatch.setattr(NamedModel, "load", lambda self: load_model(self.name, sequence_length=16))
    monkeypatch.setattr(
        TraceSettings, "trace", lambda self, source: traced.append(self) or named_model.Traced(GRAPH, 1.0)
    )
    of_zoo = TraceSettings("bf16", "cuda")
    for settings in (of_zoo, TraceSettings("bf16", "cuda", 7)):
        assert NamedModel("gpt2-tiny").traced(settings).graph == zoo_graph("gpt2-tiny", None, "bf16")
        assert NamedModel("gpt2-tiny", 64).traced(settings).trace_s is None
    assert not traced
    for model, settings in (
        (NamedModel("gpt2-tiny", 65), of_zoo),
        (NamedModel("gpt2-tiny"), TraceSettings("bf16", "cpu")),
        (NamedModel("gpt2-tiny"), TraceSettings("bf16", "cuda", None, "fp32")),
        (NamedModel("gpt2-tiny"), TraceSettings("bf16", "cuda", None, "", 2.0)),
        (NamedModel(str(FOLDER.parent / "models" / "gpt2-tiny.yaml")), of_zoo),
    ):
        assert model.traced(settings).trace_s == 1.0
    assert len(traced) == 5


GRAPH = trace_model(load_model("gpt2-tiny", sequence_length=16))


def older_torch(folder: Path, change: pytest.MonkeyPatch) -> None:
    change.setattr(zoo_graphs, "version", lambda package: "2.12.1+cu130")


def other_tracer(folder: Path, change: pytest.MonkeyPatch) -> None:
    change.setattr(zoo_graphs, "tracer_hash", lambda: "0")


def other_sizes(folder: Path, change: pytest.MonkeyPatch) -> None:
    index = folder / "graphs" / "traced.json"
    index.write_text(index.read_text().replace("hidden_size=64", "hidden_size=32"))


def damaged(folder: Path, change: pytest.MonkeyPatch) -> None:
    path = folder / "graphs" / "gpt2-tiny-fp32.json.gz"
    path.write_bytes(path.read_bytes()[:-100])


def no_graph(folder: Path, change: pytest.MonkeyPatch) -> None:
    (folder / "graphs" / "gpt2-tiny-fp32.json.gz").write_bytes(b"")


def no_index(folder: Path, change: pytest.MonkeyPatch) -> None:
    (folder / "graphs" / "traced.json").unlink()


def other_index(folder: Path, change: pytest.MonkeyPatch) -> None:
    (folder / "graphs" / "traced.json").write_text('{"schema": "osdp.zoo_graphs/1", "torch": [], "tracer": 1}')


@LATEST
@pytest.mark.parametrize(
    "change",
    [older_torch, other_tracer, other_sizes, damaged, no_graph, no_index, other_index],
    ids=lambda one: one.__name__,
)
def test_what_may_be_wrong_is_not_used(
    change: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = tmp_path / "configs"
    shutil.copytree(FOLDER.parent, copied)
    monkeypatch.setattr(zoo_graphs, "resource_dir", lambda name: copied)
    assert zoo_graph("gpt2-tiny", None, "fp32") is not None
    change(copied, monkeypatch)
    assert zoo_graph("gpt2-tiny", None, "fp32") is None


def test_the_same_graphs_are_written_as_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_graphs, "resource_dir", lambda name: tmp_path)
    (tmp_path / "graphs").mkdir()
    written = []
    for _ in range(2):
        write_zoo_graphs({("gpt2-tiny", "fp32"): GRAPH})
        written.append({path.name: path.read_bytes() for path in (tmp_path / "graphs").iterdir()})
    assert written[0] == written[1]
    made = json.loads(written[0]["traced.json"])
    assert made["torch"] == version("torch").split("+")[0]
    if made["torch"] == "2.13.0":
        assert made["models"] == json.loads((FOLDER / "traced.json").read_text())["models"]
