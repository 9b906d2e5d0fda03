"""Inputs of recomputed blocks in the host's memory, from their forward to when that runs again.

    block              forward of i     ...     backward of i+1        backward of i
    copies             x_i to the host          x_i to the device      (x_(i-1) to the device)

The input of a block leaves while its forward runs, and the device lets go of it when that is over.  It comes back while
the backward of the block above does its work, if that block has an input as large that was offloaded, in whose room it
is priced (`planner.cost.stage_costs`), and else when it is needed.  Copies have streams of their own, in pinned memory;
what computes waits for them on the device, and the host for nothing.  On CPU ranks, where both are one memory, they are
made at once.

Why not `torch.autograd.graph.save_on_cpu`: it copies on the stream that computes, and knows of no next block.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from profiler.errors import OsdpError
from profiler.offloaded_input import offloaded_argument


def empty_on_host(like: Tensor) -> Tensor:
    """Return host memory for a copy of a tensor; what tracks the memory of CPU ranks replaces it."""
    return torch.empty_like(like, device="cpu", pin_memory=like.device.type == "cuda", requires_grad=False)


class CopyStreams:
    """Streams for copies in both directions, beside what a device computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def copy(self, target: Tensor, source: Tensor, *, leaves: bool) -> Callable[[], None]:
        """Copy one tensor to another, to the host if it `leaves` the device; return what waits for it on the stream
        that computes then.
        """
        if not self._streams:
            target.copy_(source)
            return lambda: None
        stream = self._streams[not leaves]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            target.copy_(source, non_blocking=True)
            copied = stream.record_event()
        return lambda: torch.accelerator.current_stream(self._device).wait_event(copied)


class OffloadedInput:
    """The input of one run of a block's forward."""

    def __init__(self, tensor: Tensor, place: int | str, streams: CopyStreams, below: "OffloadedInput | None") -> None:
        """`place` is the argument's position or name, `below` that of the block whose backward follows."""
        self._place, self._streams, self._version = place, streams, tensor._version
        self._below = None if below is None else weakref.ref(below)
        self._device = tensor.device
        self._tensor: Tensor | None = tensor
        self._returned: Callable[[], None] | None = None
        self._host = empty_on_host(tensor)
        self._left = streams.copy(self._host, tensor.detach(), leaves=True)

    def __del__(self) -> None:
        """Let what computes wait for a copy that nothing waited for, as after an error: it may get that memory next."""
        with suppress(Exception):  # the interpreter may be about to end
            if self._returned is not None:
                self._returned()

    def without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with None in its place."""
        return self._with(None, args, kwargs)

    def into(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that takes those: the first time with the input as it came, then with a copy of the host's
        that needs a gradient.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._with(self._present(), args, kwargs)
            return forward(*args, **kwargs)

        return run

    def let_go(self, block: str) -> None:
        """Let go of the input, as the block's forward is over; raise OsdpError if that has changed it."""
        self._left()
        if self._tensor is not None and self._tensor._version != self._version:
            what = f"the input of block {block} cannot be offloaded: its forward changes it in place"
            raise OsdpError(what, advice=f"plan with the pin {block}=keep")
        self._tensor = None

    def _fetch(self) -> None:
        """Begin to copy it back, unless that was begun."""
        if self._returned is None:
            # Of memory that the computing stream has by now: the copy waits for what that does before.
            self._tensor = torch.empty_like(self._host, device=self._device)
            self._returned = self._streams.copy(self._tensor, self._host, leaves=False)

    def _present(self) -> Tensor:
        if self._tensor is not None and self._returned is None:
            return self._tensor
        self._fetch()
        assert self._tensor is not None
        assert self._returned is not None
        self._returned()
        tensor, self._tensor, self._returned = self._tensor, None, None  # it lives as long as what runs again needs it
        below = None if self._below is None else self._below()
        if below is not None and below._host.nbytes <= self._host.nbytes:
            below._fetch()
        return tensor.requires_grad_()

    def _with(
        self, tensor: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self._place, int):
            return (*args[: self._place], tensor, *args[self._place + 1 :]), kwargs
        return args, {**kwargs, self._place: tensor}


class Offloading:
    """Offloads the inputs of the blocks of a model."""

    def __init__(self, device: torch.device, below: Mapping[str, str | None]) -> None:
        """`below` gives, for each block, the one whose input comes back while its own backward runs."""
        self._below = below
        self._streams = CopyStreams(device if below else torch.device("cpu"))
        self._last = weakref.WeakValueDictionary[str, OffloadedInput]()

    def offload(self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OffloadedInput | None:
        """Begin to copy a block's input to the host; None if it is not to be, or, with a warning, needs no gradient."""
        if block not in self._below:
            return None
        place = offloaded_argument(args, kwargs)
        if place is None:
            what = f"block {block} is handed no tensor that needs a gradient: its input, planned to be offloaded, stays"
            warnings.warn(what, stacklevel=2)
            return None
        tensor = args[place] if isinstance(place, int) else kwargs[place]
        below = self._last.get(self._below[block] or "")
        found = self._last[block] = OffloadedInput(tensor, place, self._streams, below)
        return found
