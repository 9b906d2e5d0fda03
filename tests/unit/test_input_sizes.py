"""Example inputs that are no larger for more samples: a plan says that its memory is that of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from osdp.models.user_factory import source_of
from profiler.trace.input_sizes import ALIKE
from profiler.trace.trace import trace_model


class Summed(nn.Module):
    """Has one layer for the rows of all tensors that it is given, or so many of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, *given: Any) -> Tensor:
        tensors = [one for some in given for one in (some if isinstance(some, list) else [some])]
        rows = [one if isinstance(one, Tensor) else torch.randn(one, 8) for one in tensors]
        y: Tensor = self.layer(torch.cat(rows))
        return y.sum()


@pytest.mark.parametrize(
    ("inputs", "are_alike"),
    [
        (lambda batch: (torch.randn(batch, 8),), False),
        (lambda batch: (torch.randn(4, 8), torch.randn(batch, 8)), False),
        (lambda batch: ([torch.randn(3, 8) for _ in range(batch)],), False),
        (lambda batch: (batch,), False),
        (lambda batch: (torch.randn(4, 8),), True),
        (lambda batch: ([torch.randn(4, 8)], 3), True),
    ],
    ids=["rows", "one of two", "a list", "a number", "a batch of its own", "a list of its own"],
)
def test_inputs_that_do_not_grow_are_noted(inputs: Callable[[int], Any], are_alike: bool) -> None:
    """Such a factory had a plan with the largest micro-batch that is tried, and the memory of one sample."""
    graph = trace_model(source_of(Summed, "Summed", None, inputs))
    assert (ALIKE in graph.notes) == are_alike
