"""What CuPy is asked for, by a stand-in that takes notes; and how kernels are laid out and launched."""

from __future__ import annotations

import re
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from host_kernels import CUDA
from hypothesis import given
from hypothesis import strategies as st

from profiler.errors import OsdpError
from runtime.odc import cupy_device
from runtime.odc.cupy_device import CupyDevice, load_cupy
from runtime.odc.kernels import SOURCES, WHOLE_GPU, gather_grid, grid_for, near, source_of
from runtime.odc.windows import Layout, Region, WindowSpec

MIB = 1 << 20


# --- layout and launches


def test_every_kernel_is_in_its_source() -> None:
    for kernel, file in SOURCES.items():
        assert source_of(file) == (CUDA / file).read_text()
        assert re.search(rf'extern "C" __global__ void [^;]*?\b{kernel}\(', source_of(file)), kernel
    assert set(SOURCES.values()) == {path.name for path in CUDA.glob("*.cu")}


def test_a_source_that_is_missing_is_named() -> None:
    with pytest.raises(OsdpError, match=r"the CUDA source nothing\.cu is missing"):
        source_of("nothing.cu")


def test_windows_by_hand() -> None:
    """All published shards, and behind them all accumulators."""
    # 1000 bf16 are 2000 bytes -> 2048, 64 fp32 are 256; 900 fp32 are 3600 -> 3840, or 960 elements, thrice.
    specs = [WindowSpec("a", 1000, torch.bfloat16, 100), WindowSpec("b", 64, torch.float32, 64)]
    layout = Layout.at(256, specs, 3)
    sums = 256 + 2048 + 256
    assert layout.regions == (Region(256, sums, 960), Region(256 + 2048, sums + 3 * 3840, 0))
    assert (layout.sums, layout.end, layout.sums_numel) == (sums, sums + 3 * 3840, 3 * 960)


WINDOWS = st.builds(
    lambda numel, dtype, part: WindowSpec("drawn", numel, dtype, round(part * numel)),
    *(st.integers(1, 5000), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(0, 1)),
)


@given(st.lists(WINDOWS, min_size=1, max_size=5), st.integers(1, 4))
def test_all_parts_of_windows_begin_at_256_bytes(specs: list[WindowSpec], accumulators: int) -> None:
    """Whatever the sizes, so that kernels can take 16 bytes at once; and no part reaches into the next."""
    layout = Layout.at(256, specs, accumulators)
    parts = list[tuple[int, int]]()
    for one, spec in zip(layout.regions, specs, strict=True):
        parts.append((one.published, spec.shard_numel * spec.dtype.itemsize))
        slots = (one.accumulators + 4 * slot * one.stride_numel for slot in range(accumulators))
        parts += [(slot, 4 * spec.gradient_numel) for slot in slots]
    assert all(start % 256 == 0 for start, _ in parts)
    parts = sorted(part for part in parts if part[1])
    assert all(start + size <= following for (start, size), (following, _) in pairwise([*parts, (layout.end, 0)]))


def test_grids_by_hand() -> None:
    # 132 multiprocessors of 8 blocks: large shards fill them along x, small ones along y, up to one row per peer.
    assert grid_for(64 * MIB, 4096, 8, 1056) == (1056, 1)
    assert grid_for(1 * MIB, 4096, 8, 1056) == (256, 4)
    assert grid_for(4096, 4096, 8, 1056) == (1, 8)
    assert grid_for(1, 4096, 1, 1056) == (1, 1)
    # One that may have the whole GPU has a block for each part of each row.
    assert grid_for(64 * MIB, 4096, 8, WHOLE_GPU) == (16384, 8)
    assert gather_grid(64 * MIB, 8, WHOLE_GPU) == (4096, 8)


def test_windows_that_are_near_have_a_bit_each() -> None:
    assert near([True, False, True, True]) == 0b1101
    assert near([False] * 100) == 0
    assert near([True] * 100) == 2**64 - 1  # kernels know of the first 64


@given(st.integers(1, 1 << 34), st.integers(1, 4096), st.integers(1, 64), st.integers(1, 2000))
def test_grids_are_within_what_a_gpu_runs_at_once(numel: int, per_block: int, rows: int, room: int) -> None:
    x, y = grid_for(numel, per_block, rows, room)
    assert 1 <= x * y <= room
    assert y <= rows
    assert (x - 1) * per_block < numel


# --- CuPy


class CudaError(Exception):
    """In place of CUDARuntimeError."""


class StandIn:
    """CuPy with a GPU 0 and a GPU 1, as far as the device asks."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        """How often a call fails before it works."""
        self.modules: list[tuple[str, tuple[str, ...]]] = []
        names = (
            "malloc",
            "memset",
            "free",
            "ipcGetMemHandle",
            "ipcOpenMemHandle",
            "ipcCloseMemHandle",
            "deviceSynchronize",
            "deviceCanAccessPeer",
            "deviceGetByPCIBusId",
            "memcpyAsync",
        )
        self.results: dict[str, Any] = {
            "malloc": 4096,
            "ipcGetMemHandle": b"handle",
            "ipcOpenMemHandle": 8192,
            "deviceCanAccessPeer": 1,
            "deviceGetByPCIBusId": 1,
        }
        runtime = {name: self._noting(name) for name in names}
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=CudaError, deviceGetPCIBusId="0000:0{}:00.0".format, memcpyDefault=4, **runtime
            ),
            Device=lambda index: _Context(self, "device", index),
            Stream=SimpleNamespace(),
            ExternalStream=lambda handle, index: _Context(self, "stream", handle),
        )

    def _noting(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            if self.fails.get(name, 0):
                self.fails[name] -= 1
                raise CudaError(name)
            return self.results.get(name)

        return call

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:  # noqa: N802 - CuPy's name
        self.modules.append((code, options))
        return SimpleNamespace(get_function=lambda kernel: self._noting(kernel))


class _Context:
    """Notes when it is entered."""

    def __init__(self, owner: StandIn, *what: Any) -> None:
        self.owner, self.what = owner, what

    def __enter__(self) -> None:
        self.owner.calls.append(self.what)

    def __exit__(self, *_: Any) -> None:
        return


class Stream:
    """One of PyTorch's, by its handle."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waited, self.synchronised = handle, [], 0  # type: ignore[var-annotated]

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)

    def synchronize(self) -> None:
        self.synchronised += 1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(cupy_device, "load_cupy", lambda: stand_in)
    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (3 * MIB, 8 * MIB),
        "get_device_properties": lambda index: SimpleNamespace(multi_processor_count=132),
        "empty_cache": lambda: stand_in.calls.append(("empty_cache",)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return stand_in


def test_sources_are_compiled_as_they_are(cupy: StandIn) -> None:
    """CuPy's cache goes by these very texts and options."""
    device = CupyDevice()
    assert sorted(cupy.modules) == sorted((path.read_text(), ("--std=c++17",)) for path in CUDA.glob("*.cu"))
    assert (device.identity, device.room, device.torch_device) == ("0000:00:00.0", 8 * 132, torch.device("cuda", 0))


def test_memory_is_in_blocks_of_its_own_and_zero(cupy: StandIn) -> None:
    device = CupyDevice()
    cupy.calls.clear()
    assert device.allocate(2 * MIB + 1) == 4096
    assert cupy.calls == [("device", 0), ("malloc", 4 * MIB), ("memset", 4096, 0, 4 * MIB), ("deviceSynchronize",)]
    cupy.calls.clear()
    assert (device.export(4096), device.open(b"peer's")) == (b"handle", 8192)
    device.close(8192)
    device.free(4096)
    assert [call for call in cupy.calls if call[0] != "device"] == [
        ("ipcGetMemHandle", 4096),
        ("ipcOpenMemHandle", b"peer's"),
        ("ipcCloseMemHandle", 8192),
        ("free", 4096),
    ]


def test_what_pytorch_keeps_for_itself_is_used_before_memory_is_short(cupy: StandIn) -> None:
    device = CupyDevice()
    cupy.fails["malloc"] = 1
    assert device.allocate(1) == 4096
    assert ("empty_cache",) in cupy.calls
    cupy.fails["malloc"] = 2
    with pytest.raises(
        OsdpError, match=r"too little free memory for the windows of odc\n  got: 3.0 MiB free\n  expected: 4.0 MiB"
    ):
        device.allocate(3 * MIB)


def test_letting_go_never_fails(cupy: StandIn) -> None:
    device = CupyDevice()
    cupy.fails.update(free=1, ipcCloseMemHandle=1)
    device.free(4096)
    device.close(8192)


def test_kernels_go_to_the_current_stream(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes after a meeting waits for all of them."""
    device, streams = CupyDevice(), [Stream(handle) for handle in (0, 70, 71)]
    cupy.calls.clear()
    for stream in (streams[1], streams[2], streams[1], streams[0]):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        device.launch("gather", (5, 2), 256, (4096, (1 << 64) - 1))
    words = (np.uint64(4096), np.uint64((1 << 64) - 1))
    assert cupy.calls[:3] == [("device", 0), ("stream", 70), ("gather", (5, 2), (256,), words)]
    assert all(type(word) is np.uint64 for word in cupy.calls[2][3])
    assert [call[1] for call in cupy.calls if call[0] == "stream"] == [70, 71, 70, 0]
    device.join()
    assert sorted(set(streams[0].waited) - {0}) == [70, 71]
    device.launch("gather", (1, 1), 256, ())
    device.synchronise()
    assert [stream.synchronised for stream in streams] == [1, 0, 0]


def test_streams_and_arguments_are_put_for_cupy_once(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps, each of two launches on one stream and one on another, with a barrier that counts them."""
    faces: list[int] = []
    make_face, make_words = cupy.cuda.ExternalStream, Counter[int]()

    def face(handle: int, index: int) -> Any:
        faces.append(handle)
        return make_face(handle, index)

    def word(value: int) -> np.uint64:
        make_words[value] += 1
        return np.uint64(value)

    monkeypatch.setattr(cupy.cuda, "ExternalStream", face)
    monkeypatch.setattr(cupy_device, "np", SimpleNamespace(uint64=word))
    cupy_device._words.cache_clear()
    device, streams = CupyDevice(), [Stream(handle) for handle in (70, 71)]
    for step in range(3):
        launches = ((0, "gather", (4096, 7)), (1, "scatter_accumulate_fp32", (8192,)), (0, "barrier", (100 + step,)))
        for number, kernel, arguments in launches:
            monkeypatch.setattr(torch.cuda, "current_stream", lambda _, number=number: streams[number])
            device.launch(kernel, (1, 1), 256, arguments)
    assert faces == [70, 71]
    assert make_words == Counter([4096, 7, 8192, 100, 101, 102])
    assert [call[3] for call in cupy.calls if call[0] == "gather"] == [(np.uint64(4096), np.uint64(7))] * 3


def test_copies_go_to_the_current_stream(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    device, copying, current = CupyDevice(), Stream(70), Stream(0)
    cupy.calls.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: copying)
    device.copy(4096, 8192, 1 << 20)
    assert cupy.calls == [("device", 0), ("memcpyAsync", 8192, 4096, 1 << 20, 4, 70)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    device.join()
    assert current.waited == [70]


def test_launches_about_a_subject_follow_each_other(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their streams; those about others and about nothing do not."""
    device, streams = CupyDevice(), [Stream(handle) for handle in (70, 71, 72)]
    for number, subject in ((0, 5), (0, 5), (1, 6), (1, 5), (2, None), (2, 5)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, number=number: streams[number])
        device.launch("gather", (1, 1), 256, (), subject)
    assert [stream.waited for stream in streams] == [[], [70], [71]]
    device.join()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[0])
    device.launch("gather", (1, 1), 256, (), 5)
    assert streams[0].waited == []


def test_gpus_that_cannot_reach_each_other(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    device, other = CupyDevice(), "0000:01:00.0"
    assert device.obstacle(device.identity, needs_atomics=True) == ""
    monkeypatch.setattr(cupy_device, "native_atomics", lambda here, there: (here, there) == (0, 1))
    assert device.obstacle(other, needs_atomics=True) == ""
    monkeypatch.setattr(cupy_device, "native_atomics", lambda here, there: False)
    assert "no native atomics" in device.obstacle(other, needs_atomics=True)
    assert device.obstacle(other, needs_atomics=False) == ""
    cupy.results["deviceCanAccessPeer"] = 0
    assert "no peer access" in device.obstacle(other, needs_atomics=False)


def test_a_gpu_that_is_not_seen_is_tried(cupy: StandIn) -> None:
    """Each rank may see its own alone (Slurm), and CUDA IPC reach the others all the same."""
    device = CupyDevice()
    cupy.fails["deviceGetByPCIBusId"] = 1
    assert device.obstacle("0000:01:00.0", needs_atomics=True) == ""


def test_what_is_missing_is_said(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy, "RawModule", lambda **_: (_ for _ in ()).throw(OSError("libnvrtc.so.13: cannot open")))
    with pytest.raises(OsdpError, match=r"cannot compile and load the kernels\n  got: libnvrtc.so.13: cannot open"):
        CupyDevice()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OsdpError, match="PyTorch finds no GPU"):
        CupyDevice()


def test_cupy_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    load_cupy.cache_clear()
    with pytest.raises(OsdpError, match=r".venv/bin/pip install -e '\.\[cuda13\]'"):
        load_cupy()
