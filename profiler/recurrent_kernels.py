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
    x: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm` as CPUs run it (aten/src/ATen/native/mkldnn/RNN.cpp): layer by layer, in each direction."""
    hidden, cell = states
    directions, width = 2 if bidirectional else 1, hidden.shape[2]
    each = 4 if has_biases else 2
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    hiddens, cells = list[Tensor](), list[Tensor]()
    for layer in range(layers):
        outputs = list[Tensor]()
        for direction in range(directions):
            index = layer * directions + direction
            weights = [*parameters[index * each : (index + 1) * each]]
            if not has_biases:
                weights += [weights[0].new_zeros(4 * width)] * 2
            shape: Any = bool(direction), [], _LSTM, width, layers, has_biases, bidirectional, batch_first, train
            out, last, last_cell, _ = aten.mkldnn_rnn_layer(x, *weights, hidden[index], cell[index], *shape)
            outputs.append(out)
            hiddens.append(last)
            cells.append(last_cell)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, torch.stack(hiddens), torch.stack(cells)


def with_workspace(args: Sequence[Any], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of `mkldnn_rnn_layer(*args)` with the workspace that it keeps, where they have no data."""
    *outputs, workspace = out
    x, (train, width) = args[0], (args[-1], args[1].shape[0] // 4)
    if train and workspace is not None and not workspace.numel() and x.numel():
        size_bytes = workspace_bytes(*x.shape, width, x.dtype)
        workspace = torch.empty(size_bytes, dtype=torch.uint8, device=x.device)
    return (*outputs, workspace)


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
