"""The memory tracker against bytes counted by hand, on real tensors on the CPU."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.observe.live_bytes import HOST, LiveBytes

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


# --- categories ------------------------------------------------------------------------------


def test_storages_are_of_the_category_in_which_they_are_made() -> None:
    with LiveBytes() as live:
        live.category = "activations"
        first = torch.ones(FLOATS)
        live.category = "temporaries"
        second = first * 2
        view = first.view(2, -1)
        assert [live.category_of(t) for t in (first, second, view)] == ["activations", "temporaries", "activations"]
        assert live.peak.categories == {"activations": S, "temporaries": S}
        del first, view
        third = second * 2
        # As much as at the peak is not more: that stays what it was.
        assert live.peak.categories == {"activations": S, "temporaries": S}
        fourth = third * 2
        assert live.peak.categories == {"temporaries": 3 * S}
        live.reset_peak()
        assert live.peak.categories == {"temporaries": 3 * S}
        del second, fourth
    assert live.category_of(torch.ones(1)) == "", "made outside"


def test_what_is_held_can_be_given_a_category() -> None:
    weight, batch = torch.ones(FLOATS), torch.ones(FLOATS)
    with LiveBytes() as live:
        live.category = "activations"
        live.hold([weight], "parameters")
        live.hold([batch])
        live.hold([weight])
        assert live.category_of(weight) == "parameters", "a second look changes nothing"
        assert live.peak.categories == {"parameters": S, "activations": S}


def test_a_label_counts_at_the_peak_if_nothing_has_changed_since() -> None:
    with LiveBytes() as live:
        live.phase = "forward"
        first = torch.ones(FLOATS)
        second = first * 2
        live.phase = "later"
        live.label(second, "buffers")
        assert live.peak.categories == {"": S, "buffers": S}
        assert (live.peak.total_bytes, live.peak.op) == (2 * S, "aten.mul.Tensor")
        del first
        live.label(second, "gradients")
        assert live.peak.categories == {"": S, "buffers": S}, "the peak was before"
        assert live.category_of(second) == "gradients"
        assert live.total_bytes == S
        third = second * 2
        fourth = third * 2
        assert live.peak.categories == {"": 2 * S, "gradients": S}
        assert live.peak.total_bytes == sum(live.peak.categories.values())
        del fourth


def test_labels_follow_resizes() -> None:
    """As of FSDP2's buffers: what is freed and made again stays what it is for."""
    with LiveBytes() as live:
        gathered = torch.ones(FLOATS)
        live.label(gathered, "unsharded_parameters")
        gathered.untyped_storage().resize_(0)
        other = torch.ones(FLOATS)
        gathered.untyped_storage().resize_(S)
        assert live.peak.categories == {"unsharded_parameters": S, "": S}
        del other


def test_what_is_on_the_host_is_in_no_total() -> None:
    with LiveBytes() as live:
        kept = torch.ones(FLOATS)
        live.category = HOST
        on_host = torch.ones(4 * FLOATS)
        assert (live.total_bytes, live.peak_bytes) == (S, S)
        assert live.peak.categories == {"": S}
        assert live.category_of(on_host) == HOST
        live.category = ""
        moved = torch.ones(2 * FLOATS)
        live.label(moved, HOST)
        assert live.total_bytes == S, "moved away"
        assert live.peak.categories == {"": 3 * S}, "it was here before"
        live.label(on_host, "buffers")
        assert live.total_bytes == 5 * S, "moved here"
        assert live.peak.categories == {"": S, "buffers": 4 * S}
        del on_host, moved
        assert live.total_bytes == S
        del kept
    assert live.total_bytes == 0


def test_labels_of_what_is_not_counted_do_nothing() -> None:
    before = torch.ones(FLOATS)
    with LiveBytes() as live:
        live.label(before, "parameters")
        assert live.category_of(before) == ""
        assert live.total_bytes == 0


def test_tensors_on_the_meta_device_do_not_count() -> None:
    with LiveBytes() as live:
        shapes = torch.empty(FLOATS, device="meta")
        products = shapes * 2
        live.hold([shapes, products, torch.empty(FLOATS, device="meta")], "parameters")
        assert live.total_bytes == live.peak_bytes == 0
        assert live.category_of(products) == ""
