"""The optimizers that plans name: what PyTorch's keep is what the planner counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.cost.unit_memory import OPTIMIZERS as COUNTED
from runtime.optimizers import OPTIMIZERS


def test_both_know_the_same() -> None:
    assert OPTIMIZERS.keys() == COUNTED.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_are_counted(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = OPTIMIZERS[name]([parameter])
    parameter.grad = torch.ones(3, 5)
    optimizer.step()
    states = list(optimizer.state[parameter].values())
    moments = [state for state in states if state.shape == parameter.shape]
    assert len(moments) == COUNTED[name].moments
    assert all(state.dtype == torch.float32 for state in moments)
    assert len(states) - len(moments) == COUNTED[name].has_step_counter
