"""CUDA sources in tests: NVRTC from pip, and kernels on CPU threads through the host shim."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
CUDA = CHECKOUT / "cuda"
Array = np.ndarray[Any, Any]


class Nvrtc:
    """NVIDIA's runtime compiler, which needs neither a GPU nor a driver to compile."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def check(self, status: int) -> None:
        """Raise RuntimeError with NVRTC's words for a status that is not 0."""
        if status:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(self.library.nvrtcGetErrorString(status).decode())

    def text(self, program: ctypes.c_void_p, what: str) -> bytes:
        """Return one of a program's results: `ProgramLog`, `PTX` or `CUBIN`."""
        size = ctypes.c_size_t()
        self.check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def compile(self, source: str, architecture: str) -> tuple[str, bytes]:
        """Return PTX and machine code for an architecture such as `sm_90`.

        Raises RuntimeError with the compiler's log.
        """
        program = ctypes.c_void_p()
        create = self.library.nvrtcCreateProgram
        self.check(create(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
        if self.library.nvrtcCompileProgram(program, len(options), options):
            raise RuntimeError(self.text(program, "ProgramLog").decode())
        ptx, cubin = self.text(program, "PTX").decode(), self.text(program, "CUBIN")
        self.check(self.library.nvrtcDestroyProgram(ctypes.byref(program)))
        return ptx, cubin


def find_nvrtc() -> Nvrtc:
    """Return pip's NVRTC, or skip the test."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for library in sorted(Path(folder).glob("*/lib/libnvrtc.so.1[3-9]")):
            return Nvrtc(library)
    pytest.skip("pip's nvidia-cuda-nvrtc, of CUDA 13 or later, is not installed (it is in the extra `test`)")


class Counters(ctypes.Structure):
    """What kernels did since the last look; the shim's `Counters`."""

    _fields_ = tuple(
        (name, ctypes.c_ulonglong)
        for name in ("stored_bytes", "vector_stores", "misaligned", "wide_stores", "adds", "vector_adds")
    )


def take_counters(library: ctypes.CDLL) -> Counters:
    """Return the counts and begin again at 0."""
    counters = Counters()
    library.take_counters(ctypes.byref(counters))
    return counters


def build(folder: Path, harness: str) -> ctypes.CDLL:
    """Compile a harness, which includes the shim and sources of cuda/, for this machine's CPU.

    Skips the test where there is no compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source, library = folder / "harness.cpp", folder / "harness.so"
    source.write_text(harness)
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    includes = [f"-I{CHECKOUT / 'tests' / 'unit'}", f"-I{CUDA}"]
    command = [compiler, *options, *includes, str(source), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(library))


def touched(library: ctypes.CDLL, room: int = 1 << 16) -> list[int]:
    """Return the addresses of peers' memory touched since `library.remember(None, 0)`, in order."""
    places = (ctypes.c_ulonglong * room)()
    library.remember.restype = ctypes.c_ulonglong
    number = library.remember(places, ctypes.c_ulonglong(room))
    assert number <= room
    return list(places[:number])


def aligned(count: int, dtype: Any, skip: int) -> Array:
    """Return `count` zeros that begin `skip` elements after a 64-byte boundary."""
    item = np.dtype(dtype).itemsize
    memory = np.zeros((count + skip) * item + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + skip * item
    return memory[start : start + count * item].view(dtype)


def address(array: Array) -> ctypes.c_void_p:
    """Return where an array's first element is; what is returned keeps the array alive."""
    return array.ctypes.data_as(ctypes.c_void_p)


def addresses(arrays: Sequence[Array]) -> Array:
    """Return a table of the arrays' addresses, as kernels take it."""
    return np.array([array.ctypes.data for array in arrays], dtype=np.uint64)
