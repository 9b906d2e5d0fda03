"""What torchrun starts on two ranks: `-m validation.pulls DEVICE RESULT MEGABYTES REPETITIONS`.

Each pulls the other's shard through a window, as fast as a copy from there to here is; and multiplies matrices alone
and while pulls run beside that on another stream.  Rank 0 writes seconds to RESULT as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from osdp.training.process_group import Ranks, joined
from runtime.odc.choose_transport import open_transport
from runtime.odc.windows import WindowSpec
from runtime.own_gpu import barrier

TIMEOUT_S = 60.0
GEMM_SIZE = {"cuda": 8192, "cpu": 256}
GEMMS = {"cuda": 20, "cpu": 2}
"""Queued at once."""
MOST_PULLS = {"cuda": 1000, "cpu": 2}
LONGER = 1.5
"""Than the products pulls take that are queued beside them."""
WARM_UP = 2


def main() -> None:
    """Be one rank."""
    device_type, result, megabytes, repetitions = sys.argv[1:]
    numel = int(megabytes) * 2**20 // 4
    with joined(device_type, TIMEOUT_S) as ranks:
        found = measure(ranks, numel, int(repetitions))
    if ranks.rank == 0:
        Path(result).write_text(json.dumps(found))


def measure(ranks: Ranks, numel: int, repetitions: int) -> dict[str, Any]:
    """Return the medians of this rank. A collective call."""
    device, world = ranks.device, dist.group.WORLD
    specs = [WindowSpec("pulls", numel, torch.float32)]
    with open_transport(world, specs, device.type, TIMEOUT_S) as transport:
        (window,) = transport.windows
        window.publish(torch.full((numel,), float(ranks.rank), device=device))
        transport.barrier()
        out = torch.empty(ranks.world_size * numel, device=device)
        window.pull(out)
        expected = torch.arange(ranks.world_size, device=device).repeat_interleave(numel)
        is_right = bool(torch.equal(out, expected.float()))
        source = torch.ones(numel, device=_peer(ranks))
        target = torch.empty(numel, device=device)

        def pull() -> None:
            window.pull(out)

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        found: dict[str, Any] = {"is_right": is_right, "shard_bytes": 4 * numel, "ranks": ranks.world_size}
        found["pull_s"] = seconds_of(pull, device, repetitions)
        found["copy_s"] = seconds_of(copy, device, repetitions)
        found["own_copy_s"] = seconds_of(lambda: target.copy_(out[:numel]), device, repetitions)
        found |= beside(pull, found["pull_s"], device, repetitions)
        barrier(device)
        transport.barrier()
    return found


def _peer(ranks: Ranks) -> torch.device:
    """Return the next rank's device, if this process sees it."""
    if ranks.device.type == "cpu" or torch.cuda.device_count() < ranks.world_size:
        return ranks.device
    return torch.device("cuda", (ranks.rank + 1) % ranks.world_size)


def beside(pull: Callable[[], None], pull_s: float, device: torch.device, repetitions: int) -> dict[str, float]:
    """Return the seconds of matrix products alone, and while another stream pulls."""
    size, count = GEMM_SIZE[device.type], GEMMS[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=product)

    alone_s = seconds_of(multiply, device, repetitions)
    pulls = min(MOST_PULLS[device.type], ceil(LONGER * alone_s / pull_s))
    stream = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None  # as FSDP2 gathers
    measured = []
    for _ in range(repetitions):
        _finish(device)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for _ in range(pulls):
                pull()
        measured.append(_seconds(multiply, device))
    return {"gemm_s": alone_s, "gemm_beside_pulls_s": median(measured)}


def seconds_of(work: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    """Return the median seconds of some calls, on the current stream."""
    for _ in range(WARM_UP):
        work()
    measured = []
    for _ in range(repetitions):
        _finish(device)
        measured.append(_seconds(work, device))
    return median(measured)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return how long a call takes, by events on the current stream where there is one."""
    if device.type == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
