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
from profiler.timing.stopwatch import Clock, Stopwatch, clock_of

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
    found = []
    for name, make in optimizers.items():
        step_s, single_s = (
            _step_s(make, each, repetitions, barrier, clock or clock_of(device)) for each in (parameters, single)
        )
        per_byte = max(0.0, step_s - single_s) / size_bytes
        found.append(OptimizerTimes(name, Figure(single_s / len(shapes), of_tensors), Figure(per_byte, source)))
    return tuple(found)


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


def _step_s(
    make: Callable[..., Optimizer], parameters: Sequence[Tensor], rounds: int, barrier: Callable[[], None], clock: Clock
) -> float:
    optimizer = make(parameters, lr=1e-3, weight_decay=0.0)
    times = []
    for _ in range(WARM_UP_STEPS + rounds):
        barrier()
        watch = Stopwatch(clock)
        watch.switch("step")
        optimizer.step()
        watch.switch(None)
        times.append(watch.totals()["step"])
    return median(times[WARM_UP_STEPS:])
