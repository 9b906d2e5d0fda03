"""A step's memory over time and its trace: what is recorded of a step whose memory is known by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from osdp.training.trace_step import MEMORY_STEP, TRACE_STEP, Tracer, ready_folder, recorded
from profiler.errors import OsdpError

WEIGHT_BYTES = 4 * 256 * 256


def linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Return a layer whose weight is all of its memory, after one step, which makes the optimizer's states."""
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train on 128 rows: input and output take half as much as the weight, each."""
    model(torch.ones(128, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_lives_over_a_step_by_hand() -> None:
    model, optimizer = linear()
    with recorded(model, optimizer) as moments:
        step(model, optimizer)
    states = 2 * WEIGHT_BYTES + 512  # two moments, and the step's number
    assert moments[0].categories == {"parameters": WEIGHT_BYTES, "optimizer": states}
    assert moments[0].categories == moments[-1].categories  # gradients are dropped
    assert all(moment.categories["parameters"] == WEIGHT_BYTES for moment in moments)
    assert max(moment.categories.get("gradients", 0) for moment in moments) == WEIGHT_BYTES
    assert [moment.at_s for moment in moments] == sorted(moment.at_s for moment in moments)
    before = [moment for moment in moments if "gradients" not in moment.categories]
    assert max(moment.categories.get("activations", 0) for moment in before) >= WEIGHT_BYTES  # input and output
    assert any(moment.categories.get("optimizer_temporaries") for moment in moments)


def test_nothing_is_left_behind() -> None:
    model, optimizer = linear()

    def hooks() -> list[int]:
        (weight,) = model.parameters()
        of_weight: Any = weight._post_accumulate_grad_hooks
        return [
            len(model._forward_pre_hooks),
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_step_post_hooks),
            len(of_weight or ()),
        ]

    before = hooks()
    with pytest.raises(ZeroDivisionError), recorded(model, optimizer):
        raise ZeroDivisionError
    assert hooks() == before == [0, 0, 0, 0]


def test_two_steps_are_looked_into(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is optional and not installed")
    model, optimizer = linear()
    tracer, slow = Tracer(tmp_path / "new", model, optimizer), []
    for _ in range(5):
        with tracer.step():
            slow.append(tracer.slows)
            step(model, optimizer)
    assert slow == [number in (MEMORY_STEP, TRACE_STEP) for number in range(1, 6)]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"memory-rank0.png", "trace-rank0.json"}
    assert (tmp_path / "new" / "memory-rank0.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "new" / "trace-rank0.json").read_text())["traceEvents"]
    # Chrome's format: complete events have a name, a start and a duration in microseconds.
    products = [event for event in events if event.get("ph") == "X" and event["name"] == "aten::mm"]
    assert len(products) == 2  # forward, and the weight's gradient: the input needs none
    assert all(event["dur"] > 0 for event in products)


def test_without_a_folder_nothing_happens(tmp_path: Path) -> None:
    model, optimizer = linear()
    tracer = Tracer(None, model, optimizer)
    for _ in range(5):
        with tracer.step():
            assert not tracer.slows
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_or_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    if "matplotlib" not in sys.modules:
        pytest.importorskip("matplotlib", reason="matplotlib is optional and not installed")
    with pytest.raises(OsdpError, match="cannot be made"):
        ready_folder(tmp_path / "file" / "traces")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OsdpError, match="needs matplotlib") as caught:
        ready_folder(tmp_path / "traces")
    assert ".venv/bin/pip install -e '.[plot]'" in caught.value.advice
    assert not (tmp_path / "traces").exists()
