"""When something in a step happens on a rank's device, by the clock that all processes of the machine share.

A GPU runs behind the calls that enqueue its work, so a moment there is an event in the stream where the work goes.
The step begins with the device idle and both clocks read; afterwards an event is as much later as the device says:

    moment = host's clock at the begin + elapsed time from the first event to this one

What a step computes goes to its own stream, on which it was begun.  Communication beside it, on other streams, costs
time only where the own stream waits for it.  On a CPU there is one stream, and the host's clock.  **Not run on a GPU.**
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol
from unittest.mock import patch

import torch

from profiler.timing.device_queue import CudaQueue
from profiler.timing.device_rates import synchronize

Note = Callable[[Any, Any], None]
"""Takes the marks around a wait."""


class StepClock(Protocol):
    """Marks moments of a step, which is begun when it is made."""

    def mark(self) -> Any:
        """Mark when the current stream comes to what is enqueued next."""

    def at_s(self, mark: Any) -> float:
        """Return when that was, by the machine's clock; waits for the device."""

    def is_own_stream(self) -> bool:
        """Whether the current stream is the step's own."""

    def noting_waits(self, note: Note) -> AbstractContextManager[object]:
        """Call `note` for every wait of the own stream for another inside."""


class HostStepClock:
    """Of a CPU rank."""

    def mark(self) -> float:
        return time.monotonic()

    def at_s(self, mark: float) -> float:
        return mark

    def is_own_stream(self) -> bool:
        return True

    def noting_waits(self, note: Note) -> AbstractContextManager[object]:
        return nullcontext()


class CudaStepClock:
    """Of a rank on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._queue = device, CudaQueue(device)
        self._own = torch.cuda.current_stream(device)
        synchronize(device)
        self._begun_s, self._begun = time.monotonic(), self._queue.mark()

    def mark(self) -> torch.cuda.Event:
        return self._queue.mark()

    def at_s(self, mark: torch.cuda.Event) -> float:
        return self._begun_s + self._queue.seconds(self._begun, mark)

    def is_own_stream(self) -> bool:
        return torch.cuda.current_stream(self._device) == self._own

    @contextmanager
    def noting_waits(self, note: Note) -> Iterator[None]:
        wait = torch.cuda.Stream.wait_event  # `wait_stream` calls it too

        def wait_event(stream: torch.cuda.Stream, event: Any) -> None:
            if stream != self._own:
                wait(stream, event)
                return
            with torch.cuda.stream(stream):
                before = self.mark()
                wait(stream, event)
                note(before, self.mark())

        with patch.object(torch.cuda.Stream, "wait_event", wait_event):
            yield


def begin(device: torch.device) -> StepClock:
    """Return the clock of a step that begins now."""
    return CudaStepClock(device) if device.type == "cuda" else HostStepClock()
