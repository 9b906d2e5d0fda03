"""The tracer against hand arithmetic, torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from trace_models import MLP, Attention, ConvNet, EncoderDecoder, LanguageModel, call_of, language_model, source

from profiler.affine import Affine
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model


@cache
def encoder_decoder() -> ModelGraph:
    """Return the trace of torch's transformer, of sequences of 7 and of 5."""
    return trace_model(source(EncoderDecoder, (7, 32), (5, 32)))


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
    [(lambda: MLP(24, 40, 8, 56), [(5, 24)]), (ConvNet, [(3, 8, 8)]), (EncoderDecoder, [(7, 32), (5, 32)])],
    ids=["mlp", "convolutions", "encoder-decoder"],
)
def test_flops_agree_with_torchs_counter(build: Callable[[], nn.Module], shapes: list[tuple[int, ...]]) -> None:
    """Unfused attention only: torch's counter does not know the fused CPU op."""
    graph = encoder_decoder() if build is EncoderDecoder else trace_model(source(build, *shapes))
    for batch in (1, 3):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            counted = _flops(build(), shapes, batch)
        fused = _fused_attention_surplus(graph, shapes, batch) if len(shapes) == 2 else 0
        traced = sum(call.forward.matmul_flops(batch) + call.backward.matmul_flops(batch) for call in graph.calls)
        assert traced - fused == counted


def _flops(module: nn.Module, shapes: list[tuple[int, ...]], batch: int) -> int:
    with FlopCounterMode(display=False) as counter:
        module(*(torch.randn(batch, *shape) for shape in shapes)).backward()
    return int(counter.get_total_flops())


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


def test_head_tied_in_use_belongs_to_the_module_that_reads_it() -> None:
    tied, used = (trace_model(language_model(tie=tie)) for tie in ("module", "use"))
    assert used.operators[0].modules == ("",)  # whose forward is around both uses
    assert used.operators[0].parameters == tied.operators[0].parameters
    assert [call.operator for call in used.calls] == [call.operator for call in tied.calls]
    # Same work and memory: the only difference is that nothing tells from which on the forward of its uses, or up to
    # which their backward, needs it.
    assert used.calls[1:-1] == tied.calls[1:-1]
    parts = [f"{part}_{way}_peak_bytes" for part in ("module", "tail") for way in ("forward", "backward")]
    parts += ["rest_backward_start_bytes", "module_backward_start_bytes"]
    for mine, modules in ((used.calls[0], tied.calls[0]), (used.calls[-1], tied.calls[-1])):
        assert mine.module_forward_peak_bytes == mine.forward_peak_bytes
        assert mine.module_backward_peak_bytes == mine.backward_peak_bytes
        assert mine.tail_forward_peak_bytes == mine.tail_backward_peak_bytes == Affine()
        assert replace(mine, **{name: getattr(modules, name) for name in parts}, late=modules.late) == modules
    assert used.calls[-1].late  # what the root is handed
    assert not tied.calls[-1].late  # what the head is handed
    assert used.notes == tied.notes == ()


def test_parameters_that_every_rank_holds_whole_keep_their_dtype() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.0))
            self.layer.register_forward_pre_hook(self.check)

        def check(self, layer: nn.Module, args: object) -> None:
            assert (layer.weight.dtype, self.scale.dtype) == (torch.bfloat16, torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x).sum()

    graph = trace_model(source(Scaled, (8,)), "bf16")
    assert [(one.name, one.keeps_dtype) for one in graph.outside] == [("scale", True)]


def test_tied_across_blocks_belongs_to_none() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first, second = nn.Linear(8, 8), nn.Linear(8, 8)
            second.weight = first.weight
            self.layers = nn.ModuleList(nn.Sequential(one, nn.Linear(8, 8)) for one in (first, second))

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
    graph = encoder_decoder()
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
    # In the order in which FSDP2 gathers them: the root's own before its forward begins.
    assert [operator.name for operator in graph.operators] == ["", "patch"]
    assert [p.name for p in graph.operators[0].parameters] == ["token", "scales.0", "scales.1"]


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
    assert [(block.first_call, block.last_call) for block in even.blocks] == [(2, 8), (8, 14), (14, 20), (20, 26)]
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
    graph = encoder_decoder()
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
