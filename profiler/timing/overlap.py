"""Whether an asynchronous collective overlaps with computation, and how much it slows the computation down.

Each round times three things on all ranks at once: matrix products for four fifths of the time of an all-reduce,
the all-reduce alone, and both: the all-reduce is started, the products are computed and timed, and then it is
waited for.  With a, b and c their medians,

    it overlaps       if c < 0.85 (a + b)
    slowdown          median over rounds of the products' time under the all-reduce over their time alone, at least 1

The products end first, so that communication runs beside them all the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist

from profiler.errors import OsdpError
from profiler.timing.device_queue import Taken, clock_of, time_work
from profiler.timing.device_rates import synchronize
from profiler.timing.stopwatch import Clock

ROWS = {"cpu": 256, "cuda": 2048}
"""Rows of the matrices by type of device: their product is short beside any collective worth overlapping."""
SHARE = 0.8
"""Of the time of the collective, that is computed for."""
OVERLAPPED = 0.85
"""Part of the sum of both below which they overlap."""
WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of communication and computation; medians of the slowest rank."""

    computation_s: float
    communication_s: float
    both_s: float
    slowdown: float
    """How many times longer computation takes while communication runs; at least 1."""
    on_streams: bool
    """Whether the device has streams: without, FSDP2's own collectives are waited for at once."""
    is_host_bound: bool = False
    """Whether a device may have waited for the host."""

    @property
    def asynchronous(self) -> bool:
        """Whether a collective that is waited for later (as DistributedDataParallel's are) runs under computation."""
        return self.both_s < OVERLAPPED * (self.computation_s + self.communication_s)

    @property
    def overlaps(self) -> bool:
        """Whether FSDP2's collectives run under computation."""
        return self.asynchronous and self.on_streams


def measure_overlap(size_bytes: int, repetitions: int, device: torch.device) -> Overlap:
    """Measure with all-reduces of a tensor of so many bytes over the world. A collective call."""
    if dist.get_world_size() < 2 or size_bytes < 4 or repetitions < 1:
        got = f"{dist.get_world_size()} ranks, {size_bytes} bytes and {repetitions} repetitions"
        expected = "at least 2 ranks, 4 bytes and 1 repetition"
        raise OsdpError("too little to measure overlap with", got=got, expected=expected)
    bench = _Bench(size_bytes, device)
    rounds = [bench.round() for _ in range(WARM_UP_ROUNDS + repetitions)][WARM_UP_ROUNDS:]
    computation_s, communication_s, both_s, under_s = (list(column) for column in zip(*rounds, strict=True))
    ratios = [under / alone for under, alone in zip(under_s, computation_s, strict=True)]
    slowdown = max(1.0, median(ratios))
    middle = median(computation_s), median(communication_s), median(both_s)
    return Overlap(*middle, slowdown, device.type == "cuda", bench.is_host_bound)


def begin_together(device: torch.device) -> None:
    """Let devices wait for each other before what is enqueued next; CPU ranks wait. A collective call."""
    dist.all_reduce(torch.zeros(1, device=device))


def meet(device: torch.device) -> None:
    """Wait for all ranks, and for the device. A collective call over the default group."""
    begin_together(device)
    synchronize(device)


def time_together(work: Callable[[], object], clock: Clock, device: torch.device) -> Taken:
    """Return the time of some work that all ranks begin together. A collective call over the default group."""

    def agree(held: bool) -> bool:
        return held if device.type == "cpu" else slowest([float(not held)], device) == [0.0]

    return time_work(work, clock, lambda: begin_together(device), agree)


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each number on all ranks. A collective call over the default group."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(one) for one in found]


class _Bench:
    """A tensor to reduce, and matrices to multiply for about as long."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        rows = ROWS[device.type]
        self.device, self.clock, self.is_host_bound = device, clock_of(device), False
        self.gradient = torch.ones(size_bytes // 4, device=device)
        self.left, self.right = torch.randn(rows, rows, device=device), torch.randn(rows, rows, device=device)
        self.out = torch.empty(rows, rows, device=device)
        self.products = 1
        self.communicate()
        self.compute()
        (communication_s,) = slowest([self.timed_s(self.communicate)], self.device)
        self.products = 8
        (computation_s,) = slowest([self.timed_s(self.compute)], self.device)
        self.products = max(1, round(SHARE * communication_s / computation_s * self.products))

    def round(self) -> list[float]:
        """Return the seconds of computation, communication, both, and computation under communication."""
        alone = [self.timed_s(self.compute), self.timed_s(self.communicate)]
        return slowest([*alone, *self.both()], self.device)

    def both(self) -> tuple[float, float]:
        """Return the seconds of both, and of the computation inside."""
        inside: list[Any] = []

        def run() -> None:
            work = self.start()
            begun = self.clock.mark()
            self.compute()
            inside[:] = begun, self.clock.mark()
            work.wait()

        seconds = self.timed_s(run)
        return seconds, self.clock.seconds(*inside)

    def compute(self) -> None:
        for _ in range(self.products):
            torch.mm(self.left, self.right, out=self.out)

    def communicate(self) -> None:
        self.start().wait()

    def start(self) -> dist.Work:
        return cast(dist.Work, dist.all_reduce(self.gradient, dist.ReduceOp.AVG, async_op=True))

    def timed_s(self, run: Callable[[], None]) -> float:
        taken = time_together(run, self.clock, self.device)
        self.is_host_bound = self.is_host_bound or taken.is_host_bound
        return taken.seconds
