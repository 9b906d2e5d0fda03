"""The tracer against hand arithmetic, torch's own counters and real memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode
from trace_models import (
    MLP,
    Attention,
    ConvNet,
    EncoderDecoder,
    LanguageModel,
    RotaryLayer,
    language_model,
    source,
)

import profiler.trace
from profiler.errors import OsdpError
from profiler.fit import SIZES, envelope, line
from profiler.graph import Affine, Call, ModelGraph
from profiler.source import ModelSource
from profiler.stage import FakeStage
from profiler.trace import trace_model


def call_of(graph: ModelGraph, name: str) -> Call:
    """Return the only call of the operator called `name`."""
    (found,) = calls_of(graph, name)
    return found


def calls_of(graph: ModelGraph, name: str) -> list[Call]:
    return [call for call in graph.calls if graph.operators[call.operator].name == name]


# --- FLOPs ----------------------------------------------------------------------------------------


def test_flops_and_bytes_of_linear_layers_by_hand() -> None:
    graph = trace_model(source(lambda: MLP(8, 16, 4, bias=False), (64, 8), length=64))
    first, second = graph.calls
    # 64 tokens, 2 m n k each; the first layer's input needs no gradient.
    assert first.forward.matmul_flops == Affine(0, 2 * 64 * 8 * 16)
    assert first.backward.matmul_flops == Affine(0, 2 * 64 * 8 * 16)
    assert second.forward.matmul_flops == Affine(0, 2 * 64 * 16 * 4)
    assert second.backward.matmul_flops == Affine(0, 2 * 2 * 64 * 16 * 4)
    # Reads input and weight, writes the output; the ReLU reads and writes 16 floats a token.
    assert first.forward.matmul_bytes == Affine(4 * 8 * 16, 4 * 64 * (8 + 16))
    assert first.forward.other_bytes == Affine(0, 4 * 64 * 2 * 16)


def test_attention_flops_by_hand() -> None:
    length, width, heads = 16, 32, 4

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(width, heads)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x)
            return out.sum()

    graph = trace_model(source(Model, (length, width)))
    product = 2 * heads * length * length * (width // heads)
    projection = 2 * length * width * 3 * width
    call = call_of(graph, "attention.qkv")
    assert call.forward.matmul_flops == Affine(0, projection + 2 * product)
    assert call.backward.matmul_flops == Affine(0, projection + 5 * product)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda: MLP(24, 40, 8, 56), [(5, 24)]),
        (ConvNet, [(3, 8, 8)]),
        (EncoderDecoder, [(7, 32), (5, 32)]),
    ],
    ids=["mlp", "convolutions", "encoder-decoder"],
)
def test_flops_agree_with_torchs_counter(build: Callable[[], nn.Module], shapes: list[tuple[int, ...]]) -> None:
    """Unfused attention only: torch's counter does not know the fused CPU op."""
    graph = trace_model(source(build, *shapes))
    for batch in (1, 3):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            counted = _flops(build(), shapes, batch)
        fused = _fused_attention_surplus(graph, shapes, batch) if len(shapes) == 2 else 0
        traced = sum(call.forward.matmul_flops(batch) + call.backward.matmul_flops(batch) for call in graph.calls)
        assert traced - fused == counted


def _flops(module: nn.Module, shapes: list[tuple[int, ...]], batch: int) -> int:
    with FlopCounterMode(display=False) as counter:
        module(*(torch.randn(batch, *shape) for shape in shapes)).backward()
    return counter.get_total_flops()


def _fused_attention_surplus(graph: ModelGraph, shapes: list[tuple[int, ...]], batch: int) -> int:
    """The fused backward computes the scores once more: one product for each attention."""
    (encoded, width), (decoded, _) = shapes
    pairs = 2 * encoded * encoded + 2 * decoded * decoded + 2 * decoded * encoded
    return 2 * batch * pairs * width


def test_language_model_flops_are_six_per_parameter_and_token() -> None:
    """Forward 2, backward 4 per weight of a matrix product and token, attention aside."""
    width, length, words, layers = 32, 16, 64, 3
    graph = trace_model(language_model(width=width, length=length, words=words, layers=layers))
    weights = layers * 12 * width * width + words * width
    attention = layers * 7 * 2 * length * length * width
    total = sum((call.forward.matmul_flops(1) + call.backward.matmul_flops(1)) for call in graph.calls)
    assert total == 6 * weights * length + attention


# --- memory ---------------------------------------------------------------------------------------


def test_saved_bytes_of_an_mlp_by_hand() -> None:
    graph = trace_model(source(lambda: MLP(8, 16, 16, 4), (64, 8)))
    first, second, third = graph.calls
    # The input, and the ReLU's result, which is also the next layer's input; nothing for the sum.
    assert first.saved_bytes == Affine(0, 4 * 64 * (8 + 16))
    assert second.saved_bytes == Affine(0, 4 * 64 * 16)
    assert third.saved_bytes == Affine(0, 0)


def test_peaks_of_an_mlp_by_hand() -> None:
    graph = trace_model(source(lambda: MLP(8, 128, 8, bias=False), (64, 8)))
    first, second = graph.calls
    # Input, product and ReLU live together at the end of the first call.
    assert first.forward_peak_bytes == Affine(0, 4 * 64 * (8 + 128 + 128))
    # Earlier calls saved input and ReLU; output, and the scalar sum rounded up to 512 bytes.
    assert second.forward_peak_bytes == Affine(512, 4 * 64 * 8)
    # The loss and its gradient; output is gone; gradient of the ReLU's result and of the weight.
    # The weight's gradient comes first, then the ReLU's.
    assert second.backward_peak_bytes == Affine(2 * 512 + 4 * 128 * 8, 4 * 64 * 128)
    # Saved input and ReLU; its gradient, and what the ReLU lets through; or that and the weight's.
    # At a micro-batch of 1 or more the former is the larger instant, so it gives the line.
    assert first.backward_peak_bytes == Affine(2 * 512, 4 * 64 * (8 + 128 + 128 + 128))


def predicted_peaks(graph: ModelGraph, batch: int) -> tuple[float, float]:
    """Return the live bytes at the peaks of forward and backward, finished gradients included."""
    before, saved, forward, backward = [], 0.0, 0.0, 0.0
    for call in graph.calls:
        before.append(saved)
        forward = max(forward, saved + call.forward_peak_bytes(batch))
        saved += call.saved_bytes(batch)
    finished = 0.0
    for index in reversed(range(len(graph.calls))):
        call = graph.calls[index]
        backward = max(backward, before[index] + call.backward_peak_bytes(batch) + finished)
        if all(other.operator != call.operator for other in graph.calls[:index]):
            finished += sum(4 * parameter.numel for parameter in graph.operators[call.operator].parameters)
    return forward, max(forward, backward)


def tracked_peaks(source: ModelSource, batch: int) -> tuple[int, int]:
    """Return the same as torch's MemTracker sees it on real CPU tensors."""
    module = source.build()
    args, kwargs = source.example_inputs(module, batch)
    own = sum(t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers()))
    tracker = MemTracker()
    tracker.track_external(module, *args)
    with tracker:
        loss = module(*args, **kwargs)
        forward = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        loss.backward()
    whole = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return forward - own, whole - own


MEMORY_CASES = {
    "language model, peak at the loss": language_model(width=64, heads=4, length=64, words=512),
    "language model, peak in a block": language_model(width=64, heads=4, length=64, words=16),
    "untied": language_model(width=64, heads=4, length=64, words=256, tie="no"),
    "tied in use": language_model(width=64, heads=4, length=64, words=256, tie="use"),
    "dropout": language_model(width=64, heads=4, length=64, words=64, dropout=0.1),
    "uneven": language_model(width=64, heads=4, length=64, hidden=(64, 512, 128)),
    "wide mlp": source(lambda: MLP(256, 1024, 512, 256), (1024, 256)),
    "encoder-decoder": source(EncoderDecoder, (128, 32), (64, 32)),
    "encoder-decoder with dropout": source(lambda: EncoderDecoder(0.1), (128, 32), (64, 32)),
    "rotary": source(RotaryLayer, (128, 32)),
    "convolutions": source(ConvNet, (3, 32, 32)),
}


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_peaks_agree_with_torchs_memory_tracker(case: str) -> None:
    """Never below, and within 1 %; at small micro-batches the line also has to clear the one of 1."""
    graph = trace_model(MEMORY_CASES[case])
    for batch, tolerance in ((1, 0.1), (3, 0.03), (16, 0.01)):
        for traced, tracked in zip(
            predicted_peaks(graph, batch), tracked_peaks(MEMORY_CASES[case], batch), strict=True
        ):
            assert tracked <= traced <= (1 + tolerance) * tracked


def test_peak_agrees_with_the_real_allocator() -> None:
    """What the CPU allocator hands out and takes back in a step, as torch.profiler records it."""
    model = language_model(width=64, heads=4, length=64, words=128)
    graph = trace_model(model)
    module = model.build()
    args, _ = model.example_inputs(module, 5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        module(*args).backward()
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    inputs = sum(tensor.nbytes for tensor in args)
    assert predicted_peaks(graph, 5)[1] == pytest.approx(peak + inputs, rel=0.01)


def test_bf16_halves_the_activations() -> None:
    def build() -> nn.Module:
        return MLP(64, 128, 256)

    full, half = (trace_model(source(build, (16, 64)), precision) for precision in ("fp32", "bf16"))
    for wide, narrow in zip(full.calls, half.calls, strict=True):
        assert narrow.saved_bytes.per_sample == wide.saved_bytes.per_sample / 2
        assert narrow.forward.matmul_bytes(3) == wide.forward.matmul_bytes(3) / 2
        assert narrow.forward.matmul_flops == wide.forward.matmul_flops
    assert full.precision == "fp32"
    assert half.precision == "bf16"
    assert full.fingerprint != half.fingerprint


def test_dropout_and_attention_follow_the_kind_of_device() -> None:
    """CUDA keeps one byte an element for dropout and nothing of length^2 for attention with it."""
    length, width, heads = 128, 32, 2
    model = language_model(
        width=width, heads=heads, length=length, layers=1, words=64, dropout=0.5, hidden=(128,)
    )
    cpu, cuda = (trace_model(model, device_kind=kind) for kind in ("cpu", "cuda"))
    squares = 4 * heads * length * length
    assert call_of(cpu, "blocks.0.attention.qkv").saved_bytes.per_sample > 2 * squares
    # The norm's output, qkv, the output of attention and its row statistics.
    kept = 4 * length * (width + 3 * width + width + heads)
    assert call_of(cuda, "blocks.0.attention.qkv").saved_bytes.per_sample == kept
    # Dropout and residual after the output projection: a factor of 4 bytes, or a mask of one.
    assert call_of(cpu, "blocks.0.attention.out").saved_bytes.per_sample == 4 * length * width
    assert call_of(cuda, "blocks.0.attention.out").saved_bytes.per_sample == length * width


# --- operators and calls --------------------------------------------------------------------------


def test_head_tied_as_a_module_is_one_operator_with_two_calls() -> None:
    graph = trace_model(language_model(layers=2, words=64, width=32))
    operator = graph.operators[0]
    assert operator.name == "words"
    assert operator.modules == ("words", "head")
    assert [parameter.name for parameter in operator.parameters] == ["words.weight"]
    assert operator.block is None
    assert [call.operator for call in graph.calls].count(0) == 2
    assert graph.calls[-1].operator == 0
    assert graph.numel == sum(p.numel() for p in LanguageModel(layers=2).parameters())


def test_head_tied_in_use_starts_a_call_and_says_so() -> None:
    tied, used = (trace_model(language_model(tie=tie)) for tie in ("module", "use"))
    assert used.operators[0].modules == ("words",)
    assert [call.operator for call in used.calls] == [call.operator for call in tied.calls]
    # Same work and memory: the only difference is who calls F.linear.
    assert used.calls == tied.calls
    assert any("outside" in note and "words" in note for note in used.notes)
    assert tied.notes == ()


def test_tied_across_blocks_belongs_to_none() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
            self.layers[1][0].weight = self.layers[0][0].weight

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    graph = trace_model(source(Model, (8,)))
    tied = graph.operators[0]
    assert tied.modules == ("layers.0.0", "layers.1.0")
    # Both biases go with the shared weight.
    assert [p.name for p in tied.parameters] == ["layers.0.0.weight", "layers.0.0.bias", "layers.1.0.bias"]
    assert tied.block is None
    assert [graph.operators[i].block for i in (1, 2)] == [0, 1]
    assert [call.block for call in graph.calls] == [0, 0, 1, 1]


def test_multihead_attention_takes_in_its_output_projection() -> None:
    graph = trace_model(source(EncoderDecoder, (7, 32), (5, 32)))
    names = {operator.name: operator for operator in graph.operators}
    operator = names["net.encoder.layers.0.self_attn"]
    assert operator.kind == "MultiheadAttention"
    assert [p.name.rsplit("self_attn.")[1] for p in operator.parameters] == [
        "in_proj_weight",
        "in_proj_bias",
        "out_proj.weight",
        "out_proj.bias",
    ]
    assert not any("out_proj" in name for name in names)
    call = call_of(graph, operator.name)
    products = 2 * 2 * 7 * 7 * 32
    assert call.forward.matmul_flops == Affine(0, 2 * 7 * 32 * 4 * 32 + products)
    assert call.block == 0


def test_parameters_of_the_root_and_of_lists_are_operators() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 8))
            self.patch = nn.Linear(4, 8)
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(2))
            self.scaled = nn.Module()

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), self.patch(x)], 1)
            for scale in self.scales:
                x = x * scale
            return x.sum()

    graph = trace_model(source(Model, (3, 4)))
    assert [operator.name for operator in graph.operators] == ["patch", ""]
    assert [p.name for p in graph.operators[1].parameters] == ["token", "scales.0", "scales.1"]


def test_unused_operators_have_no_call_and_a_note() -> None:
    class Model(MLP):
        def __init__(self) -> None:
            super().__init__(8, 8, 8)
            self.spare = nn.Linear(8, 3)

    graph = trace_model(source(Model, (8,)))
    assert [operator.name for operator in graph.operators] == ["layers.0", "layers.1", "spare"]
    assert all(call.operator != 2 for call in graph.calls)
    assert graph.numel == 2 * (64 + 8) + 24 + 3
    assert any("spare" in note for note in graph.notes)


def test_frozen_parameters_are_not_trainable_and_get_no_gradient() -> None:
    def build() -> nn.Module:
        module = MLP(8, 64, 8, bias=False)
        module.layers[1].weight.requires_grad_(False)
        return module

    graph = trace_model(source(build, (64, 8)))
    assert [p.trainable for operator in graph.operators for p in operator.parameters] == [True, False]
    assert graph.calls[1].backward.matmul_flops == Affine(0, 2 * 64 * 64 * 8)


def test_work_outside_operators_goes_to_a_neighbour() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x * 2)
            return out.exp().sum()

    (call,) = trace_model(source(Model, (32, 16))).calls
    rows = 4 * 32 * 16
    # x * 2 before, exp after: each reads and writes rows; the sum reads them and writes 4 bytes.
    assert call.forward.other_bytes == Affine(4, 5 * rows)


# --- blocks and edges -----------------------------------------------------------------------------


def test_alike_blocks_share_a_class_and_uneven_ones_do_not() -> None:
    even = trace_model(language_model(layers=4))
    assert [block.name for block in even.blocks] == [f"blocks.{i}" for i in range(4)]
    assert [block.block_class for block in even.blocks] == [0, 0, 0, 0]
    assert [(block.first_call, block.last_call) for block in even.blocks] == [
        (2, 8),
        (8, 14),
        (14, 20),
        (20, 26),
    ]
    assert even.blocks[0].input_bytes == Affine(0, 4 * 32 * 32)
    uneven = trace_model(language_model(hidden=(64, 128, 64)))
    assert [block.block_class for block in uneven.blocks] == [0, 1, 0]
    sizes = [call_of(uneven, f"blocks.{i}.up").saved_bytes.per_sample for i in range(3)]
    # The norm's output, which the layer reads, and its own, which GELU does.
    assert sizes == [4 * 32 * (32 + hidden) for hidden in (64, 128, 64)]


def test_a_block_that_runs_twice_is_two_blocks_of_one_class() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.layers[0](x)
            return x.sum()

    graph = trace_model(source(Model, (64, 8)))
    assert [block.name for block in graph.blocks] == ["layers.0"] * 3
    assert [(block.first_call, block.last_call) for block in graph.blocks] == [(1, 3), (3, 5), (5, 7)]
    assert len(graph.operators) == 3
    assert any("layers.0" in note for note in graph.notes)


def test_edges_follow_the_data_and_skip() -> None:
    graph = trace_model(source(EncoderDecoder, (7, 32), (5, 32)))
    index = {graph.operators[call.operator].name: i for i, call in enumerate(graph.calls)}
    memory = index["net.encoder.norm"]
    for layer in range(2):
        assert (memory, index[f"net.decoder.layers.{layer}.multihead_attn"]) in graph.edges
    assert (memory, index["net.decoder.layers.0.self_attn"]) not in graph.edges
    # The residual passes the attention by and is added in the call that follows it.
    assert (index["net.encoder.layers.0.norm1"], index["net.encoder.layers.0.linear2"]) in graph.edges
    assert all(producer < consumer for producer, consumer in graph.edges)
    assert len(set(graph.edges)) == len(graph.edges)
    assert nx.is_directed_acyclic_graph(graph.dag())
    assert nx.is_weakly_connected(graph.dag())


def test_outputs_are_what_later_calls_read() -> None:
    graph = trace_model(language_model(width=32, length=16, layers=1))
    token = 4 * 16
    outputs = {
        "blocks.0.norm1": 32,
        # Attention's output; qkv itself is not read again.
        "blocks.0.attention.qkv": 32,
        "blocks.0.attention.out": 32,
        "blocks.0.up": 128,
    }
    for name, width in outputs.items():
        assert call_of(graph, name).output_bytes == Affine(0, token * width)


# --- the pipeline ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "device_kind"), [("fp32", "cpu"), ("bf16", "cuda")])
@pytest.mark.parametrize("case", ["tied in use", "dropout", "encoder-decoder with dropout", "rotary", "convolutions"])
def test_shortcuts_change_nothing(
    case: str, device_kind: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graph as with every op run by torch's FakeTensorMode."""
    if (case, precision) == ("convolutions", "bf16"):
        pytest.skip("a CPU keeps batch statistics in bf16, the meta device like CUDA in fp32")
    quick = trace_model(MEMORY_CASES[case], precision, device_kind)
    monkeypatch.setattr(profiler.trace, "MetaStage", FakeStage)
    assert trace_model(MEMORY_CASES[case], precision, device_kind) == quick


def test_a_model_that_wants_a_real_device_is_traced_on_fakes() -> None:
    class Model(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                return super().forward(x)

    plain, wrapped = trace_model(source(lambda: MLP(8, 16), (4, 8))), trace_model(source(lambda: Model(8, 16), (4, 8)))
    assert wrapped == plain


def test_constants_in_the_model_do_not_count() -> None:
    class Model(MLP):
        def __init__(self) -> None:
            super().__init__(64, 64, 64)
            self.plain = torch.ones(64)
            with torch.device("cpu"):
                self.real = torch.ones(64)
            self.register_buffer("buffer", torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.plain * self.real * self.buffer)

    class Bare(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 * 3 * 4)

    graph, bare = trace_model(source(Model, (64,))), trace_model(source(lambda: Bare(64, 64, 64), (64,)))
    assert [call.saved_bytes for call in graph.calls] == [call.saved_bytes for call in bare.calls]
    assert [call.backward_peak_bytes for call in graph.calls] == [call.backward_peak_bytes for call in bare.calls]


def test_what_the_first_step_makes_and_keeps_is_not_counted_but_noted() -> None:
    class Model(MLP):
        cached: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cached is None:
                self.cached = torch.ones(64, 64).tril()
            return super().forward(x @ self.cached)

    class Bare(MLP):
        def __init__(self) -> None:
            super().__init__(64, 64, 64)
            self.register_buffer("mask", torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ self.mask)

    graph, bare = trace_model(source(lambda: Model(64, 64, 64), (8, 64))), trace_model(source(Bare, (8, 64)))
    assert graph.calls == bare.calls
    assert any(str(4 * 64 * 64) in note for note in graph.notes)


@pytest.mark.parametrize(
    "output",
    [
        lambda loss, logits: loss,
        lambda loss, logits: (logits, loss),
        lambda loss, logits: {"logits": logits, "loss": loss},
        lambda loss, logits: type("Output", (), {"loss": loss, "logits": logits})(),
    ],
    ids=["scalar", "tuple", "dict", "attribute"],
)
def test_the_loss_is_found(output: Callable[[Tensor, Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            logits = self.layer(x)
            return output(logits.square().mean(), logits)

    graph = trace_model(source(Model, (8,)))
    assert graph.notes == ()
    assert graph.calls[0].output_bytes == Affine(4, 0)


def test_without_a_scalar_the_outputs_are_summed_and_it_is_said() -> None:
    graph = trace_model(source(lambda: nn.Linear(8, 8), (8,)))
    assert any("sum" in note for note in graph.notes)


def test_the_users_module_is_left_alone() -> None:
    module = LanguageModel(dropout=0.1).eval()
    before = {name: (p, p.clone()) for name, p in module.named_parameters()}
    keys = [set(child.__dict__) for child in module.modules()]
    trace_model(source(lambda: module, (32,), classes=64), "bf16")
    assert not any(child.training for child in module.modules())
    assert [set(child.__dict__) for child in module.modules()] == keys
    for name, parameter in module.named_parameters():
        same, value = before[name]
        assert parameter is same
        assert parameter.grad is None
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, value)
    assert module.head.weight is module.words.weight


def test_nothing_stays_behind() -> None:
    """No mode, no kernel, no hook: torch computes as before, with and without an error."""
    x = torch.ones(2, 2, 4, 8)
    dropped = F.dropout(x, 0.5)
    assert set(dropped.unique().tolist()) <= {0.0, 2.0}
    for model in (language_model(), source(lambda: nn.Bilinear(2, 2, 2), (3,))):
        try:
            trace_model(model, device_kind="cuda")
        except OsdpError:
            assert model.sequence_length == 1
        assert gc.isenabled()
        assert torch.ones(2).device.type == "cpu"
        assert F.scaled_dot_product_attention(x, x, x).sum().item() == x.numel()
        counter: list[str] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: counter.append("") or t, lambda t: t):
            (torch.ones(2, requires_grad=True) * torch.ones(2)).sum().backward()
        assert counter == [""]


def test_the_fingerprint_depends_on_the_model_alone() -> None:
    graph = trace_model(language_model())
    assert len(graph.fingerprint) == 16
    int(graph.fingerprint, 16)
    assert trace_model(language_model()).fingerprint == graph.fingerprint
    for other in (
        language_model(hidden=(128, 128, 129)),
        language_model(length=16),
        language_model(tie="no"),
        language_model(layers=2),
    ):
        assert trace_model(other).fingerprint != graph.fingerprint


SCRIPT = """
import torch
from trace_models import LanguageModel, language_model, source
from profiler.trace import trace_model

class Model(LanguageModel):
    # cumsum has no layout rule: torch's own meta kernel runs, and imports sympy in the first pass.
    def forward(self, tokens):
        return super().forward(tokens) * self.words(tokens).cumsum(1).logsumexp(2).mean()

print(trace_model(source(Model, (32,), classes=64)).fingerprint)
"""


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    here = Path(__file__).parent
    prints = set()
    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        prints.add(done.stdout.strip())
    namespace: dict[str, Any] = {}
    exec(SCRIPT.replace("print(", "found = ("), namespace)
    assert prints == {namespace["found"]}


def test_a_deep_model_takes_under_two_seconds() -> None:
    model = language_model(width=1600, heads=25, layers=48, words=50257, length=1024)
    start = time.process_time()
    graph = trace_model(model)
    assert time.process_time() - start < 2.0
    assert graph.numel == 50257 * 1600 + 1024 * 1600 + 48 * (12 * 1600 * 1600 + 13 * 1600) + 2 * 1600


# --- lines ----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=6),
    st.integers(1, 5000),
)
def test_the_envelope_is_nowhere_below_any_instant(lines: list[tuple[int, int]], batch: int) -> None:
    events = [[fixed + slope * size for fixed, slope in lines] for size in SIZES]
    bound = envelope(events)
    highest = max(fixed + slope * batch for fixed, slope in lines)
    assert bound(batch) >= highest * (1 - 1e-12)
    # Where one instant is the highest at every size, the bound is that instant.
    if len({max(range(len(lines)), key=lambda i: (lines[i][0] + lines[i][1] * b)) for b in (1, 10**9)}) == 1:
        assert bound(batch) == pytest.approx(highest)


def test_a_line_through_a_bend_is_nowhere_below() -> None:
    values = [10.0, 20.0, 50.0]
    fitted = line(values, add_bytes=3)
    assert all(fitted(size) >= value + 3 for size, value in zip(SIZES, values, strict=True))
    assert line([7.0, 13.0, 19.0]) == Affine(1.0, 3.0)
