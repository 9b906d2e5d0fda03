"""A model whose linear operators are cut into slices along their input features, as a model graph.

    y = x W^T + b = sum_i x_i W_i^T + b,    W = (W_1 ... W_k), x = (x_1 ... x_k)

Each slice becomes an operator, and each call of the operator k calls one after another, so that
stages, memory and time are worked out as for any other model.  With x, y and w_i bytes of input,
output and one slice's weight, beside what others hold (read off `runtime.strategies.split_linear`, nothing measured):

    forward     what the layer holds for the first, 2 y more for each other: the sum so far, its product, the new sum
    backward    2 x + y + w_i: input, gradients of input slices and of y (then the gradients of the
                slices are put together, for 2 x + w_i: the input has gone, unless an earlier call keeps it)

and the last slice also what the whole call holds, for what follows the layer is in its call.
x and y are bounded by the call's products: all its FLOPs are taken for the layer's own, which is
exact where no other product follows.  Time: FLOPs in proportion to features, and each sum and the
putting together are read and written once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from planner.model.fsdp_units import check_split, split_bounds, split_parameters
from profiler.affine import Affine
from profiler.cluster.measurements import call_key
from profiler.model_graph import Call, CallMemory, ModelGraph, Operator, OwnRerun, Work

NOTHING = Affine()
SLICE_LAUNCHES = 3
"""Kernels of one direction of a slice, at most: two products and a sum."""


def slice_starts(graph: ModelGraph, counts: Mapping[int, int]) -> list[int]:
    """Return the index of each operator's first slice once operators are cut so, and the number of all slices."""
    return [0, *accumulate(counts.get(index, 1) for index in range(len(graph.operators)))]


def slice_operators(graph: ModelGraph, counts: Mapping[int, int]) -> tuple[ModelGraph, frozenset[int]]:
    """Return the graph with operators cut into so many slices each, and the indices of all slices.

    A split operator's slices take its place.  Raises `OsdpError` for one that cannot be split.
    """
    if not counts:
        return graph, frozenset()
    for index, count in counts.items():
        check_split(graph.operators[index], count)
    starts = slice_starts(graph, counts)
    operators = [part for index, whole in enumerate(graph.operators) for part in _slices(whole, counts.get(index, 1))]
    calls, places = list[Call](), [0]
    for call in graph.calls:
        operator, count = graph.operators[call.operator], counts.get(call.operator, 1)
        parts = [*_calls(operator, _apart(call), count, graph.precision)] if count > 1 else [call]
        whole = (call_key(graph, call), call) if count > 1 else None
        first = starts[call.operator]
        calls += [replace(part, operator=index, slice_of=whole, reruns=()) for index, part in enumerate(parts, first)]
        if call.reruns:  # as the last slice runs back, which is the first to do so
            calls[-1] = replace(calls[-1], reruns=tuple(_renumbered(one, starts) for one in call.reruns))
        places.append(len(calls))
    blocks = tuple(replace(b, first_call=places[b.first_call], last_call=places[b.last_call]) for b in graph.blocks)
    edges = [(places[producer + 1] - 1, places[consumer]) for producer, consumer in graph.edges]
    edges += [(call, call + 1) for start, stop in pairwise(places) for call in range(start, stop - 1)]
    slices = frozenset(starts[index] + part for index, count in counts.items() for part in range(count))
    cut = replace(graph, operators=tuple(operators), calls=tuple(calls), blocks=blocks, edges=tuple(sorted(edges)))
    return cut, slices


def _renumbered(rerun: OwnRerun, starts: Sequence[int]) -> OwnRerun:
    return rerun if rerun.operator is None else replace(rerun, operator=starts[rerun.operator])


def _slices(operator: Operator, count: int) -> list[Operator]:
    if count == 1:
        return [operator]
    names = [f"{operator.name} slice {index + 1} of {count}" for index in range(count)]
    parameters = operator.parameters
    return [replace(operator, name=n, parameters=split_parameters(parameters, i, count)) for i, n in enumerate(names)]


def _calls(operator: Operator, whole: Call, count: int, precision: str) -> Iterator[Call]:
    """Yield the calls of an operator's slices, given the call of the whole; their `operator` is still the whole."""
    weight = operator.parameters[0]
    compute = weight.compute_bytes(precision)
    features = weight.shape[1]
    x = whole.forward.matmul_flops.times(compute / (2 * weight.shape[0]))
    y = whole.forward.matmul_flops.times(compute / (2 * features))
    runs_back = whole.backward != Work(NOTHING, NOTHING, NOTHING)
    for index, (start, stop) in enumerate(pairwise(split_bounds(features, count))):
        last = index == count - 1
        parameters = split_parameters(operator.parameters, index, count)
        gradients = Affine(compute * sum(p.numel for p in parameters if p.trainable and p.used))
        share = (stop - start) / features
        slice_of = partial(_memory, x=x, y=y, gradients=gradients, index=index, last=last, runs_back=runs_back)
        memory, again = slice_of(whole), whole.recomputed
        handed_on = x + y if runs_back else memory["forward_peak_bytes"]  # input and sum so far
        yield replace(
            whole,
            **memory,
            recomputed=None if again is None else CallMemory(**slice_of(again)),
            selective=None,  # its products would be kept beside their sum: not offered (`check_selective`)
            forward=_part(whole.forward, share, last, y.times(3) if index else NOTHING),
            backward=_part(whole.backward, share, last, x.times(2) if runs_back and not index else NOTHING),
            output_bytes=whole.output_bytes if last else handed_on,
        )


def _apart(call: Call) -> Call:
    """Return a call whose block is not one unit: each slice is one."""
    if call.apart is None:
        return call
    memories = {field.name: getattr(call.apart, field.name) for field in fields(call.apart)}
    return replace(call, **memories, apart=None)


def _beyond(one: Affine, other: Affine) -> Affine:
    """Return how much one is more than the other."""
    return (one + other.times(-1)).at_least(NOTHING)


def _memory(
    whole: CallMemory, *, x: Affine, y: Affine, gradients: Affine, index: int, last: bool, runs_back: bool
) -> dict[str, Any]:
    """Return the fields of a slice's activations, given those of the whole call, which count what else is live."""
    so_far = y.times(1 if index else 0)
    module_forward = (whole.module_forward_peak_bytes if runs_back else whole.forward_peak_bytes) + so_far
    forward = module_forward + so_far  # the sum so far, its product, the new sum
    backward_start = whole.module_backward_start_bytes + x
    own_input = x + _beyond(x, whole.saved_bytes).times(-1)
    together = backward_start + x + (own_input + y).times(-1)
    backward = backward_start.at_least(together) + gradients
    return {
        # Until the last slice what is kept is the input, which `forward` and `backward` have.
        "saved_bytes": whole.saved_bytes if last else NOTHING,
        "forward_start_bytes": whole.forward_start_bytes + so_far,
        "forward_peak_bytes": whole.forward_peak_bytes.at_least(forward) if last else forward,
        # The sum is made when the slice itself has ended.
        "module_forward_peak_bytes": module_forward,
        "rest_forward_peak_bytes": whole.rest_forward_peak_bytes if last else NOTHING,
        "tail_forward_peak_bytes": whole.tail_forward_peak_bytes.at_least(forward) if last else forward,
        "backward_peak_bytes": whole.backward_peak_bytes.at_least(backward) if last else backward,
        "module_backward_peak_bytes": backward,
        "rest_backward_peak_bytes": whole.rest_backward_peak_bytes if last else NOTHING,
        "tail_backward_peak_bytes": whole.tail_backward_peak_bytes if last else NOTHING,
        # Handed on: input, and in backward the gradient of the sum and those of the slices after.
        "backward_start_bytes": whole.backward_start_bytes if last else backward_start,
        "rest_backward_start_bytes": whole.rest_backward_start_bytes if last else backward_start,
        "module_backward_start_bytes": whole.module_backward_start_bytes if last else backward_start,
        "backward_end_bytes": whole.backward_end_bytes if index == 0 else backward_start,
        "module_backward_end_bytes": whole.module_backward_end_bytes if index == 0 else backward_start,
    }


def _part(work: Work, share: float, last: bool, extra_bytes: Affine) -> Work:
    """Return a slice's share of a call's work; what follows the layer is in the last slice."""
    return Work(
        matmul_flops=work.matmul_flops.times(share),
        matmul_bytes=work.matmul_bytes.times(share),
        other_bytes=(work.other_bytes if last else NOTHING) + extra_bytes,
        launches=work.launches if last else min(work.launches, SLICE_LAUNCHES),
        collectives=work.collectives if last else (),
    )
