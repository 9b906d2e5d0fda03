"""Small copies to a GPU: from pinned memory, without a wait; elsewhere as ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from runtime.host_copies import on_device
from runtime.odc.gpu_windows import DeviceTransport
from runtime.odc.step_protocol import Group

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note how tensors are copied; of this machine's nothing is pinned, and nothing moves."""
    made: list[str] = []
    stay = torch.Tensor.to

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        made.append(f"to {device.type}{', without a wait' if non_blocking else ''}")
        return stay(tensor, tensor.device)

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        made.append("pinned")
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return made


def test_what_goes_to_a_gpu_is_pinned_and_not_waited_for(copies: list[str]) -> None:
    on_device(torch.ones(2), CUDA)
    assert copies == ["pinned", "to cuda, without a wait"]


def test_what_is_there_or_has_no_data_is_not_pinned(copies: list[str]) -> None:
    on_device(torch.ones(2), CPU)
    there: Any = SimpleNamespace(device=CUDA, to=lambda device: copies.append(f"on {device.type} already"))
    on_device(there, CUDA)
    with FakeTensorMode():
        on_device(torch.ones(2), CUDA)
    assert copies == ["to cpu", "on cuda already", "to cuda"]


def test_what_odc_tells_its_gpu_is_not_waited_for(copies: list[str]) -> None:
    """Where weights are, when they have moved, and this rank's message of a step."""
    windows: Any = SimpleNamespace(_device=SimpleNamespace(torch_device=CUDA), _sources={}, _seen=None)
    rows = [[4096, 8192], [0, 5], [5, 3]]
    assert DeviceTransport._on_device(windows, 0, rows).tolist() == rows
    assert copies == ["pinned", "to cuda, without a wait"]
    copies.clear()

    pushed: list[torch.Tensor] = []
    summary = SimpleNamespace(push=pushed.append)
    unit: Any = SimpleNamespace(is_replaced=False, pushed=[True, False])
    transport: Any = SimpleNamespace(device_type="cuda", ranks=(0, 1), windows=[summary])
    Group((unit,), transport, None).send_message(3, is_changed=True)
    assert copies == ["pinned", "to cuda, without a wait"]
    assert pushed[0].tolist() == 2 * [3.0, 9.0, 1.0, 0.0, 1.0, 0.0]
    assert pushed[0].dtype == torch.float32
