"""What torch and NVML say of the GPUs that this process sees: their properties, and how they are connected.

NVML is asked through the package nvidia-ml-py; what it does not tell, as where there is no driver, is None.
"""

import ctypes
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

_KHZ, _MHZ = 1e3, 1e6


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of one GPU, or of a MIG slice."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    clock_hz: float | None
    """The highest of the multiprocessors."""
    memory_clock_hz: float | None
    memory_bus_bits: int | None


@dataclass(frozen=True, slots=True)
class Connections:
    """How the GPUs of this machine are connected."""

    from_nvml: bool
    """Whether NVML told; otherwise NVLink and PCI Express are unknown."""
    nvlinks: int = 0
    """Active links of the GPU that has the fewest, if there is a ring over NVLink alone; otherwise 0."""
    has_nvlink: bool | None = None
    """Whether any GPU has an active link, in a ring or not; None: NVML cannot tell."""
    switched: bool = False
    """Whether they lead to NVSwitch."""
    peer_access: bool = False
    """Whether every GPU can write into the memory of every other."""
    pcie_generation: int | None = None
    pcie_lanes: int | None = None


class Nvml:
    """NVIDIA's management library, where it is installed."""

    def __init__(self) -> None:
        self.library: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self.library = pynvml
        except Exception:  # No such package, no driver, or one without NVML: its errors are the package's own.
            pass

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return what a function of NVML returns; None if it cannot tell."""
        if self.library is None or any(argument is None for argument in arguments):
            return None
        try:
            return getattr(self.library, function)(*arguments)
        except (self.library.NVMLError, AttributeError):
            return None

    def constant(self, name: str) -> int | None:
        """Return a constant of NVML; None if it is not installed, or has none of the name."""
        return getattr(self.library, name, None)

    def handle(self, properties: Any) -> Any:
        """Return NVML's handle of a GPU: by its UUID, as CUDA_VISIBLE_DEVICES changes numbers."""
        uuid = getattr(properties, "uuid", None)
        return None if uuid is None else self.ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")


def any_visible() -> bool:
    """Whether torch sees a GPU.  Where there is no driver torch is not imported, which takes longer than a search."""
    if "torch" not in sys.modules and not has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def has_driver() -> bool:
    """Whether a driver of GPUs may be there."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return any(Path(device).exists() for device in ("/dev/kfd", "/dev/dxg"))  # AMD's, and of either under Windows
    return True


def visible_gpus() -> tuple[tuple[Gpu, ...], Connections]:
    """Return the GPUs that this process sees, and how they are connected."""
    import torch  # here, as commands that ask for no GPU do without it

    nvml = Nvml()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    handles = [nvml.handle(one) for one in properties]
    gpus = tuple(_gpu(*pair, nvml) for pair in zip(properties, handles, strict=True))
    return gpus, _connections(handles, nvml)


def _gpu(properties: Any, handle: Any, nvml: Nvml) -> Gpu:
    def told(name: str, unit: float, function: str, *arguments: Any, nvml_unit: float = _MHZ) -> float | None:
        value = getattr(properties, name, None)
        if value:
            return float(value) * unit
        value = nvml.ask(function, handle, *arguments)
        return float(value) * nvml_unit if value else None

    clock, memory_clock = nvml.constant("NVML_CLOCK_SM"), nvml.constant("NVML_CLOCK_MEM")
    bus_bits = told("memory_bus_width", 1, "nvmlDeviceGetMemoryBusWidth", nvml_unit=1)
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        clock_hz=told("clock_rate", _KHZ, "nvmlDeviceGetMaxClockInfo", clock),
        memory_clock_hz=told("memory_clock_rate", _KHZ, "nvmlDeviceGetMaxClockInfo", memory_clock),
        memory_bus_bits=None if bus_bits is None else int(bus_bits),
    )


def _connections(handles: list[Any], nvml: Nvml) -> Connections:
    count = len(handles)
    pairs = list(combinations(range(count), 2))
    if any(handle is None for handle in handles):
        import torch

        return Connections(False, peer_access=all(torch.cuda.can_device_access_peer(*pair) for pair in pairs))

    def status(first: int, second: int, capability: str) -> Any:
        return nvml.ask("nvmlDeviceGetP2PStatus", handles[first], handles[second], nvml.constant(capability))

    def works(first: int, second: int, capability: str) -> bool:
        found = status(first, second, capability)
        return found is not None and found == nvml.constant("NVML_P2P_STATUS_OK")

    linked = [pair for pair in pairs if works(*pair, "NVML_P2P_CAPS_INDEX_NVLINK")]
    active = [_active_links(handle, nvml) for handle in handles]
    to_switch = nvml.constant("NVML_NVLINK_DEVICE_TYPE_SWITCH")
    switched = all(links and set(links) == {to_switch} for links in active)
    # Where each GPU has NVLink to half of the GPUs or more, there is a ring (Dirac); bridges between pairs make none.
    has_ring = all(2 * sum(index in pair for pair in linked) >= count for index in range(count))
    if count == 1:
        has_ring = switched  # To GPUs that this process does not see.
    knows = any(status(*pair, "NVML_P2P_CAPS_INDEX_NVLINK") is not None for pair in pairs)
    return Connections(
        True,
        has_nvlink=bool(linked or any(active)) or (False if knows else None),
        nvlinks=min(map(len, active)) if has_ring else 0,
        switched=switched and has_ring,
        peer_access=all(works(*pair, "NVML_P2P_CAPS_INDEX_WRITE") for pair in pairs),
        pcie_generation=_least(nvml.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle) for handle in handles),
        pcie_lanes=_least(nvml.ask("nvmlDeviceGetMaxPcieLinkWidth", handle) for handle in handles),
    )


def _active_links(handle: Any, nvml: Nvml) -> list[int | None]:
    """Return what is at the other end of each active NVLink of a GPU."""
    most = nvml.constant("NVML_NVLINK_MAX_LINKS") or 0
    active = (link for link in range(most) if nvml.ask("nvmlDeviceGetNvLinkState", handle, link) == 1)
    return [nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) for link in active]


def _least(found: Any) -> int | None:
    known = [value for value in found if value]
    return min(known) if known else None
