"""Replaying alike blocks gives the graph that running all gives; what differs is not taken for alike."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from drawn_models import Drawn
from huggingface_cases import CASES, length_of, write
from replay_models import ALIKE, BLOCKS, REFUSED, UNLIKE, Block, Model, model_of
from stacks import LENGTH, Stack
from thoroughness import THOROUGH, drawn_numbers, some
from torch import Tensor, nn
from trace_models import source

import profiler.trace.passes
from osdp.models.huggingface import load_hf
from osdp.zoo import load_model
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.metered_pass import Pass
from profiler.trace.replay import Replay, find_replay
from profiler.trace.trace import trace_model

CARDS = Path(__file__).parents[2] / "configs" / "models"
LAYERS = 24 if THOROUGH else 6


class Traced:
    """Traces models with and without replaying, and counts executions of blocks that were replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.replayed = 0

    def both(self, model: ModelSource, *settings: str) -> tuple[ModelGraph | str, ModelGraph | str]:
        """Return the graph, or the error, with replayed blocks and without."""

        def counted(replay: Replay, short: Pass) -> Pass:
            found = expanded(replay, short)
            self.replayed += len(replay.stand_ins.executions)
            return found

        expanded, found, self.replayed = Replay.expanded, list[ModelGraph | str](), 0
        for find in (find_replay, lambda module, whole: None):
            with self.monkeypatch.context() as patch:
                patch.setattr(Replay, "expanded", counted)
                patch.setattr(profiler.trace.passes, "find_replay", find)
                try:
                    found.append(trace_model(model, *settings))
                except OsdpError as error:
                    found.append(str(error))
        return found[0], found[1]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    return Traced(monkeypatch)


def test_alike_blocks_run_once_and_the_first_two_and_the_last_again() -> None:
    """In the first pass, all; in one that confirms it, three more, and two recomputed either way, run twice, three; and
    in the forward that tells what they may offload.
    """
    seen = SimpleNamespace(indices=[])

    class Counted(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.indices.append(self.index)
            return super().forward(x)

    trace_model(model_of(Model))  # the first pass of a process is run twice
    graph = trace_model(model_of(lambda: Model(Counted)))
    assert [block.block_class for block in graph.blocks] == [0] * BLOCKS
    assert [seen.indices.count(index) for index in range(BLOCKS)] == [14, 14, *[1] * 5, 14]


@pytest.mark.parametrize("case", some([*UNLIKE], 7))
def test_what_differs_is_not_taken_for_alike(case: str, traced: Traced) -> None:
    quick, whole = traced.both(model_of(UNLIKE[case]))
    assert quick == whole
    assert isinstance(quick, str) == (case in REFUSED)


@pytest.mark.parametrize("case", some([*ALIKE], 2))
def test_what_is_alike_is_replayed_in_every_pass(case: str, traced: Traced) -> None:
    """Where it is confirmed, at three other micro-batches, and recomputed at two."""
    words = case == "dropout"
    model = source(ALIKE[case], (32,), classes=64) if words else model_of(ALIKE[case])
    quick, whole = traced.both(model, "fp32", "cuda")
    assert quick == whole
    assert not isinstance(quick, str)
    assert traced.replayed >= 6 * (len(quick.blocks) - 4)


# --- everything that is traced elsewhere ------------------------------------------------------------


def deep(kind: type[Stack] | type[Drawn], number: int) -> ModelSource:
    """Return a drawn model with seven copies of its first block after its blocks."""

    def build() -> nn.Module:
        model = kind(number)
        model.blocks.extend(copy.deepcopy(model.blocks[0]) for _ in range(7))
        return model

    return ModelSource("drawn", build, lambda model, batch: model.example_inputs(batch), LENGTH)


@pytest.mark.parametrize(("kind", "numbers"), [(Stack, drawn_numbers(2, 1, 270)), (Drawn, drawn_numbers(0, 2, 270))])
def test_drawn_models_have_the_same_graph(kind: type[Stack] | type[Drawn], numbers: list[int], traced: Traced) -> None:
    """The first of each are some with replayed blocks, and one of `Drawn` without."""
    replayed = 0
    for number in numbers:
        settings = random.Random(number).choice([("fp32", "cpu"), ("bf16", "cuda")])
        quick, whole = traced.both(deep(kind, number), *settings)
        assert quick == whole, number
        replayed += traced.replayed > 0
    print(f"\n{replayed} models with replayed blocks")
    assert replayed


@pytest.mark.parametrize("name", ["bert-large", *(["gpt2-mini", "gpt2-1.5b", "llama-7b"] if THOROUGH else [])])
def test_models_of_the_zoo_have_the_same_graph(name: str, traced: Traced, tmp_path: Path) -> None:
    """BERT with 6 of its 24 layers, unless thorough."""
    card = tmp_path / "model.yaml"
    card.write_text(Path(CARDS, f"{name}.yaml").read_text().replace("layers: 24", f"layers: {LAYERS}"))
    quick, whole = traced.both(load_model(str(card)), "bf16", "cuda")
    assert quick == whole
    assert not isinstance(quick, str)
    assert traced.replayed >= 6 * (len(quick.blocks) - 4) > 0


@pytest.mark.skipif(not THOROUGH, reason="imports transformers for two CPU minutes of graphs: --thorough")
@pytest.mark.parametrize("architecture", CASES)
def test_models_of_transformers_have_the_same_graph(architecture: str, traced: Traced, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers (the extra `hf`)")
    model_type, sizes = CASES[architecture]
    layers = {name: 6 for name in sizes if name in ("num_hidden_layers", "num_layers", "n_layer")}
    model = load_hf(write(tmp_path, architecture, model_type, {**sizes, **layers}), length_of(architecture))
    quick, whole = traced.both(model, "bf16", "cuda")
    assert quick == whole
