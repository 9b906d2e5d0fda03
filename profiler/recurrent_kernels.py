"""`nn.LSTM` on CPUs: oneDNN's kernel of a layer, and the workspace that it keeps for backward.

A CPU runs a layer in one direction as one operation, which keeps a workspace of several tensors the size of its output.
Tensors without data do not show it: to them it is empty (torch 2.13.0).  How large it is only oneDNN knows, which is
asked with tensors of a few samples and steps: it grows with both, in pages and padded rows.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from profiler.recurrent_layers import Stack

aten = torch.ops.aten

_SAMPLES = 64
"""Of which what one more takes is found: a page is little of that."""
_FLOPS = 5e8
"""How much asking may compute; of longer sequences some steps are computed, and tell what one more takes."""
_LSTM = 2
"""The mode of the operation."""


def runs_on_onednn(dtype: torch.dtype) -> bool:
    """Return whether this machine has such a kernel for a dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def lstm(
    x: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], *shape: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm` as CPUs run it (aten/src/ATen/native/mkldnn/RNN.cpp): layer by layer, in each direction."""
    stack, (hidden, cell) = Stack(*shape), states
    width, each = hidden.shape[2], 4 if stack.has_biases else 2
    kind = stack.layers, stack.has_biases, stack.bidirectional, stack.batch_first, stack.train
    hiddens, cells = list[Tensor](), list[Tensor]()

    def layer(x: Tensor, number: int) -> Tensor:
        x, outputs = x.contiguous(), list[Tensor]()
        for place in stack.places(number):
            weights = [*parameters[place * each : (place + 1) * each]]
            if not stack.has_biases:
                weights += [weights[0].new_zeros(4 * width)] * 2
            given: Any = x, *weights, hidden[place], cell[place], place % stack.directions == 1, [], _LSTM, width, *kind
            out, last, last_cell, _ = aten.mkldnn_rnn_layer(*given)
            outputs.append(out)
            hiddens.append(last)
            cells.append(last_cell)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    return stack.run(layer, x), torch.stack(hiddens), torch.stack(cells)


def with_workspace(args: Sequence[Any], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of `mkldnn_rnn_layer(*args)` with the workspace that it keeps, where they have no data."""
    *outputs, workspace = out
    x, (train, width) = args[0], (args[-1], args[1].shape[0] // 4)
    if train and workspace is not None and not workspace.numel() and x.numel():
        size_bytes = workspace_bytes(*x.shape, width, x.dtype)
        workspace = torch.empty(size_bytes, dtype=torch.uint8, device=x.device)
    return (*outputs, workspace)


def in_fp32(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return a layer's gradients in fp32, as its kernel makes them: before torch 2.13 those without data are not."""
    return tuple(
        one if one is None or one.dtype == torch.float32 else torch.empty_like(one, dtype=torch.float32)
        for one in gradients
    )


@cache
def workspace_bytes(steps: int, samples: int, inputs: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of a layer's workspace, or a little more: a line in the samples."""
    each = _asked(steps, _SAMPLES, inputs, width, dtype) / _SAMPLES
    few = (1 << power for power in range(6))
    fixed = max(0.0, *(_asked(steps, some, inputs, width, dtype) - some * each for some in few))
    return ceil(samples * each + fixed)


@cache
def _asked(steps: int, samples: int, inputs: int, width: int, dtype: torch.dtype) -> float:
    """Return the bytes of a workspace, of which no more than some steps are computed."""
    run = max(2, int(_FLOPS / (8 * _SAMPLES * width * (inputs + width))))
    if steps <= run:
        return float(_kept(steps, samples, inputs, width, dtype))
    short, long = (_kept(part, samples, inputs, width, dtype) for part in (run // 2, run))
    return long + (steps - run) * (long - short) / (run - run // 2)


def _kept(steps: int, samples: int, inputs: int, width: int, dtype: torch.dtype) -> int:
    with _disable_current_modes(), torch.enable_grad():  # without, it keeps none
        x = torch.zeros(steps, samples, inputs, dtype=dtype)
        weights = [x.new_zeros(4 * width, size) for size in (inputs, width)] + [x.new_zeros(4 * width)] * 2
        states = [x.new_zeros(samples, width)] * 2
        shape: Any = False, [], _LSTM, width, 1, True, False, False, True
        workspace: Tensor = aten.mkldnn_rnn_layer(x, *weights, *states, *shape)[3]
        return workspace.nbytes
