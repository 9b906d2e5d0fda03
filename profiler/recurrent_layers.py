"""`nn.RNN`, `nn.GRU` and `nn.LSTM` of plain products, as PyTorch computes them where no library has a kernel.

From aten/src/ATen/native/RNN.cpp (torch 2.13).  On a CPU it multiplies the inputs of all steps at once, and keeps that
to the end of the layer; on other devices, the meta device among them, step by step.  Here the caller says which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

States = tuple[Tensor, ...]
"""Hidden state (samples, width), of an LSTM also that of the cell."""


@dataclass(frozen=True)
class Weights:
    """Those of one layer in one direction."""

    inputs: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None

    def of_inputs(self, x: Tensor) -> Tensor:
        return linear(x, self.inputs, self.input_bias)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.hidden, self.hidden_bias)


def _simple(activation: Callable[[Tensor], Tensor], x: Tensor, states: States, weights: Weights) -> States:
    return (activation(weights.of_hidden(states[0]).add_(x)),)


def _gru(x: Tensor, states: States, weights: Weights) -> States:
    (hidden,) = states
    reset_in, update_in, new_in = x.unsafe_chunk(3, 1)
    reset, update, new = weights.of_hidden(hidden).unsafe_chunk(3, 1)
    reset, update = reset.add_(reset_in).sigmoid_(), update.add_(update_in).sigmoid_()
    new = new_in.add(new.mul_(reset)).tanh_()
    return ((hidden - new).mul_(update).add_(new),)


def _lstm(x: Tensor, states: States, weights: Weights) -> States:
    hidden, cell = states
    kept, forgotten, new, shown = weights.of_hidden(hidden).add_(x).unsafe_chunk(4, 1)
    kept, forgotten, new, shown = kept.sigmoid_(), forgotten.sigmoid_(), new.tanh_(), shown.sigmoid_()
    cell = (forgotten * cell).add_(kept * new)
    hidden = shown * cell.tanh()
    return (hidden if weights.projection is None else hidden.matmul(weights.projection.t())), cell


CELLS: dict[str, Callable[[Tensor, States, Weights], States]] = {
    "rnn_tanh": partial(_simple, torch.tanh),
    "rnn_relu": partial(_simple, torch.relu),
    "gru": _gru,
    "lstm": _lstm,
}
"""By the name of the operation."""


@dataclass(frozen=True)
class Stack:
    """How layers stand upon each other: the last arguments of `torch.gru` and the like, in their order."""

    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def places(self, layer: int) -> range:
        """Return the places of a layer's directions among states, and their weights."""
        return range(layer * self.directions, (layer + 1) * self.directions)

    def run(self, layer: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
        """Return the output of layer after layer, each given its input (steps, samples, width) and number."""
        x = x.transpose(0, 1) if self.batch_first else x
        for number in range(self.layers):
            x = layer(x, number)
            if self.dropout and self.train and number < self.layers - 1:
                x = torch.dropout(x, self.dropout, True)
        return x.transpose(0, 1) if self.batch_first else x


def recurrent(
    name: str, at_once: bool, x: Tensor, states: Tensor | Sequence[Tensor], parameters: Sequence[Tensor], *shape: Any
) -> Any:
    """`torch.gru` and the like: the output, and the last states.

    Args:
        name: key of `CELLS`.
        at_once: multiply the inputs of all steps at once.
        shape: of a `Stack`.
    """
    stack, last = Stack(*shape), list[States]()
    hidden = [states] if isinstance(states, Tensor) else list(states)

    def layer(x: Tensor, number: int) -> Tensor:
        places = stack.places(number)
        weights = [weights_of(parameters, stack, place) for place in places]
        return _layer(CELLS[name], at_once, x, [tuple(state[k] for state in hidden) for k in places], weights, last)

    return stack.run(layer, x), *(torch.stack(ends) for ends in zip(*last, strict=True))


def weights_of(parameters: Sequence[Tensor], stack: Stack, place: int) -> Weights:
    """Return the weights of one direction of a layer, of all of a stack's."""
    each = len(parameters) // (stack.layers * stack.directions)
    own = parameters[place * each : (place + 1) * each]
    if stack.has_biases:
        return Weights(*own)
    return Weights(own[0], own[1], projection=own[2] if len(own) == 3 else None)


def _layer(
    cell: Callable[[Tensor, States, Weights], States],
    at_once: bool,
    x: Tensor,
    first: Sequence[States],
    weights: Sequence[Weights],
    last: list[States],
) -> Tensor:
    """Return the output (steps, samples, width) of a layer, and append its last states for each direction.

    What has a name here lives as long as in PyTorch: `steps` to the end, and to those of the other direction.
    """

    def run() -> list[Tensor]:
        states, outputs = first[direction], list[Tensor]()
        for step in steps:
            states = cell(step if at_once else weights[direction].of_inputs(step), states, weights[direction])
            outputs.append(states[0])
        last.append(states)
        return outputs

    direction = 0
    steps = (weights[0].of_inputs(x) if at_once else x).unbind(0)
    outputs = run()
    forth = torch.stack(outputs)
    if len(weights) == 1:
        return forth
    direction = 1
    steps = (weights[1].of_inputs(x) if at_once else x).unbind(0)[::-1]
    outputs_back = run()
    return torch.cat([forth, torch.stack(outputs_back[::-1])], -1)
