"""Measures optimizer steps over fp32 tensors: seconds per tensor, and per byte.

With T tensors of B bytes together, and a step's seconds t over them and t_1 over T tensors of one element,

    per tensor = t_1 / T        per byte = (t - t_1) / B, at least 0
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from statistics import median

import torch
from torch import Tensor
from torch.optim import Optimizer

from profiler.cluster.figure import Figure
from profiler.cluster.measurements import OptimizerTimes
from profiler.errors import OsdpError
from profiler.timing.device_queue import Taken, clock_of, time_work
from profiler.timing.stopwatch import Clock

WARM_UP_STEPS = 2
"""Steps that are not timed: the first one makes the states."""


def optimizer_times(
    shapes: Sequence[Sequence[int]],
    optimizers: Mapping[str, Callable[..., Optimizer]],
    device: torch.device,
    repetitions: int,
    barrier: Callable[[], None] = lambda: None,
    *,
    clock: Clock | None = None,
    held: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> tuple[OptimizerTimes, ...]:
    """Time a step of each optimizer over tensors of these shapes, which are what one rank holds.

    `held` returns a tensor as parameters and gradients are, such as a DTensor of which it is this rank's part.

    `barrier` is called before each step, so that all ranks take theirs at once.  The optimizers have
    torch's defaults but no weight decay, as `osdp train` makes them.  Raises OsdpError.
    """
    size_bytes = sum(torch.float32.itemsize * prod(shape) for shape in shapes)
    if not size_bytes or repetitions < 1:
        got = f"{size_bytes} bytes, {repetitions} repetitions"
        raise OsdpError("no optimizer step to measure", got=got, expected="at least one of each")
    parameters, single = (_parameters(each, device, held) for each in (shapes, [(1,)] * len(shapes)))
    source = f"measured: median of {repetitions} steps over {len(shapes)} tensors of {size_bytes} bytes together"
    of_tensors = f"measured: median of {repetitions} steps over {len(shapes)} tensors of one element"
    found, clock = [], clock or clock_of(device)
    for name, make in optimizers.items():
        step, single_step = (_step(make, each, repetitions, barrier, clock) for each in (parameters, single))
        per_byte = max(0.0, step.seconds - single_step.seconds) / size_bytes
        per_tensor = Figure(single_step.seconds / len(shapes), of_tensors + _bound(single_step))
        found.append(OptimizerTimes(name, per_tensor, Figure(per_byte, source + _bound(step))))
    return tuple(found)


def _bound(step: Taken) -> str:
    return ", host-bound" if step.is_host_bound else ""


def _parameters(
    shapes: Sequence[Sequence[int]], device: torch.device, held: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return tensors with gradients."""

    def tensor(shape: Sequence[int]) -> Tensor:
        return held(torch.randn(tuple(shape), device=device))

    parameters = [tensor(shape).requires_grad_() for shape in shapes]
    for parameter, shape in zip(parameters, shapes, strict=True):
        parameter.grad = tensor(shape)
    return parameters


def _step(
    make: Callable[..., Optimizer], parameters: Sequence[Tensor], rounds: int, barrier: Callable[[], None], clock: Clock
) -> Taken:
    """Return the median of some steps, and whether one of them was host-bound."""
    optimizer = make(parameters, lr=1e-3, weight_decay=0.0)
    found = []
    for _ in range(WARM_UP_STEPS + rounds):
        barrier()
        found.append(time_work(optimizer.step, clock))
    timed = found[WARM_UP_STEPS:]
    return Taken(median(one.seconds for one in timed), any(one.is_host_bound for one in timed))
