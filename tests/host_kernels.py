"""CUDA sources in tests: NVRTC from pip, and kernels on CPU threads through the host shim."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import replace_whole, run_file

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


def registers(cubin: bytes) -> dict[str, tuple[int, int]]:
    """Return the registers of a thread of each kernel, and the bytes for which it has none (its stack frame).

    Read from the section `.nv.info` of the ELF file: attributes of 8 bytes, 0x2f for registers and 0x11 for the frame,
    each of a symbol.
    """
    table, size, number, names = (*struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<HHH", cubin, 0x3A))
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + size * index) for index in range(number)]

    def text(strings: int, at: int) -> str:
        start = sections[strings][4] + at
        return cubin[start : cubin.index(b"\0", start)].decode()

    named = {text(names, section[0]): section for section in sections}
    symbols, info = named[".symtab"], named[".nv.info"]
    found: dict[str, dict[int, int]] = {}
    at = info[4]
    while at < info[4] + info[5]:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if form == 4 and attribute in (0x2F, 0x11):
            symbol, value = struct.unpack_from("<II", cubin, at + 4)
            name = text(symbols[6], struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)[0])
            found.setdefault(name, {})[attribute] = value
        at += 4 + (length if form == 4 else 0)
    return {name: (values[0x2F], values.get(0x11, 0)) for name, values in found.items() if 0x2F in values}


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

    In a test run the first that asks compiles it; each has a copy, whose variables are its own.  Skips the test where
    there is no compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source, library = folder / "harness.cpp", folder / "harness.so"
    kept = run_file(f"harness-{sha256(harness.encode()).hexdigest()}")
    if kept is not None and kept.exists():
        shutil.copy(kept, library)
        return ctypes.CDLL(str(library))
    source.write_text(harness)
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    includes = [f"-I{CHECKOUT / 'tests' / 'unit'}", f"-I{CUDA}"]
    command = [compiler, *options, *includes, str(source), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if kept is not None:
        replace_whole(kept, library.read_bytes())
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
