"""What is told of memory: the tutorial's dictionaries, and the peak of steps.

GB in the tutorial's keys are GiB, 2^30 bytes: that is what its figures are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from profiler.byte_sizes import GIB
from profiler.timing.device_rates import resident_bytes
from runtime.observe.live_bytes import LiveBytes


def memory_at(stage: str, rank: int, device: torch.device) -> dict[str, str | int | float]:
    """Return a rank's memory under the tutorial's keys; those of CUDA are left out on a CPU."""
    told: dict[str, str | int | float] = {"stage": stage, "rank": rank, "log_key": "memory"}
    if device.type == "cuda":
        told |= {
            "cuda_memory_allocated_GB": torch.cuda.memory_allocated(device) / GIB,
            "cuda_max_memory_allocated_GB": torch.cuda.max_memory_allocated(device) / GIB,
            "cuda_memory_reserved_GB": torch.cuda.memory_reserved(device) / GIB,
            "cuda_max_memory_reserved_GB": torch.cuda.max_memory_reserved(device) / GIB,
        }
    return told | {"cpu_memory_rss_GB": resident_bytes() / GIB}


class Peak:
    """Most memory of a rank in some steps: by torch's allocator on CUDA, of live tensors on a CPU.

    Live tensors are counted in the warm-up, because that slows steps down; the allocator in the steps after it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._live = LiveBytes()

    @contextmanager
    def warm_up(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Run the warm-up; `held` are the tensors that are there before it."""
        if self.device.type == "cuda":
            yield
            return
        with self._live:
            self._live.hold(held)
            yield

    def restart(self) -> None:
        """Begin the steps after the warm-up."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read_bytes(self) -> int:
        """Return the peak."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self._live.peak_bytes
