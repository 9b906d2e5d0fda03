"""A GPU that is no GPU: the kernels of `cuda/` on CPU threads, and memory that other processes can map."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from host_kernels import build

from profiler.errors import OsdpError
from runtime.odc.cupy_device import CupyDevice
from runtime.odc.kernels import SOURCES

HARNESS = """
#include "cuda_host_shim.h"
{includes}
#include <map>
#include <string>
#include <utility>

using Words = const Word*;
template <typename... Arguments, std::size_t... I>
void start(void (*kernel)(Arguments...), dim3 grid, dim3 block, Words words, std::index_sequence<I...>) {{
    launch(grid, block, [&] {{ kernel((Arguments)words[I]...); }});
}}

// Returns how many arguments the kernel takes; it runs only if that is how many there are.
template <typename... Arguments>
Word call(void (*kernel)(Arguments...), dim3 grid, dim3 block, Words words, Word number) {{
    if (number == sizeof...(Arguments))
        start(kernel, grid, block, words, std::index_sequence_for<Arguments...>());
    return sizeof...(Arguments);
}}

extern "C" Word run(const char* name, unsigned x, unsigned y, unsigned threads, Words words, Word number) {{
    const std::string kernel = name;
    const dim3 grid{{x, y, 1}}, block{{threads, 1, 1}};
    {calls}
    return ~0ull;
}}
"""
FOLDER = Path("/dev/shm")


def build_kernels(folder: Path) -> Path:
    """Compile all kernels for the CPU; return the library. Skips the test where there is no compiler."""
    includes = "\n".join(f'#include "{file}"' for file in sorted(set(SOURCES.values())))
    calls = "\n    ".join(
        f'if (kernel == "{name}") return call({name}, grid, block, words, number);' for name in SOURCES
    )
    build(folder, HARNESS.format(includes=includes, calls=calls))
    return folder / "harness.so"


class HostDevice:
    """Memory in /dev/shm under a name of the test's, so that what is left behind can be seen."""

    torch_device = torch.device("cpu")
    room = 16
    most = (2, 4)
    """Blocks along either side and threads of each: every number is right, and threads of a CPU are dear."""

    def __init__(self, library: Path, prefix: str, identity: str = "gpu 0", refuses: str = "") -> None:
        self.identity, self._refuses, self._prefix = identity, refuses, prefix
        self._library = ctypes.CDLL(str(library))
        self._library.run.restype = ctypes.c_ulonglong
        self._maps: dict[int, tuple[mmap.mmap, Path]] = {}
        self.launched: Counter[str] = Counter()
        self.frees = 0
        """How often memory was freed."""

    def _map(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR)
        mapped = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._maps[address] = mapped, path
        return address

    def allocate(self, size_bytes: int) -> int:
        path = FOLDER / f"{self._prefix}-{os.getpid()}-{time.monotonic_ns()}"
        path.write_bytes(bytes(size_bytes))
        return self._map(path)

    def free(self, address: int) -> None:
        _, path = self._maps.pop(address)
        path.unlink()
        self.frees += 1

    def export(self, address: int) -> bytes:
        return str(self._maps[address][1]).encode()

    def open(self, handle: bytes) -> int:
        if self._refuses == "open":
            raise RuntimeError("invalid device context")
        return self._map(Path(handle.decode()))

    def close(self, address: int) -> None:
        del self._maps[address]

    def itself(self) -> HostDevice:
        """Return the device, to whom asks for one."""
        return self

    @property
    def opened(self) -> int:
        """What is allocated or open."""
        return len(self._maps)

    def obstacle(self, identity: str, needs_atomics: bool) -> str:
        return "" if identity == self.identity or self._refuses != "peers" else f"cannot reach {identity}"

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[int]) -> None:
        assert min(*grid, threads) > 0
        assert max(grid[1], 1) <= 65535
        words = (ctypes.c_ulonglong * len(arguments))(*arguments)
        x, y = (min(blocks, self.most[0]) for blocks in grid)
        taken = self._library.run(
            kernel.encode(), x, y, min(threads, self.most[1]), words, ctypes.c_ulonglong(len(arguments))
        )
        assert taken == len(arguments), f"{kernel} takes {taken} arguments, got {len(arguments)}"
        self.launched[kernel] += 1
        if self._refuses == kernel:
            raise RuntimeError("an illegal memory access was encountered")

    def join(self) -> None:
        """Launches are done when they return."""

    def synchronise(self) -> None:
        """Launches are done when they return."""


def no_device(*_: object) -> CupyDevice:
    """Find no GPU."""
    raise OsdpError("CuPy cannot be loaded", got="No module named 'cupy'", advice="pip install")
