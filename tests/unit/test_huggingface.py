"""`hf:config.json`: the class that a configuration names, its inputs and labels, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_cases import BERT, CASES, CLIP, GPT2, T5, VISION, WHISPER, length_of, write
from rehearsals import compare
from synthetic import cluster
from test_trace_memory import predicted_peaks, tracked_peaks
from thoroughness import THOROUGH, some

from osdp.planning.request import Request, plan_graph
from osdp.training.config import TrainConfig
from osdp.training.job import model_and_task
from osdp.zoo import load_model
from profiler.errors import OsdpError
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

transformers: Any = pytest.importorskip("transformers", reason="needs transformers (the extra `hf`)")


def refused(spec: str, **options: int) -> str:
    with pytest.raises(OsdpError) as caught:
        load_model(spec, **options)
    return str(caught.value)


@pytest.mark.parametrize("architecture", list(CASES))
def test_the_model_is_the_one_that_is_named_and_is_fed(tmp_path: Path, architecture: str) -> None:
    spec = write(tmp_path, architecture, *CASES[architecture])
    source = load_model(spec, sequence_length=length_of(architecture))
    torch.manual_seed(0)
    module = source.build()
    assert type(module).__name__ == architecture
    args, kwargs = source.example_inputs(module, 3)
    output = module(*args, **kwargs)
    assert {len(value) for value in kwargs.values() if isinstance(value, torch.Tensor)} == {3}
    if architecture == "T5Model":  # has no head
        return
    assert output.loss.shape == ()
    assert output.loss.isfinite()
    output.loss.backward()
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    assert len(trained) > len(parameters) / 2  # Llava leaves out the last layer of the images' encoder, by its default


TRACED = [name for name in CASES if not name.startswith("Wav2Vec2")]
FEW = [name for name in TRACED if name.startswith(("CLIP", "Whisper", "T5For"))]
"""Two towers, and encoders with decoders: of sound, and with an embedding that both share."""
FEWER: dict[str, dict[str, Any]] = {
    "clip": {"vision_config": {**VISION, "num_hidden_layers": 1}},
    "whisper": {"encoder_layers": 1},
    "t5": {"num_layers": 1},
}
"""Layers of one side of each, unless thorough."""


@pytest.mark.parametrize("architecture", TRACED if THOROUGH else FEW)
def test_the_trace_has_the_parameters_of_the_real_model(tmp_path: Path, architecture: str) -> None:
    """Of every architecture with --thorough."""
    model_type, sizes = CASES[architecture]
    spec = write(tmp_path, architecture, model_type, {**sizes, **({} if THOROUGH else FEWER[model_type])})
    source = load_model(spec, sequence_length=length_of(architecture))
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        real = model_class(transformers.AutoConfig.from_pretrained(source.name.removeprefix("hf:")))
    expected = {name: tuple(p.shape) for name, p in real.named_parameters() if p.dim()}
    graph = trace_model(source)
    assert {p.name: p.shape for operator in graph.operators for p in operator.parameters} == expected
    assert graph.numel == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize(
    ("architecture", "changes", "length"),
    [
        ("T5ForConditionalGeneration", {}, 1024),  # has no limit
        ("GPT2LMHeadModel", {}, 64),
        ("LlamaForCausalLM", {"max_position_embeddings": 10**6}, 1024),
        ("RobertaForSequenceClassification", {}, 64),  # 66 positions, of which two are for padding
        ("WhisperForConditionalGeneration", {}, 24),  # of the decoder
        ("CLIPModel", {}, 64),  # of the nested configuration of the text
        ("ViTForImageClassification", {}, 1),
    ],
)
def test_tokens_per_sample(tmp_path: Path, architecture: str, changes: dict[str, int], length: int) -> None:
    model_type, sizes = CASES[architecture]
    spec = write(tmp_path, architecture, model_type, {**sizes, **changes})
    assert load_model(spec).sequence_length == length
    if architecture == "ViTForImageClassification":
        (note,) = load_model(spec, sequence_length=8).notes
        assert note.startswith("the sequence length 8 has no effect")
    elif length < 1024:
        assert f"at most {length}" in refused(spec, sequence_length=length + 1)


@pytest.mark.parametrize(
    ("architecture", "changes", "shapes"),
    [
        ("BertForTokenClassification", {}, {"input_ids": (3, 18), "labels": (3, 18)}),
        ("BertForMultipleChoice", {}, {"input_ids": (3, 2, 18), "labels": (3,)}),
        ("BertForQuestionAnswering", {}, {"input_ids": (3, 18), "start_positions": (3,), "end_positions": (3,)}),
        ("DistilBertForSequenceClassification", {"num_labels": 5}, {"input_ids": (3, 18), "labels": (3, 5)}),
        ("WhisperForConditionalGeneration", {}, {"input_features": (3, 8, 40), "labels": (3, 18)}),
        ("T5Model", {}, {"input_ids": (3, 18), "decoder_input_ids": (3, 18)}),
        ("ViTForImageClassification", {"num_channels": 1}, {"pixel_values": (3, 1, 32, 32), "labels": (3,)}),
        ("CLIPModel", {}, {"input_ids": (3, 18), "pixel_values": (3, 3, 32, 32)}),
        # A score for every answer; an answer that a decoder writes.
        ("ViltForQuestionAnswering", {}, {"input_ids": (3, 18), "pixel_values": (3, 3, 32, 32), "labels": (3, 5)}),
        ("BlipForQuestionAnswering", {}, {"input_ids": (3, 18), "pixel_values": (3, 3, 32, 32), "labels": (3, 18)}),
        # 18 frames of convolutions of widths 10 and 3 and strides 5 and 2: 17 x 2 + 3 = 37 from 36 x 5 + 10.
        ("Wav2Vec2ForCTC", {}, {"input_values": (3, 190), "labels": (3, 9)}),
    ],
)
def test_shapes(tmp_path: Path, architecture: str, changes: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
    model_type, sizes = CASES[architecture]
    spec = write(tmp_path, architecture, model_type, {**sizes, **changes})
    source = load_model(spec, sequence_length=length_of(architecture))
    with torch.device("meta"):
        _, kwargs = source.example_inputs(source.build(), 3)
    assert {name: tuple(value.shape) for name, value in kwargs.items() if value is not True} == shapes


@pytest.mark.parametrize(
    ("model_type", "sizes", "chosen"),
    [
        ("gpt2", GPT2, "GPT2LMHeadModel"),
        ("bert", BERT, "BertForMaskedLM"),
        ("t5", T5, "T5ForConditionalGeneration"),
        ("whisper", WHISPER, "WhisperForConditionalGeneration"),
        ("vit", VISION, "ViTForImageClassification"),
        ("clip", CLIP, "CLIPModel"),
    ],
)
def test_without_an_architecture_one_is_chosen_and_named(
    tmp_path: Path, model_type: str, sizes: dict[str, Any], chosen: str
) -> None:
    source = load_model(write(tmp_path, None, model_type, sizes))
    assert source.notes == (f"the configuration names no architecture; {chosen} is planned",)
    with torch.device("meta"):
        assert type(source.build()).__name__ == chosen


def test_notes_on_what_is_ignored_come_with_the_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quantized = {**GPT2, "quantization_config": {"quant_method": "fp8"}}
    graph = trace_model(load_model(write(tmp_path, "GPT2LMHeadModel", "gpt2", quantized), sequence_length=8))
    ignored, assumed = graph.notes
    assert ignored == "quantization_config is ignored: the weights have the precision of the plan"
    assert "(value in tensor)" in assumed  # whether there is padding among the tokens
    assert not any(capfd.readouterr())  # transformers would tell of its loss, twice
    source = load_model(write(tmp_path, "Wav2Vec2ForCTC", *CASES["Wav2Vec2ForCTC"]))
    assert source.notes == ("layerdrop is ignored: every rank runs every layer",)


def test_a_folder_stands_for_its_configuration(tmp_path: Path) -> None:
    write(tmp_path, "GPT2LMHeadModel", "gpt2", GPT2)
    with torch.device("meta"):
        assert type(load_model(f"hf:{tmp_path}").build()).__name__ == "GPT2LMHeadModel"


def test_what_cannot_be_fed_is_refused_by_name(tmp_path: Path) -> None:
    message = refused(write(tmp_path, "AutoformerForPrediction", "autoformer", {"prediction_length": 4}))
    assert "past_values, past_time_features, past_observed_mask" in message
    assert "package.module:function" in message
    message = refused(write(tmp_path, "GPT2LMHeadModell", "gpt2", GPT2))
    assert "GPT2LMHeadModell" in message
    assert "did you mean GPT2LMHeadModel?" in message
    llava = write(tmp_path, "LlavaForConditionalGeneration", *CASES["LlavaForConditionalGeneration"])
    assert "more than 16, the tokens of an image" in refused(llava, sequence_length=16)


def test_faults_of_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert "does not exist" in refused(f"hf:{path}")
    assert f"there is no config.json in {tmp_path}" in refused(f"hf:{tmp_path}")
    for text in ("{}", "[1]", "not json", '{"model_type": "no_such_model"}'):
        path.write_text(text)
        assert "is not a configuration that transformers reads" in refused(f"hf:{path}")
    broken = load_model(write(tmp_path, "GPT2LMHeadModel", "gpt2", {**GPT2, "n_head": 5}))  # does not divide 32
    with pytest.raises(OsdpError, match="cannot build"):
        broken.build()


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write(tmp_path, "GPT2LMHeadModel", "gpt2", GPT2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert ".venv/bin/pip install -e '.[hf]'" in refused(spec)


def test_a_broken_transformers_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ModuleNotFoundError(f"Could not import module '{name}'") from RuntimeError("operator nms does not exist")

    spec = write(tmp_path, "GPT2LMHeadModel", "gpt2", GPT2)
    broken = ModuleType("transformers")
    broken.__getattr__ = fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "transformers", broken)
    message = refused(spec)
    assert "is installed and cannot be imported" in message
    assert "operator nms does not exist" in message


def test_the_tasks_of_osdp_train_are_for_heads_with_a_label_per_token(tmp_path: Path) -> None:
    def fits(architecture: str) -> None:
        spec = write(tmp_path, architecture, CASES[architecture][0], {**CASES[architecture][1], "vocab_size": 256})
        model_and_task(TrainConfig(TrainConfig.SCHEMA, model=spec, steps=1))

    fits("LlamaForCausalLM")
    for architecture in ("GPT2ForSequenceClassification", "BertForQuestionAnswering"):
        with pytest.raises(OsdpError, match="cannot learn the task addition"):
            fits(architecture)


class LossOnly(torch.nn.Module):
    """A model of transformers that takes its inputs in order and returns nothing but its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, pixel_values=images, return_loss=True).loss
        return loss


def test_a_contrastive_loss_of_transformers(tmp_path: Path) -> None:
    clip = load_model(write(tmp_path, "CLIPModel", "clip", {**CLIP, **FEWER["clip"]}), sequence_length=18)

    def example_inputs(module: torch.nn.Module, batch: int) -> Any:
        made = clip.example_inputs(module, batch)[1]
        return (made["input_ids"], made["pixel_values"]), {}

    source = ModelSource("clip", lambda: LossOnly(clip.build()), example_inputs, 18)
    graph = trace_model(source)
    # Storages of few bytes are rounded to 512.
    for batch, tolerance in some([(3, 0.1), (16, 0.02), (64, 0.005)], 2):
        pairs = zip(predicted_peaks(graph, batch), tracked_peaks(source, batch), strict=True)
        assert all(tracked <= predicted <= (1 + tolerance) * tracked for predicted, tracked in pairs)
    assert any(call.forward.matmul_flops.coefficients[2] for call in graph.calls)
    plan = plan_graph(graph, cluster(1, 2), Request(limit_bytes=2**40, micro_batch=32)).plan
    assert -0.01 <= compare(plan, source, graph, cluster(1, 2)).error <= 0.05
