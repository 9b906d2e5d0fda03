"""A linear operator cut into slices: the graph's structure, and its costs by hand."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from synthetic import MB, call, chain, operator, transformer

from planner.model.operator_split import slice_operators
from planner.model.stages import cut
from profiler.affine import Affine
from profiler.model_graph import ModelGraph, Parameter, Work

# 256 tokens a sample through 1024 -> 2048 features: 2 x 256 x 1024 x 2048 FLOPs, input 1 MB, output 2 MB.
FLOPS, X, Y = 2.0 * 256 * 1024 * 2048, 1 * MB, 2 * MB


def graph() -> ModelGraph:
    before, after = chain([(64, 64), (64, 64)], [1, 1], [1, 1]).calls
    linear = replace(
        call(1, None, gflops=FLOPS / 1e9, saved_mb=6, peak_mb=30, output_mb=3),
        forward=Work(Affine(0, FLOPS), Affine(0, 100.0), Affine(0, 10.0)),
        module_forward_peak_bytes=Affine(0, X + Y),
        module_backward_start_bytes=Affine(0, X + Y),
    )
    bias = Parameter("linear.bias", (2048,))
    weight = operator("linear", (2048, 1024))
    operators = (
        operator("first", (64, 64)),
        replace(weight, parameters=(*weight.parameters, bias)),
        operator("last", (64, 64)),
    )
    calls = (before, linear, replace(after, operator=2))
    return ModelGraph("g", "fp32", 256, operators, calls, (), ((0, 1), (1, 2), (0, 2)), "g")


def test_a_graph_without_splits_is_itself() -> None:
    whole = graph()
    assert slice_operators(whole, {}) == (whole, frozenset())


def test_slices_take_the_place_of_the_operator() -> None:
    found, slices = slice_operators(graph(), {1: 3})
    names = ["first", *(f"linear slice {i} of 3" for i in (1, 2, 3)), "last"]
    assert [o.name for o in found.operators] == names
    assert slices == {1, 2, 3}
    assert [c.operator for c in found.calls] == [0, 1, 2, 3, 4]
    # 1024 = 342 + 341 + 341; the bias is with the first.
    shapes = [[p.shape for p in o.parameters] for o in found.operators[1:4]]
    assert shapes == [[(2048, 342), (2048,)], [(2048, 341)], [(2048, 341)]]
    # What went in goes into the first slice, and what came out comes out of the last.
    assert found.edges == ((0, 1), (0, 4), (1, 2), (2, 3), (3, 4))
    assert nx.is_directed_acyclic_graph(found.dag())


def test_costs_of_slices_by_hand() -> None:
    found, _ = slice_operators(graph(), {1: 2})
    whole, (one, two) = graph().calls[1], found.calls[1:3]
    weight = 4 * 2048 * 512
    assert one.forward_peak_bytes(1) == X + Y
    # Input, sum so far, product and new sum are 7 MB; the whole call holds as much with what follows it.
    assert whole.forward_peak_bytes(1) == 9 * MB
    assert two.forward_peak_bytes(1) == 9 * MB
    # The new sum is made when the slice is over, which may be sharded again by then.
    assert (one.module_forward_peak_bytes(1), two.module_forward_peak_bytes(1)) == (X + Y, X + 2 * Y)
    assert (one.tail_forward_peak_bytes(1), two.tail_forward_peak_bytes(1)) == (X + Y, X + 3 * Y)
    # Backward of the first: input, its gradient in parts, gradient of y, of weight and bias.  The parts are put
    # together when input and gradient of y have gone.
    assert one.backward_peak_bytes(1) == 2 * X + Y + weight + 4 * 2048
    assert two.module_backward_peak_bytes(1) == 2 * X + Y + weight
    # Between slices: the input, its gradient in parts, the gradient of the sum.
    assert one.backward_start_bytes(1) == one.module_backward_start_bytes(1) == 2 * X + Y
    # A line above both: what the whole call holds a sample, and the gradient of the weight, whatever the batch.
    assert two.backward_peak_bytes(1) == 30 * MB + weight
    assert (one.saved_bytes(1), two.saved_bytes(1)) == (0, 6 * MB)
    assert (one.output_bytes(1), two.output_bytes(1)) == (X + Y, 3 * MB)
    # Three more passes over the output; what follows the layer is in the last.
    assert (one.forward.other_bytes(1), two.forward.other_bytes(1)) == (0, 10 + 3 * Y)
    assert one.backward.other_bytes(1) == 2 * X


@pytest.mark.parametrize("count", [2, 3, 7])
def test_no_work_is_lost(count: int) -> None:
    whole = graph().calls[1]
    found, slices = slice_operators(graph(), {1: count})
    parts = [c for c in found.calls if c.operator in slices]
    assert len(parts) == count
    for direction in ("forward", "backward"):
        flops = sum(getattr(part, direction).matmul_flops(3) for part in parts)
        assert flops == pytest.approx(getattr(whole, direction).matmul_flops(3))
    assert sum(o.numel for o in found.operators) == sum(o.numel for o in graph().operators)
    assert sum(part.saved_bytes(3) for part in parts) == whole.saved_bytes(3)


def test_blocks_hold_the_calls_of_their_slices() -> None:
    model = transformer(3, 64, tied=False)
    index = next(i for i, o in enumerate(model.operators) if o.name == "blocks.1.up")
    found, slices = slice_operators(model, {index: 4})
    assert [(b.first_call, b.last_call) for b in found.blocks] == [(1, 7), (7, 16), (16, 22)]
    for number, block in enumerate(found.blocks):
        assert {c.block for c in found.calls[block.first_call : block.last_call]} == {number}
    staged = cut(found, slices)
    kinds = [stage.stage_class for stage in staged.stages if stage.block is not None]
    # The split block is not like the others, which are alike.
    assert kinds[0] == kinds[2] != kinds[1]
