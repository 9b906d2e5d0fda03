"""The memory tracker on FSDP with real tensors: shards at rest, gathered parameters in between."""

from __future__ import annotations

import time

import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from osdp.training.trace_step import recorded
from runtime.observe.live_bytes import LiveBytes

SHARD = 64 * 256 * 4
"""Bytes of this rank's quarter of a float weight of 256 x 256."""


def _steps(rank: int) -> tuple[list[int], int, str]:
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    data = torch.ones(1, 256)
    at_rest = []
    with LiveBytes() as live:
        live.hold(model.parameters())
        for _ in range(3):
            live.phase = "forward"
            loss = model(data).sum()
            live.phase = "backward"
            loss.backward()
            del loss
            time.sleep(0.1)  # gloo's thread lets go of the last gradient a moment after it is reduced
            at_rest.append(live.total_bytes)
    return at_rest, live.peak_bytes, live.peak.phase


def test_shards_at_rest_and_gathered_parameters_at_the_peak() -> None:
    for at_rest, peak_bytes, phase in run_ranks(_steps, 4):
        parameters_and_gradients = 2 * 3 * SHARD
        assert at_rest[1] == at_rest[2], "nothing is left over from a step"
        assert parameters_and_gradients <= at_rest[2] <= parameters_and_gradients + 8 * 1024
        assert phase == "backward"
        # Two layers gathered (prefetch), a third one's gradient whole, one reduced: 13 shards at the least.
        assert parameters_and_gradients + 3 * 4 * SHARD <= peak_bytes <= parameters_and_gradients + 6 * 4 * SHARD


def _step_of_fsdp1(rank: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return a second step's first and last moment, and the most of every category."""
    model = FullyShardedDataParallel(
        nn.Linear(256, 256, bias=False), device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with recorded(model, optimizer) as moments:
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    names = {name for moment in moments for name in moment.categories}
    most = {name: max(moment.categories.get(name, 0) for moment in moments) for name in names}
    return moments[0].categories, moments[-1].categories, most


def test_fsdp1_computes_with_a_view_of_what_it_gathers() -> None:
    half = 2 * SHARD
    for first, last, most in run_ranks(_step_of_fsdp1, 2):
        assert first == {"parameters": half, "optimizer": half}
        assert (last["parameters"], last["optimizer"], last["gradients"]) == (half, half, half)
        assert most["unsharded_parameters"] == 2 * half
        assert most["gradients"] == half
