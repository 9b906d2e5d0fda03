"""A GPU as CuPy drives it: memory outside of PyTorch's pool, CUDA IPC, and the kernels of `cuda/`.

CuPy is an extra of osdp and is imported when a device is made.  Its calls were read and run, as far as they go
without a GPU, in CuPy 14.2.

Compiled kernels are cached by CuPy itself, in `~/.cupy/kernel_cache` or `CUPY_CACHE_DIR`: under a hash of the
source, the options, the architecture and the versions of CuPy and of the compiler, written to a temporary
file and renamed, with a hash of the contents that a damaged file does not pass.  `CUPY_CACHE_IN_MEMORY=1` does
without the folder.  CuPy adds `-ftz=true`: in sums, subnormal numbers count as zero, as in `red` anyway.

Allocations are whole multiples of 2 MiB.  Smaller ones the driver cuts out of common blocks, which
would be exported whole, from their start (CUDA C++ Programming Guide, interprocess communication).
"""

import ctypes
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from profiler.byte_sizes import format_bytes
from profiler.errors import OsdpError, first_line, install_advice
from runtime.odc.kernels import BLOCKS_AT_ONCE, SOURCES, source_of
from runtime.odc.launch_streams import LaunchStreams

BLOCK_BYTES = 2 << 20
"""What is exported is a multiple of it."""
OPTIONS = ("--std=c++17",)
NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of cuda.h; CuPy has no call for it."""


class CupyDevice:
    """One rank's GPU: PyTorch's current one when it is made. Addresses are numbers, as kernels take them.

    It is all that windows need of a GPU, so that tests can run what is above it on other memory.
    """

    def __init__(self) -> None:
        """Load CuPy and compile the kernels. Raises OsdpError, saying why, if that cannot be."""
        self._cupy = load_cupy()
        if not torch.cuda.is_available():
            raise OsdpError("PyTorch finds no GPU")
        index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self._streams = LaunchStreams()
        self._faces: dict[int, Any] = {}
        """CuPy's faces of streams, by handle."""
        try:
            # Tells it from the other GPUs of the machine; two ranks may have the same.
            self.identity: str = self._cupy.cuda.runtime.deviceGetPCIBusId(index)
            with self._here():
                modules = {
                    file: self._cupy.RawModule(code=source_of(file), options=OPTIONS) for file in set(SOURCES.values())
                }
                self._kernels = {kernel: modules[file].get_function(kernel) for kernel, file in SOURCES.items()}
        except Exception as error:
            advice = "install a CuPy for this driver; set CUPY_CACHE_DIR if its cache folder cannot be written"
            raise OsdpError("CuPy cannot compile and load the kernels", got=first_line(error), advice=advice) from error
        properties = torch.cuda.get_device_properties(index)
        self.room = BLOCKS_AT_ONCE * properties.multi_processor_count
        """Blocks of 256 threads that it runs at once."""

    def _here(self) -> Any:
        return self._cupy.cuda.Device(self.torch_device.index)

    @property
    def _runtime(self) -> Any:
        return self._cupy.cuda.runtime

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new zeros that can be exported. Raises OsdpError if there is no room."""
        size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        with self._here():
            address = self._malloc(size_bytes)
            self._runtime.memset(address, 0, size_bytes)
            self._runtime.deviceSynchronize()
        return address

    def _malloc(self, size_bytes: int) -> int:
        failure: type[Exception] = self._runtime.CUDARuntimeError
        with suppress(failure):
            return int(self._runtime.malloc(size_bytes))
        torch.cuda.empty_cache()  # what its caching allocator holds
        try:
            return int(self._runtime.malloc(size_bytes))
        except failure as error:
            free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
            what, got = "the GPU has too little free memory for the windows of odc", f"{format_bytes(free_bytes)} free"
            advice = "plan with a smaller memory limit, or another strategy"
            raise OsdpError(what, got=got, expected=format_bytes(size_bytes), advice=advice) from error

    def free(self, address: int) -> None:
        """Free what `allocate` gave."""
        with suppress(self._runtime.CUDARuntimeError), self._here():  # after a fault the driver frees all
            self._runtime.free(address)

    def tensor(self, address: int, numel: int) -> torch.Tensor:
        """Return fp32 memory that `allocate` gave, from an address in it on, as a tensor (numel,) of PyTorch's."""
        cuda = self._cupy.cuda
        memory = cuda.MemoryPointer(cuda.UnownedMemory(address, 4 * numel, self), 0)
        return torch.as_tensor(self._cupy.ndarray((numel,), "float32", memory), device=self.torch_device)

    def export(self, address: int) -> bytes:
        """Return a handle by which another process can open what `allocate` gave."""
        with self._here():
            return bytes(self._runtime.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        """Return where another process's memory is in this one."""
        with self._here():
            return int(self._runtime.ipcOpenMemHandle(handle))

    def close(self, address: int) -> None:
        """Close what `open` gave."""
        with suppress(self._runtime.CUDARuntimeError), self._here():
            self._runtime.ipcCloseMemHandle(address)

    def obstacle(self, identity: str, needs_atomics: bool) -> str:
        """Return why kernels here cannot add into the memory of another GPU of the machine; empty if none is known.

        Of a GPU that this process does not see, as where Slurm shows each rank its own, nothing can be asked; CUDA IPC
        may reach it.
        """
        if identity == self.identity:
            return ""
        try:
            other = self._runtime.deviceGetByPCIBusId(identity)
        except self._runtime.CUDARuntimeError:
            return ""
        here = self.torch_device.index
        if not self._runtime.deviceCanAccessPeer(here, other):
            return f"has no peer access from GPU {self.identity} to {identity}"
        if needs_atomics and not native_atomics(here, other):
            return f"has no native atomics from GPU {self.identity} on {identity} (NVLink has; odc_ordered needs none)"
        return ""

    def launch(
        self, kernel: str, grid: tuple[int, int], threads: int, arguments: tuple[int, ...], subject: int | None = None
    ) -> None:
        """Launch a kernel of `runtime.odc.kernels.SOURCES` on the current stream; all arguments are 8 bytes wide.

        It runs after what was launched before about the same subject, on whatever stream.
        """
        stream = self._current_stream(subject)
        with self._here(), self._on(stream):
            self._kernels[kernel](grid, (threads,), _words(arguments))

    def copy(self, source: int, target: int, size_bytes: int) -> None:
        """Copy memory, of this GPU or of one that was opened, on the current stream and by a copy engine."""
        stream = self._current_stream(None)
        runtime = self._runtime
        with self._here():
            runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDefault, stream.cuda_stream)

    def _current_stream(self, subject: int | None) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self.torch_device)
        self._streams.note(stream.cuda_stream, stream)
        if subject is not None:
            self._streams.follow(subject, stream.cuda_stream, stream)
        return stream

    def _on(self, stream: torch.cuda.Stream) -> Any:
        """Return CuPy's face of a stream: by the protocol that CuPy 14 and torch 2.13 have, or by its handle."""
        face = self._faces.get(stream.cuda_stream)
        if face is None:
            streams = self._cupy.cuda
            if hasattr(streams.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
                face = streams.Stream.from_external(stream)
            else:
                face = streams.ExternalStream(stream.cuda_stream, self.torch_device.index)
            self._faces[stream.cuda_stream] = face
        return face

    def join(self) -> None:
        """Have the current stream wait for all that was launched so far, on whatever stream."""
        current = torch.cuda.current_stream(self.torch_device)
        self._streams.join(current.cuda_stream, current)

    def synchronise(self) -> None:
        """Wait until all that was launched is done."""
        # After a fault every call fails, with an error that was raised already.
        with suppress(RuntimeError):
            self._streams.synchronize()


@lru_cache(maxsize=1 << 14)
def _words(arguments: tuple[int, ...]) -> tuple[np.uint64, ...]:
    """Return arguments as kernels take them. A model's launches have the same ones step after step."""
    return tuple(map(np.uint64, arguments))


@lru_cache(maxsize=1)
def load_cupy() -> Any:
    """Return CuPy, which has no types. Raises OsdpError if it is not there or does not load."""
    try:
        return import_module("cupy")
    except ImportError as error:
        advice = f"{install_advice('cuda13')}, or cuda12"
        raise OsdpError("CuPy cannot be loaded", got=first_line(error), advice=advice) from error


def native_atomics(here: int, other: int) -> bool:
    """Whether kernels on one GPU, by its number, may add atomically into the memory of another."""
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    devices = []
    for number in (here, other):
        driver.cuDeviceGet(ctypes.byref(value), number)
        devices.append(value.value)
    return driver.cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, *devices) == 0 and value.value == 1
