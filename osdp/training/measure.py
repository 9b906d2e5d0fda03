"""What a run measures: seconds per step, how long ranks wait for the slowest of them, and peak memory per rank.

On CUDA torch's allocator counts, over the whole run.  On a CPU the tensors of one step are counted
as they come and go, which slows that step down: it is not timed.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from osdp.api import OSDP
from osdp.training.process_group import Ranks
from osdp.training.reporters import Memory
from osdp.training.waiting import Stalls, waits
from runtime.observe.part_peaks import PartPeak, PartPeaks

WARM_UP_STEPS = 2
"""First steps of a run that are not timed: they allocate, and their kernels are chosen."""


@dataclass(frozen=True)
class Recent:
    """What all ranks have measured since it was last asked."""

    peak_bytes: int
    """Of the fullest rank so far, 0 on CPU ranks before the step that is tracked."""
    waits_s: tuple[float, ...]
    """As `osdp.training.waiting.waits`, of the median step."""


class Measurements:
    """Takes the time and the memory of a run's steps."""

    def __init__(self, ranks: Ranks, steps: int, stalls: Stalls, *, by_part: bool = False) -> None:
        """`by_part`: also what lives while each part of the model runs, for which a step on a GPU is counted too."""
        self.ranks, self._stalls, self._by_part = ranks, stalls, by_part
        self.parts: tuple[PartPeak, ...] = ()
        """What lived at most while each part of the model ran, in the order of the step that was counted."""
        self.timed_s: list[float] = []
        """Of every step that counts."""
        self._computes_s: list[float] = []
        """The same without where computation was stalled."""
        # The second step: then the optimizer's states exist.
        self._tracked = min(2, steps) if ranks.device.type == "cpu" or by_part else 0
        self.count = 0
        self._live_bytes = 0
        self._left_out = False
        self._recent_s: list[float] = []
        self._recent_computes_s: list[float] = []
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def step(self, model: OSDP, optimizer: Optimizer) -> Iterator[None]:
        """Measure the step that runs inside."""
        self.count += 1
        self._left_out = False
        started = time.perf_counter()
        with self._stalls.step():
            if self.count == self._tracked:
                with PartPeaks() as live:
                    live.hold(held_tensors(model, optimizer))
                    if self._by_part:
                        units = model.schedule.units
                        live.follow(model.module, (name for unit in units for name in (*unit.modules, *unit.operators)))
                        live.follow_optimizer(optimizer)
                    yield
                    live.unwatch()
                self._live_bytes, self.parts = live.peak_bytes, tuple(live.parts)
            else:
                yield
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        computes_s = seconds - self._stalls.seconds()
        self._recent_s.append(seconds)
        self._recent_computes_s.append(computes_s)
        if self.count > WARM_UP_STEPS and not self._left_out:
            self.timed_s.append(seconds)
            self._computes_s.append(computes_s)

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

    def recent(self) -> Recent:
        """Return what all ranks have measured since the last call. A collective call."""
        is_cuda = self.ranks.device.type == "cuda"
        computes_s, self._recent_computes_s = median(self._recent_computes_s), []
        own_bytes = torch.cuda.max_memory_allocated() if is_cuda else self._live_bytes
        everyone = self.ranks.everyone([own_bytes, round(1e9 * computes_s)])
        return Recent(max(peak_bytes for peak_bytes, _ in everyone), waits([1e-9 * ns for _, ns in everyone]))

    def whole(self) -> tuple[Memory | None, tuple[float, ...]]:
        """Return the peak of the fullest rank and how long each rank waits in the median step. A collective call.

        None where no step was run, and nothing where none was timed.
        """
        if not self.count:
            return None, ()
        peaks, how = (self._live_bytes, 0), f"live tensors of step {self._tracked} of this run"
        if self.ranks.device.type == "cuda":
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            how = "max_memory_allocated of torch's allocator over the run"
        computes_s = median(self._computes_s) if self._computes_s else 0.0
        everyone = self.ranks.everyone([*peaks, round(1e9 * computes_s)])
        allocated, reserved = (max(found[place] for found in everyone) for place in (0, 1))
        return Memory(allocated, reserved, how), waits([1e-9 * found[2] for found in everyone] if computes_s else ())


def held_tensors(module: nn.Module, optimizer: Optimizer) -> Iterable[Tensor]:
    """Yield the tensors that live between steps; gradients lie in DistributedDataParallel's buckets, which stay."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
