"""The memory tracker against bytes counted by hand, on real tensors on the CPU."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.memory_tracker import LiveBytes

FLOATS = 1024
S = 4 * FLOATS
"""Bytes of a tensor of so many floats: a multiple of 512."""
SCALAR = 512
"""A scalar takes a whole block."""


def test_storages_count_while_they_live() -> None:
    with LiveBytes() as live:
        first = torch.ones(FLOATS)
        second = first * 2
        assert live.total_bytes == 2 * S
        del first
        assert live.total_bytes == S
        view = second[10:].view(2, -1)
        del second
        assert live.total_bytes == S, "a view keeps its storage"
        del view
        assert live.total_bytes == 0
    assert live.peak_bytes == 2 * S


def test_small_storages_take_a_block() -> None:
    with LiveBytes() as live:
        kept = [torch.ones(1), torch.ones(129)]
        assert live.total_bytes == 512 + 1024
        assert len(kept) == 2


def test_what_was_made_before_is_held_once() -> None:
    weight = nn.Parameter(torch.ones(FLOATS))
    with LiveBytes() as live:
        live.hold([weight, weight.detach()])
        live.hold([weight])
        assert live.total_bytes == live.peak_bytes == S
        weight.detach().add_(1)
        assert live.total_bytes == S
        del weight
        assert live.total_bytes == 0


def test_resized_storages() -> None:
    """As FSDP2 does: the tensor stays, its memory goes and comes."""
    with LiveBytes() as live:
        gathered = torch.ones(FLOATS)
        gathered.untyped_storage().resize_(0)
        assert live.total_bytes == 0
        gathered.untyped_storage().resize_(S)
        assert live.total_bytes == S
    gathered.untyped_storage().resize_(0)
    assert live.total_bytes == S, "what happens outside is not seen"


def test_a_training_step() -> None:
    """Forward holds weight, input, product and exponential.

    Backward holds weight, input, exponential and its gradient (then the weight's gradient instead of
    the exponential), beside the loss and the gradient of the loss.
    """
    weight, data = nn.Parameter(torch.ones(FLOATS)), torch.ones(FLOATS)
    with LiveBytes() as live:
        live.hold([weight, data])
        live.phase = "forward"
        loss = (weight * data).exp().sum()
        assert live.peak.total_bytes == 4 * S
        assert live.peak.phase == "forward"
        assert live.total_bytes == 3 * S + SCALAR, "the exponential is saved, the product is not"
        live.phase = "backward"
        loss.backward()
        assert live.peak.total_bytes == 4 * S + 2 * SCALAR
        assert live.peak.phase == "backward"
        assert live.peak.op == "aten.mul.Tensor"
        assert live.total_bytes == 3 * S + SCALAR, "weight, gradient, data and loss"


def test_optimizer_states() -> None:
    weight = nn.Parameter(torch.ones(FLOATS))
    optimizer = torch.optim.Adam([weight], foreach=False)
    with LiveBytes() as live:
        live.hold([weight])
        weight.grad = torch.ones(FLOATS)
        optimizer.step()
        assert live.total_bytes == 4 * S + SCALAR, "weight, gradient, two moments and the step counter"
        before = live.total_bytes
        live.reset_peak()
        assert live.peak_bytes == before
        optimizer.zero_grad()
        assert live.total_bytes == before - S
    states = [value for state in optimizer.state.values() for value in state.values()]
    with LiveBytes() as again:
        again.hold([weight, *states])
    assert again.total_bytes == before - S


def test_fake_tensors_count_as_real_ones() -> None:
    with FakeTensorMode(), LiveBytes() as live:
        first = torch.ones(FLOATS)
        second = first * 2
        del first
        assert (live.total_bytes, live.peak_bytes) == (S, 2 * S)
        del second
    assert live.total_bytes == 0
