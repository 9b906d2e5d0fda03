"""What all ranks do at once around a timing. Both are collective calls over the default group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from profiler.timing.device_rates import synchronize


def meet(device: torch.device) -> None:
    """Wait for all ranks, and for the device."""
    dist.all_reduce(torch.zeros(1, device=device))
    synchronize(device)


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each number on all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(one) for one in found]
