"""How long the host takes to launch a whole training pass: forward, loss and backward, with nothing in between.

Passes that are cut and watched (`profiler.timing.blockwise_pass`) say how the host's time divides over calls, and take
half as long again and more: every operator has hooks, and the backward's thread is woken for every block.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from profiler.alias_outputs import outputs_aliased
from profiler.model_source import Inputs
from profiler.timing.device_rates import synchronize
from profiler.trace.metered_pass import find_loss

WARM_UP = 2


def host_launches_s(module: nn.Module, inputs: Inputs, device: torch.device, repetitions: int) -> list[float]:
    """Return, of so many passes, the seconds until each is launched, or computed by a device that is the host itself.

    Modules return what they do under a plan (`profiler.alias_outputs`).  Empty where the device has no room for the
    activations and gradients of the whole model.  Parameters have no gradients afterwards.
    """
    seconds = []
    try:
        with outputs_aliased(module):
            for _ in range(WARM_UP + repetitions):
                synchronize(device)
                began_s = time.perf_counter()
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
