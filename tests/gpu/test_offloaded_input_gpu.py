"""Inputs of recomputed blocks on the host, on one GPU: delayed copies, and the memory that they free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.strategies import offloaded_input
from runtime.strategies.activation_checkpointing import _with_device
from runtime.strategies.offloaded_input import CopyStreams, Offloading

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU (torch.cuda.is_available() is False)")

BLOCKS, ROWS, WIDTH = 8, 4096, 1024
BELOW = {str(index): str(index - 1) if index else None for index in range(BLOCKS)}


class Block(nn.Module):
    """A residual branch with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.1)


def step(blocks: nn.ModuleList, offloading: Offloading, *, by_name: bool = False) -> tuple[list[Tensor], int]:
    """Return the gradients of one step, and the most that was in use beside what was there, or waits for a stream.

    Gradients are there before: each has the size of an input, and would take its place.
    """
    torch.manual_seed(1)
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True) * 1.0
    for index, block in enumerate(blocks):
        args: tuple[Any, ...] = () if by_name else (x,)
        kwargs: dict[str, Any] = {"x": x} if by_name else {}
        forward: Callable[..., Any] = block
        offloaded = offloading.offload(str(index), args, kwargs)
        if offloaded is not None:
            forward, (args, kwargs) = offloaded.into(forward), offloaded.without(args, kwargs)
        forward, args = _with_device(forward, args, torch.device("cuda", 0))
        x = checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if offloaded is not None:
            offloaded.let_go(str(index))
    x.square().mean().backward()
    del x, args, kwargs
    gradients = [one.grad for one in blocks.parameters() if one.grad is not None]
    torch.cuda.synchronize()
    return gradients, torch.cuda.memory_stats()["active_bytes.all.peak"] - before


@pytest.mark.parametrize("delayed", ["nothing", "copies", "computing"])
def test_gradients_are_those_of_inputs_that_stay(delayed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever stream is late, bit by bit; and of eight inputs there are two at a time."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS)).cuda()
    copy = CopyStreams.copy

    def late(streams: CopyStreams, target: Tensor, source: Tensor, *, leaves: bool) -> Any:
        if delayed == "computing":
            torch.cuda._sleep(20_000_000)
        with streams._streams[not leaves]:
            if delayed == "copies":
                torch.cuda._sleep(20_000_000)
        return copy(streams, target, source, leaves=leaves)

    stays = Offloading(torch.device("cuda", 0), {})
    step(blocks, stays)  # makes cuBLAS's workspaces
    stayed, stayed_bytes = step(blocks, stays)
    monkeypatch.setattr(offloaded_input.CopyStreams, "copy", late)
    offloading = Offloading(torch.device("cuda", 0), BELOW)
    for _ in range(3):  # memory of the host and of the device is used again
        gone, gone_bytes = step(blocks, offloading, by_name=delayed == "nothing")
        assert all(torch.equal(one, other) for one, other in zip(stayed, gone, strict=True))
        one_input = 4 * ROWS * WIDTH
        assert stayed_bytes - gone_bytes >= (BLOCKS - 3) * one_input


def test_copies_run_under_what_is_computed() -> None:
    """A step with copies takes hardly longer: half of the time that the copies take alone at most."""
    torch.manual_seed(0)
    blocks, device = nn.ModuleList(Block() for _ in range(BLOCKS)).cuda(), torch.device("cuda", 0)
    host, source = torch.empty(ROWS, WIDTH, pin_memory=True), torch.empty(ROWS, WIDTH, device=device)

    def milliseconds(run: Callable[[], object]) -> float:
        run()
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    copies_ms = 2 * BLOCKS * milliseconds(lambda: host.copy_(source, non_blocking=True))
    stays, goes = Offloading(device, {}), Offloading(device, BELOW)
    more_ms = milliseconds(lambda: step(blocks, goes)) - milliseconds(lambda: step(blocks, stays))
    assert more_ms <= 0.5 * copies_ms
