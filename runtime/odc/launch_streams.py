"""On which streams kernels were launched: what a barrier must wait for, and what must follow what.

FSDP2 pulls and pushes on streams of its own, and a user may publish or take a gradient on another.  A barrier is a
kernel on the current stream, which orders what was launched on that one only, so that it has to wait for the others.
"""

from typing import Any, Protocol


class Stream(Protocol):
    """What is needed of `torch.cuda.Stream`."""

    def wait_stream(self, stream: Any, /) -> Any:
        """Have what is launched here later wait for what was launched there so far."""

    def synchronize(self) -> None:
        """Wait on the host until all that was launched is done."""


class LaunchStreams:
    """Streams on which something was launched since the last `join`. Streams come with the numbers that tell them."""

    def __init__(self) -> None:
        self._used: dict[int, Stream] = {}
        self._last: dict[int, tuple[int, Stream]] = {}
        """By subject, where something about it was last launched."""

    def note(self, number: int, stream: Stream) -> None:
        """Note that something is launched on a stream."""
        self._used[number] = stream

    def follow(self, subject: int, number: int, stream: Stream) -> None:
        """Have a stream wait for what was last launched about a subject, if that was on another stream."""
        before, there = self._last.get(subject, (number, stream))
        if before != number:
            stream.wait_stream(there)
        self._last[subject] = number, stream

    def join(self, number: int, current: Stream) -> None:
        """Have a stream wait for all that was launched so far, on whatever stream."""
        for other, stream in self._used.items():
            if other != number:
                current.wait_stream(stream)
        self._forget()

    def synchronize(self) -> None:
        """Wait on the host until all that was launched so far is done."""
        try:
            for stream in self._used.values():
                stream.synchronize()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._used.clear()
        self._last.clear()
