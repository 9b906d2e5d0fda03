"""Traced models as text, and kept on disk: found again only where nothing they depend on has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import spec_from_file_location
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from command_line import trace_once
from hypothesis import given
from hypothesis import strategies as st
from small_models import MODELS, hugging_face
from thoroughness import THOROUGH
from torch import nn
from trace_models import source

from osdp import zoo
from osdp.planning import named_model, zoo_graphs
from osdp.planning.named_model import NamedModel, TraceSettings, cache_folder
from osdp.zoo import load_model
from profiler.errors import OsdpError
from profiler.graph_file import graph_from_text, graph_to_text
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

FP32 = TraceSettings("fp32", "cuda")
TINY = NamedModel("gpt2-tiny", 16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(named_model.FOLDER, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture(autouse=True)
def traced_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph of a model of the zoo is asked for again and again, and OSDP is not to know it."""
    monkeypatch.setattr("profiler.trace.trace.trace_model", trace_once)


@pytest.fixture
def _graph_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is traced has the same graph, where a test asks only what is traced."""
    monkeypatch.setattr("profiler.trace.trace.trace_model", lambda source, *settings, world_size: GRAPH)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that are loaded to be traced."""
    found: list[str] = []
    load = NamedModel.load
    monkeypatch.setattr(NamedModel, "load", lambda self: found.append(self.name) or load(self))
    return found


KINDS = (
    "AlbertForMaskedLM",
    "MambaForCausalLM",
    "Qwen3MoeForCausalLM, grouped_mm",
    "bf16, fp32, fp64, 0-d",
    "nn.Transformer",
)
"""Models whose graphs differ in kind: blocks that repeat, scans, experts, mixed dtypes, an encoder with a decoder."""
NAMES = sorted(MODELS) if THOROUGH else KINDS
SMALLER: dict[str, Callable[[], ModelSource]] = {
    "MambaForCausalLM": lambda: hugging_face("MambaForCausalLM", num_hidden_layers=1),
    "Qwen3MoeForCausalLM, grouped_mm": lambda: hugging_face(
        "Qwen3MoeForCausalLM", num_hidden_layers=1, experts_implementation="grouped_mm"
    ),
    "nn.Transformer": lambda: source(
        lambda: nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True), (6, 16), (6, 16)
    ),
}
"""With one layer of each kind, unless thorough."""


# --- text


@pytest.mark.parametrize(("name", "precision"), [*zip(NAMES, cycle(("fp32", "bf16")), strict=False)])
def test_a_graph_is_the_same_after_it_was_text(name: str, precision: str) -> None:
    """Of each kind of model; with --thorough, of all models."""
    made = MODELS[name] if THOROUGH else SMALLER.get(name, MODELS[name])
    graph = trace_model(made(), precision, "cuda")
    again = graph_from_text(graph_to_text(graph))
    assert again == graph
    assert repr(again) == repr(graph)  # 1 is not 1.0


GRAPH = trace_model(load_model("gpt2-tiny", sequence_length=16))
TEXT = graph_to_text(GRAPH)


def test_what_is_shared_is_written_once() -> None:
    graph = GRAPH
    again = graph_from_text(graph_to_text(graph))
    parts = [(one.forward, one.backward, one.saved_bytes) for one in graph.calls]
    found = [(one.forward, one.backward, one.saved_bytes) for one in again.calls]
    assert len({id(part) for each in parts for part in each}) == len({id(part) for each in found for part in each})
    assert len(graph_to_text(replace(graph, calls=graph.calls * 2))) < 1.2 * len(graph_to_text(graph))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"schema": "osdp.model_graph/0", "fields": {}, "rows": []}', "[" * 100_000]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(OsdpError, match="not a traced model"):
        graph_from_text(text)


@pytest.mark.parametrize("row", [["os.system", "true"], ["eval", "1"], ["__class__"], ["tuple", 1], ["Work"], [[1]], 7])
def test_rows_make_objects_of_a_graph_and_nothing_else(row: Any) -> None:
    document = json.loads(TEXT)
    document["rows"].append(row)
    with pytest.raises(OsdpError, match="not a traced model"):
        graph_from_text(json.dumps(document))


@given(st.data())
def test_damaged_text_is_refused_or_is_a_graph(data: st.DataObject) -> None:
    text = TEXT
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    damaged = text[:start] + data.draw(st.text(max_size=8)) + text[end:]
    with suppress(OsdpError):
        assert isinstance(graph_from_text(damaged), ModelGraph)


# --- files

FACTORY = """
import torch

def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.example_inputs = lambda micro_batch: ((torch.randn(micro_batch, 4),), {})
    return model
"""
HUGGING_FACE = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 2,
    "n_layer": 2,
    "vocab_size": 64,
    "n_positions": 32,
}


def test_a_hugging_face_configuration_is_kept(folder: Path, tmp_path: Path, traces: list[str]) -> None:
    """Under the same name whatever was loaded before, and not under that of another configuration."""
    named = NamedModel(f"hf:{tmp_path}", 8)
    for layers in (2, 3):
        (tmp_path / "config.json").write_text(json.dumps({**HUGGING_FACE, "n_layer": layers}))
        first, second = named.traced(FP32), named.traced(FP32)
        assert len(first.graph.blocks) == layers
        assert (second.graph, second.trace_s) == (first.graph, None)
    assert len(traces) == 2


@pytest.mark.parametrize("communicates", [False, True])
def test_a_graph_of_a_model_that_runs_collectives_is_kept_for_its_ranks(
    communicates: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces: list[str]
) -> None:
    """That of another is found for any number of ranks."""

    def traced(source: ModelSource, *settings: Any, world_size: int) -> ModelGraph:
        return replace(GRAPH, world_size=world_size if communicates else 0)

    monkeypatch.setattr("profiler.trace.trace.trace_model", traced)
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    named = NamedModel(f"hf:{tmp_path}", 8)
    found = [named.traced(replace(FP32, world_size=ranks)).graph.world_size for ranks in (8, 4, 8, 4)]
    assert found == ([8, 4, 8, 4] if communicates else [0] * 4)
    assert len(traces) == (2 if communicates else 1)


def test_files_of_editors_beside_the_tracer_change_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them links to nothing, and what is not text."""
    tracer = tmp_path / "profiler"
    tracer.mkdir()
    (tracer / "passes.py").touch()
    monkeypatch.setattr(zoo_graphs, "__file__", str(tmp_path / "osdp" / "planning" / "zoo_graphs.py"))
    before = TINY._path(FP32)
    assert before is not None
    (tracer / ".#passes.py").symlink_to("nowhere")
    (tracer / "._passes.py").write_bytes(b"\xff\xfe")
    assert TINY._path(FP32) == before
    (tracer / "passes.py").write_bytes(b"\xff")
    assert TINY._path(FP32) not in (None, before)
    (tracer / "passes.py").unlink()
    (tracer / "passes.py").symlink_to("nowhere")
    assert TINY._path(FP32) is None, "it is not known what a graph depends on"


def test_names_that_are_no_text_are_names_too(folder: Path, tmp_path: Path, traces: list[str]) -> None:
    file = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.yaml")
    Path(file).write_text((Path(__file__).parents[2] / "configs/models/gpt2-tiny.yaml").read_text())
    for _ in range(2):
        NamedModel(file, 16).traced(FP32)
    assert len(traces) == 1


def test_a_package_that_is_worked_on_is_not_known_by_its_version(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    assert NamedModel(f"hf:{tmp_path}")._path(FP32) is not None
    package = tmp_path / "checkout" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    spec = spec_from_file_location("transformers", package / "__init__.py")
    monkeypatch.setattr(zoo, "find_spec", lambda name: spec)
    assert NamedModel(f"hf:{tmp_path}")._path(FP32) is None


def test_a_model_is_traced_once(folder: Path, traces: list[str]) -> None:
    first, second = TINY.traced(FP32), TINY.traced(FP32)
    assert traces == ["gpt2-tiny"]
    assert first.trace_s is not None
    assert second.trace_s is None
    assert second.graph == first.graph == trace_model(load_model("gpt2-tiny", sequence_length=16), "fp32", "cuda")
    assert len(list((folder / "graphs").iterdir())) == 1


@pytest.mark.parametrize(
    "changed",
    [
        (replace(TINY, sequence_length=8), FP32),
        (TINY, replace(FP32, precision="bf16")),
        (TINY, replace(FP32, device_type="cpu")),
        (TINY, replace(FP32, expert_imbalance=1.5)),
        (NamedModel("gpt2-mini", 16), FP32),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_graph_of_any")
def test_another_question_is_traced_anew(
    folder: Path, traces: list[str], changed: tuple[NamedModel, TraceSettings]
) -> None:
    TINY.traced(FP32)
    named, settings = changed
    named.traced(settings)
    assert len(traces) == 2


@pytest.mark.usefixtures("_graph_of_any")
def test_a_trace_for_any_micro_batch_is_one_for_each(folder: Path, traces: list[str]) -> None:
    two, four = (replace(FP32, micro_batch=size) for size in (2, 4))
    for settings in (two, four, two, FP32, four):
        TINY.traced(settings)
    assert len(traces) == 3
    TINY.traced(replace(FP32, micro_batch=8))
    assert len(traces) == 3


def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Change what a graph depends on, one after the other."""
    packages = tmp_path / "packages"
    (packages / "torch-2.99.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(packages)
    yield "an installed package"
    (packages / "torch-2.99.0.dist-info").rename(packages / "torch-2.99.1.dist-info")
    yield "its version"
    monkeypatch.setenv("TORCH_MADE_UP", "1")
    yield "a setting of PyTorch"
    monkeypatch.setattr(zoo_graphs, "_TRACERS", (*zoo_graphs._TRACERS, "setup.cfg"))
    yield "the tracer"


def test_where_anything_has_changed_a_model_is_traced_anew(
    folder: Path, tmp_path: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    TINY.traced(FP32)
    for count, what in enumerate(surroundings(tmp_path, monkeypatch), start=2):
        path = TINY._path(FP32)
        assert path is not None
        assert not path.exists(), what
        path.touch()
        assert len(list(path.parent.iterdir())) == count, what


def test_files_of_models_are_known_by_what_they_say(folder: Path, tmp_path: Path, traces: list[str]) -> None:
    file = tmp_path / "model.yaml"
    text = (Path(__file__).parents[2] / "configs/models/gpt2-tiny.yaml").read_text()
    file.write_text(text)
    NamedModel(str(file), 16).traced(FP32)
    NamedModel(str(file), 16).traced(FP32)
    assert len(traces) == 1
    file.write_text(text.replace("layers: 4", "layers: 3").replace("parameters:", "# parameters:"))
    assert len(NamedModel(str(file), 16).traced(FP32).graph.blocks) == 3
    assert len(traces) == 2


def test_the_users_own_code_is_never_kept(
    folder: Path, tmp_path: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it depends on is not known."""
    (tmp_path / "made_up_models.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        assert NamedModel("made_up_models:make_model").traced(FP32).trace_s is not None
    assert traces == ["made_up_models:make_model"] * 2
    assert not folder.exists()


def test_unknown_names_are_told_as_they_are_without_the_folder(folder: Path) -> None:
    with pytest.raises(OsdpError, match="no such model"):
        NamedModel("gpt2-teeny").traced(FP32)
    with pytest.raises(OsdpError, match="does not exist"):
        NamedModel("hf:nowhere.json").traced(FP32)


@pytest.mark.parametrize("damaged", ["", "{", '{"schema": "osdp.model_graph/3"}', TEXT[:-1]])
def test_a_damaged_file_is_traced_anew_and_mended(folder: Path, traces: list[str], damaged: str) -> None:
    TINY.traced(FP32)
    (file,) = (folder / "graphs").iterdir()
    file.write_text(damaged)
    assert TINY.traced(FP32).trace_s is not None
    assert TINY.traced(FP32).trace_s is None
    assert len(traces) == 2


def test_a_folder_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(named_model.FOLDER, str(tmp_path / "file"))
    assert TINY.traced(FP32).graph == TINY.traced(FP32).graph
    assert len(traces) == 2


@pytest.mark.usefixtures("_graph_of_any")
def test_the_oldest_of_too_many_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_model, "MOST_GRAPHS", 2)
    for length in (4, 8):
        NamedModel("gpt2-tiny", length).traced(FP32)
    for age, file in enumerate(sorted((folder / "graphs").iterdir(), key=lambda one: one.stat().st_mtime)):
        os.utime(file, (1000 + age, 1000 + age))
    assert NamedModel("gpt2-tiny", 4).traced(FP32).trace_s is None  # it is used, so that the other one is older
    NamedModel("gpt2-tiny", 16).traced(FP32)
    assert NamedModel("gpt2-tiny", 4).traced(FP32).trace_s is None
    assert NamedModel("gpt2-tiny", 8).traced(FP32).trace_s is not None


def test_where_graphs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(named_model.FOLDER, "")
    assert cache_folder() is None
    monkeypatch.delenv(named_model.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "osdp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "osdp"


PROGRAM = """
import sys
from osdp.cli import main
status = main()
print("torch" in sys.modules, file=sys.stderr)
raise SystemExit(status)
"""


def test_a_kept_graph_is_planned_without_torch(folder: Path, tmp_path: Path) -> None:
    """Also where the cluster is the one of the GPUs that are visible, if no driver is there."""

    def told(*arguments: str, imports: str = "False") -> str:
        """Do it in another process, and return what it prints."""
        command = [sys.executable, "-c", PROGRAM, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert run.stderr.split()[-1] == imports
        return run.stdout

    wanted = "plan", "--model", "gpt2-tiny", "--seq", "32", "--mem", "2GB"
    first = json.loads(told(*wanted, "--json", imports="True"))
    plan = tmp_path / "plan.yaml"
    second = json.loads(told(*wanted, "-o", str(plan), "--json"))
    seconds = [one.pop("seconds") for one in (first, second)]
    assert first == second
    told("explain", str(plan), "lm_head")
    assert (seconds[0]["trace"] > 0, seconds[1]["trace"]) == (True, None)
