"""How long the host takes to launch a whole training pass: forward, loss and backward, with nothing in between.

Passes that are cut and watched (`profiler.timing.blockwise_pass`) say how the host's time divides over calls, and take
half as long again and more: every operator has hooks, and the backward's thread is woken for every block.

The speed of a host is not one: a core that another program shares launches at two thirds of it for a while.  A median
is of one speed or the other, and medians of passes of unequal length of different ones; so times of hosts are averaged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import nn

from profiler.alias_outputs import outputs_aliased
from profiler.model_source import Inputs
from profiler.timing.device_rates import synchronize
from profiler.trace.metered_pass import find_loss

WARM_UP = 2
EXTREME = 0.1
"""Part of the times at either end that a mean leaves out: while the host did something else."""


def mean_s(seconds: Sequence[float]) -> float:
    """Return the mean of a host's times, without the longest and the shortest tenth."""
    out = int(EXTREME * len(seconds))
    return fmean(sorted(seconds)[out : len(seconds) - out])


def host_launches_s(
    module: nn.Module, inputs: Inputs, device: torch.device, repetitions: int, least_s: float = 0.0
) -> list[float]:
    """Return, of so many passes, the seconds until each is launched, or computed by a device that is the host itself.

    Of more passes, if so many are over, the device's part too, in less than `least_s`.

    Modules return what they do under a plan (`profiler.alias_outputs`).  Empty where the device has no room for the
    activations and gradients of the whole model.  Parameters have no gradients afterwards.
    """
    seconds: list[float] = []
    try:
        with outputs_aliased(module):
            end_s = 0.0
            while len(seconds) < WARM_UP + repetitions or time.perf_counter() < end_s:
                synchronize(device)
                began_s = time.perf_counter()
                if len(seconds) == WARM_UP:
                    end_s = began_s + least_s
                loss, _ = find_loss(module(*inputs[0], **inputs[1]))
                loss.backward()  # type: ignore[no-untyped-call]
                seconds.append(time.perf_counter() - began_s)
                module.zero_grad()
    except torch.OutOfMemoryError:
        return []
    finally:
        module.zero_grad()
        synchronize(device)
    return seconds[WARM_UP:]
