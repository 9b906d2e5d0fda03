"""Records what training steps allocate and free, in order, with the stream that is current.

A dry run computes nothing, but FSDP2 selects its streams all the same: on the CPU they are `torch.cpu.Stream`s, which
do nothing and are told apart.  So all-gather outputs and reduce-scatter outputs are seen on the streams on which FSDP2
allocates them on GPUs, where memory of one stream is not another's.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runtime.observe.live_bytes import ACTIVATIONS
from runtime.observe.part_peaks import PartPeaks

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm"})
"""Operators of aten that call cuBLAS."""


class Resize(NamedTuple):
    """A storage has another size from now on; what it had is freed."""

    storage: int
    """Number of the storage."""
    size_bytes: int
    """On the device, rounded to 512; 0: it is freed."""
    stream: int
    """Number of the current stream; 0 is the one that computes."""
    phase: str
    """`LiveBytes.phase`."""


@dataclass(frozen=True)
class AllocationTrace:
    """What one rank allocates and frees in training steps."""

    resident: tuple[Resize, ...]
    """What lives when the first step begins, parameters above all, in the order in which it was made."""
    steps: tuple[tuple[Resize, ...], ...]
    """By step; the first makes the optimizer's states."""
    is_steady: bool
    """Whether the last step leaves the very storages that it found, so that it can follow itself."""
    products: tuple[int, ...] = ()
    """Of forward and of backward, how many events of the first step there are when the first matrix product has its
    output: each runs in a thread of its own, for which cuBLAS makes a workspace then, and keeps it."""


class AllocationRecorder(PartPeaks):  # type: ignore[no-untyped-call]
    """Live bytes whose changes are remembered, from the first `begin_step` on."""

    def __init__(self) -> None:
        super().__init__(ACTIVATIONS)
        self._streams: list[Any] = [torch.cpu.current_stream()]
        self._allocated: dict[int, Resize] = {}
        self._starts: list[dict[int, Resize]] = []
        self._steps: list[list[Resize]] = []
        self._products: dict[str, int] = {}

    def resized(self, number: int, size_bytes: int) -> None:
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        event = Resize(number, size_bytes, self._streams.index(stream), self.phase)
        self._allocated.pop(number, None)
        if size_bytes:
            self._allocated[number] = event
        if self._steps:
            self._steps[-1].append(event)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # Only the first product of a phase is of interest.
        if len(self._steps) == 1 and self.phase not in self._products and func.__name__.partition(".")[0] in PRODUCTS:
            self._products[self.phase] = len(self._steps[0])
        return out

    def begin_step(self) -> None:
        """Start the next step's record."""
        self.parts.clear()
        self._starts.append(dict(self._allocated))
        self._steps.append([])

    def trace(self) -> AllocationTrace:
        """Return what was recorded; to be called at the end of a step."""
        steps = tuple(tuple(step) for step in self._steps)
        is_steady = self._starts[-1].keys() == self._allocated.keys()
        return AllocationTrace(tuple(self._starts[0].values()), steps, is_steady, tuple(self._products.values()))
