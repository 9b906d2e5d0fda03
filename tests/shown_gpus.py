"""GPUs that torch and NVML seem to see: fakes of their properties and of the module pynvml."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from profiler.byte_sizes import GIB


class Shown:
    """What `torch.cuda.get_device_properties` returns; a clock or bus of None is a property that torch has not."""

    def __init__(
        self,
        name: str,
        capability: tuple[int, int],
        memory_gib: float,
        multiprocessors: int,
        clock_mhz: int | None = 1500,
        memory_clock_mhz: int | None = 7000,
        bus_bits: int | None = 256,
    ) -> None:
        self.name, (self.major, self.minor) = name, capability
        self.total_memory, self.multi_processor_count = int(memory_gib * GIB), multiprocessors
        for key, value in (
            ("clock_rate", clock_mhz and 1000 * clock_mhz),
            ("memory_clock_rate", memory_clock_mhz and 1000 * memory_clock_mhz),
            ("memory_bus_width", bus_bits),
        ):
            if value is not None:
                setattr(self, key, value)
        self.uuid = ""


class NVMLError(Exception):
    """As pynvml raises it."""


@dataclass
class Nvml:
    """A machine as NVML describes it."""

    nvlinks: int = 0
    """Active ones of each GPU."""
    pairs: frozenset[frozenset[int]] | None = frozenset()
    """That NVLink connects; None: all."""
    to_switch: bool = False
    peers: bool = True
    generation: int = 4
    lanes: int = 16
    unsupported: tuple[str, ...] = ()
    """Functions that raise."""
    clocks_mhz: dict[int, int] = field(default_factory=lambda: {1: 1600, 2: 8000})

    def module(self, uuids: Sequence[str]) -> ModuleType:
        """Return the module pynvml of this machine."""
        found: Any = ModuleType("pynvml")
        found.NVMLError = NVMLError
        found.NVML_NVLINK_MAX_LINKS, found.NVML_NVLINK_DEVICE_TYPE_SWITCH = 18, 2
        found.NVML_P2P_CAPS_INDEX_READ = (0,)  # as it is in nvidia-ml-py, so that nobody uses it
        found.NVML_P2P_CAPS_INDEX_WRITE, found.NVML_P2P_CAPS_INDEX_NVLINK, found.NVML_P2P_STATUS_OK = 1, 2, 0
        found.NVML_CLOCK_SM, found.NVML_CLOCK_MEM = 1, 2

        def handle(uuid: str) -> int:
            if uuid not in uuids:
                raise NVMLError("not found")
            return uuids.index(uuid)

        def link_state(gpu: int, link: int) -> int:
            if link >= self.nvlinks:
                raise NVMLError("not supported")
            return 1

        def p2p_status(first: int, second: int, capability: int) -> int:
            linked = self.pairs is None or frozenset((first, second)) in self.pairs
            return 0 if (linked if capability == 2 else self.peers) else 5

        functions = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": handle,
            "nvmlDeviceGetNvLinkState": link_state,
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: 2 if self.to_switch else 0,
            "nvmlDeviceGetP2PStatus": p2p_status,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: self.generation,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: self.lanes,
            "nvmlDeviceGetMaxClockInfo": lambda gpu, which: self.clocks_mhz[which],
            "nvmlDeviceGetMemoryBusWidth": lambda gpu: 320,
        }

        def fails(*_: object) -> None:
            raise NVMLError("not supported")

        for name, function in functions.items():
            setattr(found, name, fails if name in self.unsupported else function)
        return found


def show_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: Sequence[Shown], nvml: Nvml | None = None, peers: bool = False
) -> None:
    """Let torch see these GPUs, and NVML too, unless it is None; `peers`: what CUDA says of peer access."""
    uuids = [f"GPU-{index}" for index in range(len(gpus))]
    shown = [copy(gpu) for gpu in gpus]  # the same may be given several times
    for index, gpu in enumerate(shown):
        gpu.uuid = str(index)
    # None in sys.modules is a package that cannot be imported.
    monkeypatch.setitem(sys.modules, "pynvml", None if nvml is None else nvml.module(uuids))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: gpus[index].name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: shown[index])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: peers)
