"""What windows need of a GPU, so that all that is above it can also be run on other memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Device(ABC):
    """One rank's GPU. Addresses are numbers, as kernels take them; `torch_device` has the tensors."""

    torch_device: torch.device
    identity: str
    """Tells it from the other GPUs of the machine; two ranks may have the same."""
    room: int
    """Blocks of 256 threads that it runs at once."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> int:
        """Return the address of new zeros that can be exported. Raises OsdpError if there is no room."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free what `allocate` gave."""

    @abstractmethod
    def export(self, address: int) -> bytes:
        """Return a handle by which another process can open what `allocate` gave."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Return where another process's memory is in this one."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Close what `open` gave."""

    @abstractmethod
    def obstacle(self, identity: str) -> str:
        """Return why kernels here cannot add into the memory of another GPU of the machine; empty if they can."""

    @abstractmethod
    def launch(self, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[int]) -> None:
        """Launch a kernel of `runtime.odc.kernels.SOURCES` on the current stream.

        All arguments are 8 bytes wide: addresses and sizes.
        """

    @abstractmethod
    def join(self) -> None:
        """Have the current stream wait for all that was launched so far, on whatever stream."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until all that was launched is done."""
