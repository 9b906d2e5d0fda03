"""What a run measures: seconds per step, and peak memory per rank.

On CUDA torch's allocator counts, over the whole run.  On a CPU the tensors of one step are counted
as they come and go, which slows that step down: it is not timed.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from osdp.training.process_group import Ranks
from osdp.training.reporters import Memory
from runtime.observe.live_bytes import LiveBytes

WARM_UP_STEPS = 2
"""First steps of a run that are not timed: they allocate, and their kernels are chosen."""


class Measurements:
    """Takes the time and the memory of a run's steps."""

    def __init__(self, ranks: Ranks, steps: int) -> None:
        self.ranks = ranks
        self.timed_s: list[float] = []
        """Of every step that counts."""
        # The second step: then the optimizer's states exist.
        self._tracked = min(2, steps) if ranks.device.type == "cpu" else 0
        self.count = 0
        self._live_bytes = 0
        self._left_out = False
        self._recent_s: list[float] = []
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def step(self, module: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Measure the step that runs inside."""
        self.count += 1
        self._left_out = False
        started = time.perf_counter()
        if self.count == self._tracked:
            with LiveBytes() as live:
                live.hold(held_tensors(module, optimizer))
                yield
            self._live_bytes = live.peak_bytes
        else:
            yield
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        self._recent_s.append(seconds)
        if self.count > WARM_UP_STEPS and not self._left_out:
            self.timed_s.append(seconds)

    def leave_out(self) -> None:
        """Do not time the step that runs: something slows it down."""
        self._left_out = True

    def recent_s(self) -> float:
        """Return the median step since the last call."""
        seconds, self._recent_s = median(self._recent_s), []
        return seconds

    @property
    def step_s(self) -> float:
        """Median of the steps that count; 0 if there is none."""
        return median(self.timed_s) if self.timed_s else 0.0

    def peak_bytes(self) -> int:
        """Return the peak of the fullest rank so far, 0 on CPU ranks before the step that is tracked. Collective."""
        is_cuda = self.ranks.device.type == "cuda"
        return self.ranks.maximum([torch.cuda.max_memory_allocated() if is_cuda else self._live_bytes])[0]

    def memory(self) -> Memory | None:
        """Return the peak of the fullest rank so far; None where no step was run. A collective call."""
        if not self.count:
            return None
        peaks, how = [self._live_bytes, 0], f"live tensors of step {self._tracked} of this run"
        if self.ranks.device.type == "cuda":
            peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            how = "max_memory_allocated of torch's allocator over the run"
        allocated, reserved = self.ranks.maximum(peaks)
        return Memory(allocated, reserved, how)


def held_tensors(module: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
    """Yield the tensors that live between steps; gradients lie in DistributedDataParallel's buckets, which stay."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
