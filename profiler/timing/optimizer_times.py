"""Measures optimizer steps over fp32 tensors: seconds per tensor, and per byte.

With T tensors of B bytes together, and a step's seconds t over them and t_1 over T tensors of one element,

    per tensor = t_1 / T        per byte = (t - t_1) / B, at least 0
"""

from collections.abc import Callable, Mapping, Sequence
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
) -> tuple[OptimizerTimes, ...]:
    """Time a step of each optimizer over tensors of these shapes, which are what one rank holds.

    `barrier` is called before each step, so that all ranks take theirs at once.  The optimizers have
    torch's defaults but no weight decay, as `osdp train` makes them.  Raises OsdpError.
    """
    parameters, single = _parameters(shapes, device), _parameters([(1,)] * len(shapes), device)
    size_bytes = sum(parameter.nbytes for parameter in parameters)
    if not size_bytes or repetitions < 1:
        got = f"{size_bytes} bytes, {repetitions} repetitions"
        raise OsdpError("no optimizer step to measure", got=got, expected="at least one of each")
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


def _parameters(shapes: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return tensors with gradients."""
    parameters = [torch.randn(tuple(shape), device=device).requires_grad_() for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
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
