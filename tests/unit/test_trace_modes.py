"""Modes for functions, in a trace, are for what the model asks of tensors: the trace's own questions pass them by."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from osdp.models.user_factory import source_of
from osdp.zoo import load_model
from profiler.trace.python_values import PythonValues
from profiler.trace.trace import trace_model

METER = {f"{name}.py" for name in ("activation_ledger", "elementwise", "op_cost", "op_meter", "op_tensors", "shapes")}
"""Files whose code runs for every op, and some of it once or twice in a pass."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_meter_asks_of_ops_passes_no_mode(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = Counter[str](), PythonValues.__torch_function__

    def note(self: PythonValues, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        asked[Path(sys._getframe(1).f_code.co_filename).name] += 1
        return answer(self, func, types, args, kwargs)

    monkeypatch.setattr(PythonValues, "__torch_function__", note)
    trace_model(load_model("gpt2-tiny"), precision)
    assert asked["gpt2.py"] > 0, "what the model asks does pass"
    assert sum(count for name, count in asked.items() if name in METER) < 100, "of the thousands of ops of a trace"


@torch.library.custom_op("osdp_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Return twice the tensor."""
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    with torch.device(x.device):  # a mode for functions
        return torch.empty(x.shape)


doubled.register_autograd(lambda context, gradient: 2 * gradient)


class Doubling(nn.Module):
    """Two layers around an op; of the model's own, or PyTorch's."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.down, self.up, self.own = nn.Linear(8, 16), nn.Linear(16, 8), own

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) -> a loss."""
        y = self.down(x)
        return self.up(doubled(y) if self.own else 2 * y).sum()

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.zeros(batch, 8),), {}


def test_a_kernel_of_the_models_own_may_use_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.trace.trace.FakeCpu", None)  # what a trace on the meta device fails with shows
    own, plain = (trace_model(source_of(Doubling(own=own), "doubling", None, None)) for own in (True, False))
    assert own.operators == plain.operators
    assert [call.output_bytes for call in own.calls] == [call.output_bytes for call in plain.calls]
