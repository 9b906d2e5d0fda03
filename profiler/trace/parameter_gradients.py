"""Gradients of parameters in a pass: dropped as the backward goes on, as nothing steps with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ParameterGradients:
    """The gradients of a module's parameters, by operator."""

    def __init__(self, parameters: Sequence[Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self.arrived = [[False] * len(own) for own in parameters]
        """Of the parameters of every operator, whether they got a gradient."""

    @property
    def are_missing(self) -> bool:
        """Whether a trained parameter got none so far."""
        pairs = zip(self._parameters, self.arrived, strict=True)
        return any(
            one.requires_grad and not got for own, all_got in pairs for one, got in zip(own, all_got, strict=True)
        )

    def drop(self, operator: int) -> None:
        """Drop those of an operator."""
        for place, parameter in enumerate(self._parameters[operator]):
            if parameter.grad is not None:
                self.arrived[operator][place] = True
                parameter.grad = None

    def drop_all(self) -> None:
        """Drop what is left."""
        with torch._C.DisableTorchFunction():
            for operator in range(len(self._parameters)):
                self.drop(operator)
