"""The CUDA sources compile for the GPUs we name, and their logic is right on CPU threads."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from host_kernels import (
    CUDA,
    Array,
    Counters,
    Nvrtc,
    address,
    addresses,
    aligned,
    build,
    find_nvrtc,
    registers,
    take_counters,
)

from runtime.odc.kernels import SOURCES as KERNELS

SOURCES = sorted(CUDA.glob("*.cu"))
GUARD = 0x5A
"""Byte that fills the window before a kernel runs."""


# ---- Compilation ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return find_nvrtc()


@cache
def compiled(nvrtc: Nvrtc, name: str, architecture: str) -> tuple[str, bytes]:
    """Return the PTX and the cubin of a source of `cuda/`, compiled once."""
    return nvrtc.compile((CUDA / name).read_text(), architecture)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_source_compiles(nvrtc: Nvrtc, path: Path, architecture: str) -> None:
    ptx, cubin = compiled(nvrtc, path.name, architecture)
    assert f".target {architecture}" in ptx
    assert ".entry " in ptx
    assert cubin.startswith(b"\x7fELF")


def test_pack_cast_loads_and_stores_vectors(nvrtc: Nvrtc) -> None:
    ptx, _ = compiled(nvrtc, "pack_cast.cu", "sm_80")
    kernels = {kernel.split("(")[0].strip(): kernel for kernel in ptx.split(".entry ")[1:]}
    assert set(kernels) == {"pack_cast_bf16", "pack_cast_fp32"}
    for kernel in kernels.values():
        assert {"ld.global.cs.v4", "ld.global.cs.v2"} <= set(re.findall(r"ld\.global\.cs\.v\d", kernel))
        assert "st.global.cg.v4" in kernel


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_blocks_have_the_registers_that_launches_count_on(nvrtc: Nvrtc, path: Path, architecture: str) -> None:
    """A multiprocessor has 65,536, for eight blocks of 256 threads or, of gathers, four; and none is put elsewhere."""
    _, cubin = compiled(nvrtc, path.name, architecture)
    found = registers(cubin)
    assert set(found) == {kernel for kernel, file in KERNELS.items() if file == path.name}
    for kernel, (taken, frame_bytes) in found.items():
        blocks = 4 if kernel == "gather" else 8
        assert taken * 256 * blocks <= 65536, kernel
        assert frame_bytes == 0 or (architecture, kernel[:24]) == ("sm_80", "scatter_accumulate_alone"), kernel


def test_slots_are_zeroed_when_they_have_been_read(nvrtc: Nvrtc) -> None:
    """Zeros stored while loads of the same places are on their way took five times as long on an H200."""
    ptx, _ = compiled(nvrtc, "scatter_accumulate.cu", "sm_90")
    (kernel,) = re.findall(r"\.entry take_gradient\(.*?^}", ptx, re.MULTILINE | re.DOTALL)
    order = re.findall(r"(ld|st)\.global\.cg\.(v4|f32|u32|b32)", kernel)
    for width in ("v4", order[-1][1]):
        of_width = [what for what, found in order if found == width]
        # The first slot, the others, the sum, and zeros.
        assert of_width == ["ld", "ld", "st", "st"]


def test_gathers_have_four_loads_on_their_way(nvrtc: Nvrtc) -> None:
    ptx, _ = compiled(nvrtc, "gather.cu", "sm_90")
    order = re.findall(r"(ld|st)\.global\.cg\.v4", ptx)
    assert "".join("L" if one == "ld" else "S" for one in order).count("LLLLSSSS") == 1


def test_errors_in_a_source_are_reported(nvrtc: Nvrtc) -> None:
    with pytest.raises(RuntimeError, match="undefined"):
        nvrtc.compile('extern "C" __global__ void f(float* x) { *x = missing; }', "sm_80")


# ---- pack_cast on CPU threads --------------------------------------------------------------------

HARNESS = """
#include "cuda_host_shim.h"
#include "pack_cast.cu"
#define FACE(kernel, T) extern "C" void run_##kernel(unsigned gx, unsigned gy, unsigned bx, \\
    const float* const* sources, const Size* offsets, const Size* counts, Size segments, T* window) { \\
    launch({gx, gy}, {bx}, [=] { kernel(sources, offsets, counts, segments, window); }); }
FACE(pack_cast_bf16, unsigned short)
FACE(pack_cast_fp32, float)
FACE(pack_cast_bf16_reference, unsigned short)
"""


class Kernels:
    """The kernels of pack_cast.cu, compiled for this machine's CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def run(
        self,
        kernel: str,
        sources: Sequence[Array],
        offsets: Sequence[int],
        window: Array,
        grid: tuple[int, int] = (3, 2),
        block: int = 32,
    ) -> Counters:
        """Run a kernel on host arrays and return what it did."""
        begins = np.array(offsets, dtype=np.uint64)
        counts = np.array([source.size for source in sources], dtype=np.uint64)
        arrays = [address(array) for array in (addresses(sources), begins, counts)]
        getattr(self.library, f"run_{kernel}")(*grid, block, *arrays, ctypes.c_ulonglong(len(sources)), address(window))
        return take_counters(self.library)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(build(tmp_path_factory.mktemp("pack_cast"), HARNESS))


def floats_around_every_bf16() -> Array:
    """Every bf16, and between it and the next: just above, around the tie, and just below."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return (upper[:, None] | lower).reshape(-1).view(np.float32)


@pytest.mark.parametrize("kernel", ["pack_cast_bf16", "pack_cast_bf16_reference"])
def test_bf16_rounds_as_pytorch_everywhere(kernels: Kernels, kernel: str) -> None:
    """All exponents, signs, ties, subnormal numbers, infinities and NaNs."""
    values = floats_around_every_bf16()
    window = np.zeros(values.size, dtype=np.uint16)
    grid, block = ((4, 1), 16) if kernel == "pack_cast_bf16" else ((1, 1), 1)
    kernels.run(kernel, [values], [0], window, grid, block)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    nan = np.isnan(values)
    assert np.array_equal(window[~nan], expected[~nan])
    assert np.all(window[nan] == 0x7FC0)
    assert nan.sum() == 2 * (128 * 6 - 1), "two signs of one exponent, less its infinity"


def test_fp32_keeps_every_bit(kernels: Kernels) -> None:
    values = floats_around_every_bf16()
    window = np.zeros(values.size, dtype=np.float32)
    kernels.run("pack_cast_fp32", [values], [0], window, (4, 1), 16)
    assert np.array_equal(window.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("kernel", ["pack_cast_bf16", "pack_cast_fp32"])
@pytest.mark.parametrize("source_skip", range(4))
@pytest.mark.parametrize("window_skip", range(4))
def test_sizes_and_alignments(kernels: Kernels, kernel: str, source_skip: int, window_skip: int) -> None:
    """Every element is written once, nothing beside the segments is, and no access is misaligned."""
    dtype, bits = (torch.bfloat16, torch.uint16) if kernel.endswith("bf16") else (torch.float32, torch.uint32)
    counts = [0, 1, 2, 3, 4, 5, 7, 8, 1021]
    gap = 3
    random = np.random.default_rng(0)
    sources, offsets, end = [], [], 1
    for count in counts:
        source = aligned(count, np.float32, source_skip)
        source[:] = random.standard_normal(count)
        sources.append(source)
        offsets.append(end)
        end += count + gap
    element = dtype.itemsize
    window = aligned(end, np.dtype(f"u{element}"), window_skip)
    window.view(np.uint8)[:] = GUARD
    expected = window.copy()
    for source, offset in zip(sources, offsets, strict=True):
        cast = torch.from_numpy(source).to(dtype).view(bits)
        expected[offset : offset + source.size] = cast.numpy()

    did = kernels.run(kernel, sources, offsets, window)

    assert np.array_equal(window, expected)
    assert did.stored_bytes == sum(counts) * element
    assert did.misaligned == 0


@pytest.mark.parametrize(
    ("source_skip", "window_skip", "vectors"),
    [
        (0, 0, 25),  # 103 = 25 fours and 3
        (3, 3, 25),  # 1 element to the boundary, 25 fours, 2 behind
        (1, 1, 25),  # 3 elements to the boundary, 25 fours
        (0, 2, 25),  # 2 elements to the window's boundary, 25 fours that are loaded two at a time, 1 behind
        (1, 2, 25),  # the same, of which the middle two are loaded at once
        (2, 3, 25),
    ],
)
@pytest.mark.parametrize("kernel", ["pack_cast_bf16", "pack_cast_fp32"])
def test_vectors_wherever_the_window_begins(
    kernels: Kernels, kernel: str, source_skip: int, window_skip: int, vectors: int
) -> None:
    source = aligned(103, np.float32, source_skip)
    window = aligned(103, np.uint16 if kernel.endswith("bf16") else np.float32, window_skip)
    did = kernels.run(kernel, [source], [0], window)
    assert did.vector_stores == vectors
