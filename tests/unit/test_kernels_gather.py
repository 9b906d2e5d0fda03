"""cuda/gather.cu on CPU threads: every rank pulls all shards, from any alignment, in its own order."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import numpy as np
import pytest
from host_kernels import CUDA, Array, Counters, address, addresses, aligned, build, find_nvrtc, take_counters, touched
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import draws

HARNESS = """
#include "cuda_host_shim.h"
#include "gather.cu"
extern "C" void run_gather(unsigned gx, unsigned gy, unsigned bx, const char* const* windows, Size offset,
                           Size bytes, Size peers, char* const* outs) {
    at_once(peers, [=](Size rank) {
        launch({gx, gy}, {bx}, [=] { gather(windows, offset, bytes, peers, rank, outs[rank]); });
    });
}
extern "C" void run_one(unsigned block, const char* const* windows, Size offset, Size bytes, Size peers, Size rank,
                        char* out) {
    launch({1, 1}, {block}, [=] { gather(windows, offset, bytes, peers, rank, out); });
}
extern "C" void run_reference(const char* const* windows, Size offset, Size bytes, Size peers, char* out) {
    gather_reference(windows, offset, bytes, peers, out);
}
"""
DTYPES = [np.uint16, np.uint32]
"""The bits of bf16 and of fp32."""
GUARD = 3
"""Elements before and behind every result, which a kernel must leave alone."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("gather"), HARNESS)


@pytest.fixture
def library(built: ctypes.CDLL) -> ctypes.CDLL:
    take_counters(built)
    return built


def sizes(*values: int) -> list[ctypes.c_ulonglong]:
    return [ctypes.c_ulonglong(value) for value in values]


def random_windows(peers: int, elements: int, dtype: type, skip: int) -> list[Array]:
    """Return each peer's window, all of its bits random."""
    random = np.random.default_rng(peers * 1000 + elements)
    windows = [aligned(elements, dtype, skip) for _ in range(peers)]
    for window in windows:
        window[:] = random.integers(0, np.iinfo(dtype).max, elements, dtype=dtype, endpoint=True)
    return windows


def gather_on_all_ranks(
    library: ctypes.CDLL,
    windows: Sequence[Array],
    offset: int,
    count: int,
    out_skip: int,
    grid: tuple[int, int] = (2, 2),
    block: int = 4,
) -> tuple[list[Array], Counters]:
    """Return what every rank has after all gathered at once, and what the kernels did.

    Offset and count are in elements; each result has GUARD elements of ones on either side.
    """
    dtype = windows[0].dtype
    outs = [aligned(len(windows) * count + 2 * GUARD, dtype, out_skip) for _ in windows]
    for out in outs:
        out[:] = np.iinfo(dtype).max
    targets = addresses([out[GUARD:] for out in outs])
    library.run_gather(
        *grid,
        block,
        address(addresses(windows)),
        *sizes(offset * dtype.itemsize, count * dtype.itemsize, len(windows)),
        address(targets),
    )
    return outs, take_counters(library)


def expected_result(windows: Sequence[Array], offset: int, count: int) -> Array:
    dtype = windows[0].dtype
    guard = np.full(GUARD, np.iinfo(dtype).max, dtype=dtype)
    return np.concatenate([guard, *(window[offset : offset + count] for window in windows), guard])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("peers", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 16, 61, 250])
def test_every_rank_has_all_shards_in_rank_order(library: ctypes.CDLL, dtype: type, peers: int, count: int) -> None:
    windows = random_windows(peers, count + 9, dtype, skip=0)
    outs, did = gather_on_all_ranks(library, windows, 5, count, out_skip=1, grid=(2, 1), block=2)
    for out in outs:
        assert np.array_equal(out, expected_result(windows, 5, count))
    assert did.stored_bytes == peers * peers * count * dtype().itemsize, "every element once"
    assert did.misaligned == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("out_skip", range(8))
def test_any_offset_and_alignment(library: ctypes.CDLL, dtype: type, offset: int, out_skip: int) -> None:
    windows = random_windows(2, 80, dtype, skip=0)
    outs, did = gather_on_all_ranks(library, windows, offset, 61, out_skip)
    for out in outs:
        assert np.array_equal(out, expected_result(windows, offset, 61))
    assert did.stored_bytes == 2 * 2 * 61 * dtype().itemsize
    assert did.misaligned == 0


@pytest.mark.parametrize(("grid", "block"), [((1, 1), 1), ((1, 1), 32), ((5, 1), 3), ((1, 7), 2), ((3, 2), 8)])
def test_any_grid(library: ctypes.CDLL, grid: tuple[int, int], block: int) -> None:
    windows = random_windows(3, 101, np.uint16, skip=0)
    outs, did = gather_on_all_ranks(library, windows, 1, 99, 0, grid, block)
    for out in outs:
        assert np.array_equal(out, expected_result(windows, 1, 99))
    assert did.stored_bytes == 3 * 3 * 99 * 2


@pytest.mark.parametrize("source_bytes", [0, 6])
@pytest.mark.parametrize("out_bytes", range(0, 16, 2))
def test_16_bytes_at_a_time_however_far_apart(library: ctypes.CDLL, source_bytes: int, out_bytes: int) -> None:
    """Of a warp only the last thread loads 16 bytes that another one loads too; nothing beside the window is read."""
    size = 2 * (2**13 + 35)  # the last turn is not full
    window = random_windows(1, size // 2, np.uint16, source_bytes // 2)[0]
    out = aligned(size // 2, np.uint16, out_bytes // 2)
    library.remember(None, *sizes(0))
    library.run_one(32, address(addresses([window])), *sizes(0, size, 1, 0), address(out))
    did, places = take_counters(library), touched(library)
    assert np.array_equal(out, window)
    # Of the target's 16 bytes those whose source, from boundary to boundary, is inside the window.
    begins = [source_bytes + begin for begin in range(-out_bytes % 16, size - 15, 16)]
    end = source_bytes + size
    wides = sum(begin // 16 * 16 >= source_bytes and -(-(begin + 16) // 16) * 16 <= end for begin in begins)
    assert (did.wide_stores, did.vector_stores) == (wides, wides)
    twice = 0 if source_bytes == out_bytes else 1 + wides // 32
    assert len(places) == wides + twice + (size - 16 * wides) // 2
    inside = [place - window.ctypes.data for place in places]
    assert (min(inside), max(inside)) == (0, size - 2)
    assert did.misaligned == 0


@settings(max_examples=draws(25), deadline=None)
@given(st.data())
def test_drawn_misalignments_and_launches(built: ctypes.CDLL, data: st.DataObject) -> None:
    dtype, peers = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1, 3))
    count, offset = data.draw(st.integers(0, 700)), data.draw(st.integers(0, 20))
    windows = random_windows(peers, count + offset + 3, dtype, skip=data.draw(st.integers(0, 7)))
    grid = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    take_counters(built)
    block, out_skip = data.draw(st.sampled_from([1, 2, 31, 33, 64])), data.draw(st.integers(0, 7))
    outs, did = gather_on_all_ranks(built, windows, offset, count, out_skip, grid, block)
    for out in outs:
        assert np.array_equal(out, expected_result(windows, offset, count))
    assert did.stored_bytes == peers * peers * count * dtype().itemsize
    assert did.misaligned == 0


@pytest.mark.parametrize(("peers", "rank"), [(1, 0), (2, 1), (3, 0), (8, 0), (8, 5), (8, 7)])
def test_peers_are_read_from_the_next_rank_on(library: ctypes.CDLL, peers: int, rank: int) -> None:
    windows = random_windows(peers, 16, np.uint32, skip=0)
    out = aligned(16 * peers, np.uint32, 0)
    library.remember(None, *sizes(0))
    library.run_one(1, address(addresses(windows)), *sizes(0, 64, peers, rank), address(out))
    starts = {window.ctypes.data: peer for peer, window in enumerate(windows)}
    order = [starts[place] for place in touched(library) if place in starts]
    assert order == [(rank + 1 + turn) % peers for turn in range(peers)]


def test_the_reference_says_the_same(library: ctypes.CDLL) -> None:
    windows = random_windows(3, 50, np.uint16, skip=1)
    out = aligned(120, np.uint16, 0)
    library.run_reference(address(addresses(windows)), *sizes(2 * 7, 2 * 40, 3), address(out))
    assert np.array_equal(out, expected_result(windows, 7, 40)[GUARD:-GUARD])


def test_gather_loads_and_stores_vectors_past_l1() -> None:
    ptx, _ = find_nvrtc().compile((CUDA / "gather.cu").read_text(), "sm_90")
    assert "ld.global.cg.v4" in ptx
    assert "st.global.cg.v4" in ptx
    widths = set(re.findall(r"(?:ld|st)\.global\.cg\.(v?\d?)\.?[bu](\d+)", ptx))
    assert widths == {("v4", "32"), ("", "16")}, "16 bytes, and 2 before and behind"
    assert "shfl.sync.down" in ptx
    assert "ld.global.u" not in ptx.replace("ld.global.u64", ""), "only addresses may come through L1"
