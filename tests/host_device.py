"""A GPU that is no GPU: the kernels of `cuda/` on CPU threads, streams, and memory that other processes can map.

On the default stream a kernel is done when its launch returns, as PyTorch's operations on the CPU are, which stand for
those of a GPU's default stream.  On other streams (`HostStream`) kernels run later, each after a random delay.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from random import Random

import torch
import torch.distributed as dist
from host_kernels import build

from profiler.errors import OsdpError
from runtime.odc.cupy_device import CupyDevice
from runtime.odc.gpu_windows import DeviceTransport
from runtime.odc.kernels import SOURCES
from runtime.odc.launch_streams import LaunchStreams
from runtime.odc.windows import WindowSpec

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
ONE = (WindowSpec("a", 300, torch.float32),)


def build_kernels(folder: Path) -> Path:
    """Compile all kernels for the CPU; return the library. Skips the test where there is no compiler."""
    includes = "\n".join(f'#include "{file}"' for file in sorted(set(SOURCES.values())))
    calls = "\n    ".join(
        f'if (kernel == "{name}") return call({name}, grid, block, words, number);' for name in SOURCES
    )
    build(folder, HARNESS.format(includes=includes, calls=calls))
    return folder / "harness.so"


class DefaultStream:
    """What is launched runs at once."""

    def run(self, work: Callable[[], None]) -> None:
        """Launch work."""
        work()

    def wait_stream(self, stream: HostStream) -> None:
        """Wait until what was launched on another stream so far is done."""
        stream.synchronize()

    def synchronize(self) -> None:
        """All is done."""


class HostStream:
    """Work runs one after the other in a thread, each piece after a random delay."""

    def __init__(self, seed: int, longest_delay_s: float = 2e-3) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._delays, self._longest_delay_s = Random(seed), longest_delay_s
        threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        while True:
            self._work.get()()

    def run(self, work: Callable[[], None]) -> None:
        """Launch work; returns at once."""
        delay_s = self._delays.random() * self._longest_delay_s
        self._work.put(lambda: time.sleep(delay_s))
        self._work.put(work)

    def _record(self) -> threading.Event:
        done = threading.Event()
        self._work.put(done.set)
        return done

    def wait_stream(self, stream: DefaultStream | HostStream) -> None:
        """Have later work wait for what was launched on another stream so far."""
        if isinstance(stream, HostStream):
            done = stream._record()
            self._work.put(lambda: bool(done.wait()) and None)

    def synchronize(self) -> None:
        """Wait until all that was launched is done."""
        self._record().wait()


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
        self._default: DefaultStream | HostStream = DefaultStream()
        self._current = self._default
        self._streams = LaunchStreams()
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

    def tensor(self, address: int, numel: int) -> torch.Tensor:
        """Return memory as a tensor, which the default stream's operations find as all streams have left it."""
        return torch.frombuffer((ctypes.c_float * numel).from_address(address), dtype=torch.float32)

    def itself(self) -> HostDevice:
        """Return the device, to whom asks for one."""
        return self

    @property
    def opened(self) -> int:
        """What is allocated or open."""
        return len(self._maps)

    def obstacle(self, identity: str, needs_atomics: bool) -> str:
        return "" if identity == self.identity or self._refuses != "peers" else f"cannot reach {identity}"

    @contextmanager
    def on(self, stream: HostStream) -> Iterator[None]:
        """Launch on a stream in place of the default one, as `torch.cuda.stream` does."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def _run(self, subject: int | None, work: Callable[[], None]) -> None:
        stream = self._current
        self._streams.note(id(stream), stream)
        if subject is not None:
            self._streams.follow(subject, id(stream), stream)
        stream.run(work)

    def launch(
        self, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[int], subject: int | None = None
    ) -> None:
        assert min(*grid, threads) > 0
        assert max(grid[1], 1) <= 65535
        words = (ctypes.c_ulonglong * len(arguments))(*arguments)
        x, y = (min(blocks, self.most[0]) for blocks in grid)
        name, number = kernel.encode(), ctypes.c_ulonglong(len(arguments))

        def work() -> None:
            taken = self._library.run(name, x, y, min(threads, self.most[1]), words, number)
            assert taken == len(arguments), f"{kernel} takes {taken} arguments, got {len(arguments)}"

        self._run(subject, work)
        self.launched[kernel] += 1
        if self._refuses == kernel:
            raise RuntimeError("an illegal memory access was encountered")

    def copy(self, source: int, target: int, size_bytes: int) -> None:
        self._run(None, lambda: ctypes.memmove(target, source, size_bytes) and None)
        self.launched["copy"] += 1

    def join(self) -> None:
        """Have the current stream wait for all others."""
        self._streams.join(id(self._current), self._current)

    def synchronise(self) -> None:
        """Wait until all that was launched is done."""
        self._streams.synchronize()


def open_windows(
    device: HostDevice, specs: tuple[WindowSpec, ...] = ONE, timeout_s: float = 60.0, ordered: bool = False
) -> DeviceTransport:
    """Open windows over all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return DeviceTransport(group, specs, device, timeout_s, ordered)


def no_device(*_: object) -> CupyDevice:
    """Find no GPU."""
    raise OsdpError("CuPy cannot be loaded", got="No module named 'cupy'", advice="pip install")
