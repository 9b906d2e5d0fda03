"""How long each rank waits for the others in a step, from times that each rank takes by itself.

    computes_r = step_r - stalled_r             stalled: the step's own stream stands still for communication
    waits_r    = max over p of computes_p - computes_r

Ranks end a step together, so what a rank computes less than the slowest one it waits.  Waits that cancel each other
within a step, where one rank is slow in one layer and another in the next, are not seen; `osdp.uneven_lengths.timeline`
sees them, by the clock of one machine.  No collective is added for this, and no clocks are compared.

Stalls are seen where Python waits for the work of a process group, where the own stream of a GPU waits for another
stream, and in the barriers of `odc`.  On a CPU that is all of the communication, the transfer too; this is alike on
all ranks and falls out of the difference.  **Not run on several GPUs.**
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from osdp.uneven_lengths.step_clock import StepClock, begin
from runtime.odc.step_protocol import Exchange
from runtime.sharded_model import ShardedModel


class Stalls:
    """Where computation of a step stands still for communication."""

    def __init__(self, device: torch.device, sharded: ShardedModel) -> None:
        self._device = device
        self._transports = [
            group.transport for unit in sharded.units if isinstance(unit, Exchange) for group in unit.groups
        ]
        self._clock: StepClock | None = None
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Note the stalls of the step inside."""
        clock = self._clock = begin(self._device)
        self._spans.clear()
        with ExitStack() as patches:
            patches.enter_context(clock.noting_waits(lambda before, after: self._spans.append((before, after))))
            patches.enter_context(patch.object(dist.Work, "wait", self._noting(clock, dist.Work.wait)))
            for transport in self._transports:
                barrier = self._noting(clock, transport.barrier)
                patches.enter_context(patch.object(transport, "barrier", barrier))
            yield

    def _noting(self, clock: StepClock, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls on the own stream are noted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not clock.is_own_stream():
                return function(*args, **kwargs)
            before = clock.mark()
            try:
                return function(*args, **kwargs)
            finally:
                self._spans.append((before, clock.mark()))

        return call

    def seconds(self) -> float:
        """Return how long the last step was stalled; to be called when the device is done with it."""
        if self._clock is None:
            return 0.0
        at_s, total_s, free_s = self._clock.at_s, 0.0, 0.0
        for start_s, end_s in sorted((at_s(before), at_s(after)) for before, after in self._spans):
            total_s += max(0.0, end_s - max(start_s, free_s))  # one wait may be inside another
            free_s = max(free_s, end_s)
        return total_s


def waits(computes_s: Sequence[float]) -> tuple[float, ...]:
    """Return how long each rank waits, given how long each computes; empty for one rank, which waits for nobody."""
    return tuple(max(computes_s) - one for one in computes_s) if len(computes_s) > 1 else ()
