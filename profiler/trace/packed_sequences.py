"""Packed sequences (`nn.utils.rnn`) without data: packed, run through recurrent layers and padded again.

How many samples are left at each step depends on data, and PyTorch slices by it: so it is on the CPU and has values
here, too.  All samples are assumed to be as long as they were padded to, which is an upper bound.

The layers are those of plain products, from aten/src/ATen/native/RNN.cpp and PackedSequence.cpp (torch 2.13).  What
cuDNN keeps of packed samples is not known; its place is taken by layers of padded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiler.recurrent_layers import CELLS, Stack, States, Weights, recurrent, weights_of
from profiler.trace.known_values import computing


def pack(x: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return what `_pack_padded_sequence` does of padded samples: their elements (rows, width), and samples by step."""
    samples, steps = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    with computing():
        left = torch.full((steps,), samples, dtype=torch.int64, device="cpu")
    return x.new_empty(samples * steps, *x.shape[2:]), left


def pad(data: Tensor, left: Tensor, batch_first: bool, value: float, total_length: int) -> tuple[Tensor, Tensor]:
    """`_pad_packed_sequence`: samples (steps, samples, width), and their lengths."""
    sizes = _numbers(left)
    # PyTorch copies once for every length.  Where all are assumed to be alike, the last step is copied for itself.
    ends = [end for end in range(1, len(sizes)) if sizes[end] != sizes[end - 1]] or [len(sizes) - 1]
    padded = data.new_full((max(len(sizes), total_length), sizes[0], *data.shape[1:]), value)
    row = 0
    for begin, end in zip([0, *ends], [*ends, len(sizes)], strict=True):
        if begin < end:
            rows = sizes[begin] * (end - begin)
            part = data.narrow(0, row, rows).view(end - begin, sizes[begin], *data.shape[1:])
            padded.narrow(0, begin, end - begin).narrow(1, 0, sizes[begin]).copy_(part)
            row += rows
    with computing():
        lengths = (left[:, None] > torch.arange(sizes[0])).sum(0)
    return padded.transpose(0, 1) if batch_first else padded, lengths


def recurrent_packed(
    name: str,
    at_once: bool,
    x: Tensor,
    left: Tensor,
    states: Tensor | Sequence[Tensor],
    parameters: Sequence[Tensor],
    *shape: Any,
) -> Any:
    """`torch.gru` and the like of packed samples (rows, width): the output (rows, width), and the last states.

    Args:
        name: key of `CELLS`.
        at_once: multiply the inputs of all steps at once, as CPUs do.
        left: samples at each step.
        shape: of a `Stack`, without `batch_first`.
    """
    sizes = _numbers(left)
    if not at_once and sizes[0] == sizes[-1]:
        return as_padded(partial(recurrent, name, False), x, left, states, parameters, *shape)
    stack, last = Stack(*shape), list[States]()
    hidden = [states] if isinstance(states, Tensor) else list(states)

    def layer(x: Tensor, number: int) -> Tensor:
        outputs = []
        for place in stack.places(number):
            weights = weights_of(parameters, stack, place)
            inputs = weights.of_inputs(x) if at_once else x
            first = tuple(state[place] for state in hidden)
            is_back = place % stack.directions == 1
            outputs.append(_run(name, at_once, inputs, sizes, first, weights, last, is_back=is_back))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    return stack.run(layer, x), *(torch.stack(ends) for ends in zip(*last, strict=True))


def as_padded(run: Callable[..., Any], x: Tensor, left: Tensor, states: Any, parameters: Any, *shape: Any) -> Any:
    """Return what `run` makes of packed samples of one length as (steps, samples, width); as `recurrent_packed`."""
    out, *ends = run(x.view(len(left), -1, *x.shape[1:]), states, parameters, *shape, False)
    return out.reshape(len(x), -1), *ends


def _run(
    name: str,
    at_once: bool,
    inputs: Tensor,
    sizes: Sequence[int],
    first: States,
    weights: Weights,
    last: list[States],
    *,
    is_back: bool,
) -> Tensor:
    """Return the output (rows, width) of a layer in one direction, and append its last states."""
    states = tuple(state.narrow(0, 0, sizes[-1]) for state in first) if is_back else first
    outputs, ended = list[Tensor](), list[States]()
    for row, size in _backwards(sizes) if is_back else _forwards(sizes):
        step, before = inputs.narrow(0, row, size), len(states[0])
        if size > before:
            begun = [state.narrow(0, before, size - before) for state in first]
            states = tuple(torch.cat(pair) for pair in zip(states, begun, strict=True))
        elif size < before:
            ended.append(tuple(state.narrow(0, size, before - size) for state in states))
            states = tuple(state.narrow(0, 0, size) for state in states)
        states = CELLS[name](step if at_once else weights.of_inputs(step), states, weights)
        outputs.append(states[0])
    ended.append(states)
    last.append(tuple(torch.cat(parts[::-1]) for parts in zip(*ended, strict=True)))
    return torch.cat(outputs[::-1] if is_back else outputs)


def _forwards(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first row of each step, and how many it has."""
    row = 0
    for size in sizes:
        yield row, size
        row += size


def _backwards(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return reversed([*_forwards(sizes)])


def _numbers(left: Tensor) -> list[int]:
    with computing():
        return [int(size) for size in left.tolist()]
