"""cuda/scatter_accumulate.cu on CPU threads: ranks add to each other at once, and no add is lost."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from host_kernels import CUDA, Array, Counters, address, addresses, aligned, build, find_nvrtc, take_counters, touched

HARNESS = """
#include <random>
#include "cuda_host_shim.h"
#include "scatter_accumulate.cu"

// Every rank pushes its gradients one after the other, all ranks at once, with pauses between.  Rank
// k adds at offset + k * slot_stride.
template <typename T, typename Kernel>
void push(const Kernel& kernel, dim3 grid, dim3 block, const T* const* gradients, float* const* accumulators,
          Size offset, Size slot_stride, Size count, Size peers, const Size* pushes, Size pause_us, Size seed) {
    const Size near = seed;  // it changes no sum
    at_once(peers, [=](Size rank) {
        std::mt19937_64 random(seed * peers + rank);
        for (Size m = 0; m < pushes[rank]; ++m) {
            if (pause_us) std::this_thread::sleep_for(std::chrono::microseconds(random() % pause_us));
            const T* gradient = gradients[rank] + m * peers * count;
            launch(grid, block, [=] {
                kernel(gradient, accumulators, offset + rank * slot_stride, count, peers, rank, near);
            });
        }
    });
}
#define FACE(name, T) extern "C" void run_##name(unsigned gx, unsigned gy, unsigned bx, \\
    const T* const* gradients, float* const* accumulators, Size offset, Size slot_stride, Size count, \\
    Size peers, const Size* pushes, Size pause_us, Size seed) { \\
    push(scatter_accumulate_##name, {gx, gy}, {bx}, gradients, accumulators, offset, slot_stride, count, peers, \\
         pushes, pause_us, seed); } \\
extern "C" void run_one_##name(const T* gradient, float* const* accumulators, Size offset, Size count, \\
    Size peers, Size rank) { \\
    launch({1, 1}, {1}, [=] { \\
        scatter_accumulate_##name(gradient, accumulators, offset, count, peers, rank, ~0ull); }); } \\
extern "C" void reference_##name(const T* gradient, float* const* accumulators, Size offset, Size count, \\
    Size peers) { scatter_accumulate_reference(gradient, accumulators, offset, count, peers); }
FACE(fp32, float)
FACE(bf16, unsigned short)
FACE(alone_fp32, float)
FACE(alone_bf16, unsigned short)
extern "C" void run_take(unsigned gx, unsigned bx, float* slots, Size stride, Size number, Size count,
                         float* gradient) {
    launch({gx, 1}, {bx}, [=] { take_gradient(slots, stride, number, count, gradient); });
}
extern "C" void reference_take(float* slots, Size stride, Size number, Size count, float* gradient) {
    take_gradient_reference(slots, stride, number, count, gradient);
}
"""
NAMES = ["fp32", "bf16"]
ALONE = [f"alone_{name}" for name in NAMES]
"""Kernels that add into a place of their own."""
GUARD = -7.0
"""What is beside the accumulators and must stay."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("scatter"), HARNESS)


@pytest.fixture
def library(built: ctypes.CDLL) -> ctypes.CDLL:
    take_counters(built)
    return built


def sizes(*values: int) -> list[ctypes.c_ulonglong]:
    return [ctypes.c_ulonglong(value) for value in values]


def stored(values: Array, name: str, skip: int = 0) -> Array:
    """Return fp32 values, or their bf16 bits by PyTorch's rounding, from `skip` elements after a boundary."""
    is_fp32 = name.endswith("fp32")
    result = aligned(values.size, np.float32 if is_fp32 else np.uint16, skip)
    if is_fp32:
        result[:] = values.reshape(-1)
    else:
        result[:] = torch.from_numpy(values.reshape(-1)).to(torch.bfloat16).view(torch.uint16).numpy()
    return result


def rounded(values: Array, name: str) -> Array:
    """Return the values that `stored` stands for, in fp32."""
    return values if name.endswith("fp32") else torch.from_numpy(values).to(torch.bfloat16).float().numpy()


@dataclass(frozen=True)
class Launch:
    """How all ranks push at once."""

    grid: tuple[int, int] = (2, 2)
    block: int = 4
    offset: int = 0
    """Where an owner's first accumulator begins, in elements."""
    slot_stride: int = 0
    """From one rank's slot to the next, in elements; 0 for one accumulator."""
    pause_us: int = 0
    """Longest pause before a push."""
    seed: int = 0

    def run(
        self, library: ctypes.CDLL, name: str, gradients: Sequence[Array], accumulators: Sequence[Array], count: int
    ) -> Counters:
        """Push all of each rank's gradients, [pushes * peers * count], and return what the kernels did."""
        peers = len(gradients)
        pushes = np.array([gradient.size // max(peers * count, 1) for gradient in gradients], dtype=np.uint64)
        getattr(library, f"run_{name}")(
            *self.grid,
            self.block,
            address(addresses(gradients)),
            address(addresses(accumulators)),
            *sizes(self.offset, self.slot_stride, count, peers),
            address(pushes),
            *sizes(self.pause_us, self.seed),
        )
        return take_counters(library)


def guarded(peers: int, elements: int, skip: int) -> list[Array]:
    """Return for each peer zeros with a guard of 2 elements on either side."""
    windows = [aligned(elements + 4, np.float32, skip) for _ in range(peers)]
    for window in windows:
        window[:2] = window[-2:] = GUARD
    return windows


# ---- One accumulator: atomic adds ----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("peers", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 37])
def test_no_add_is_lost(library: ctypes.CDLL, name: str, peers: int, count: int) -> None:
    """Whole numbers, whose sums are exact in any order; ranks push different numbers of times."""
    random = np.random.default_rng(count)
    values = [random.integers(-99, 100, (1 + rank % 3, peers, count)).astype(np.float32) for rank in range(peers)]
    accumulators = guarded(peers, count, skip=1)
    did = Launch(offset=2).run(library, name, [stored(v, name) for v in values], accumulators, count)
    expected = sum(value.sum(axis=0) for value in values)  # [peers, count]
    for owner, window in enumerate(accumulators):
        assert np.array_equal(window, [GUARD, GUARD, *expected[owner], GUARD, GUARD])
    assert did.adds + 4 * did.vector_adds == sum(value.size for value in values), "every element once, atomically"
    assert did.misaligned == 0


def test_no_add_is_lost_in_a_crowd(library: ctypes.CDLL) -> None:
    """Eight ranks, forty pushes each, all to the same five elements."""
    ones = [np.ones(40 * 8 * 5, dtype=np.float32) for _ in range(8)]
    accumulators = guarded(8, 5, skip=0)
    Launch(offset=2, grid=(1, 1), block=2).run(library, "fp32", ones, accumulators, 5)
    for window in accumulators:
        assert np.array_equal(window[2:-2], np.full(5, 320.0))


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_any_numbers(library: ctypes.CDLL, name: str) -> None:
    """Within the rounding of fp32 sums: 32 adds of numbers around 1."""
    peers, count, pushes = 8, 61, 4
    values = [np.random.default_rng(r).standard_normal((pushes, peers, count)).astype(np.float32) for r in range(peers)]
    accumulators = guarded(peers, count, skip=0)
    Launch(offset=2).run(library, name, [stored(v, name) for v in values], accumulators, count)
    exact = sum(rounded(value, name).astype(np.float64).sum(axis=0) for value in values)
    scale = sum(np.abs(value).sum(axis=0) for value in values)
    for owner, window in enumerate(accumulators):
        assert np.all(np.abs(window[2:-2] - exact[owner]) <= 32 * 2.0**-24 * scale[owner])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2, 29])
@pytest.mark.parametrize("gradient_skip", range(4))
@pytest.mark.parametrize("window_skip", range(4))
def test_any_alignment(library: ctypes.CDLL, name: str, count: int, gradient_skip: int, window_skip: int) -> None:
    """Also where the shard ends before the first boundary."""
    values = np.arange(1.0, 1 + 3 * count, dtype=np.float32).reshape(3, count)
    gradients = [stored(values, name, gradient_skip) for _ in range(3)]
    accumulators = guarded(3, count, window_skip)
    did = Launch(offset=2).run(library, name, gradients, accumulators, count)
    for owner, window in enumerate(accumulators):
        assert np.array_equal(window, [GUARD, GUARD, *(3 * values[owner]), GUARD, GUARD])
    assert did.misaligned == 0
    # From the first boundary on, two guard elements behind the window's start.
    head = min(-(window_skip + 2) % 4, count)
    assert did.vector_adds == 3 * 3 * ((count - head) // 4)


@pytest.mark.parametrize(("grid", "block"), [((1, 1), 1), ((1, 1), 32), ((5, 1), 3), ((1, 7), 2), ((3, 2), 8)])
def test_any_grid(library: ctypes.CDLL, grid: tuple[int, int], block: int) -> None:
    values = np.arange(3.0 * 55, dtype=np.float32).reshape(3, 55)
    accumulators = guarded(3, 55, skip=3)
    Launch(grid, block, offset=2).run(library, "fp32", [stored(values, "fp32")] * 3, accumulators, 55)
    for owner, window in enumerate(accumulators):
        assert np.array_equal(window[2:-2], 3 * values[owner])


def test_every_bf16_is_widened_as_pytorch_does(library: ctypes.CDLL) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    window = np.zeros(bits.size, dtype=np.float32)
    Launch(grid=(1, 1), block=8).run(library, "bf16", [bits], [window], bits.size)
    expected = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    assert np.array_equal(window, expected, equal_nan=True)


@pytest.mark.parametrize(("peers", "rank"), [(1, 0), (2, 1), (3, 0), (8, 0), (8, 5), (8, 7)])
def test_peers_are_added_to_from_the_next_rank_on(library: ctypes.CDLL, peers: int, rank: int) -> None:
    windows = [aligned(8, np.float32, 0) for _ in range(peers)]
    gradient = aligned(8 * peers, np.float32, 0)
    library.remember(None, *sizes(0))
    library.run_one_fp32(address(gradient), address(addresses(windows)), *sizes(0, 8, peers, rank))
    starts = {window.ctypes.data: peer for peer, window in enumerate(windows)}
    order = [starts[place] for place in touched(library) if place in starts]
    assert order == [(rank + 1 + turn) % peers for turn in range(peers)]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_says_the_same(library: ctypes.CDLL, name: str) -> None:
    values = np.random.default_rng(3).standard_normal((3, 21)).astype(np.float32)
    windows = [np.full(26, 0.5, dtype=np.float32) for _ in range(3)]
    gradient = stored(values, name)
    getattr(library, f"reference_{name}")(address(gradient), address(addresses(windows)), *sizes(4, 21, 3))
    for owner, window in enumerate(windows):
        assert np.array_equal(window[4:25], rounded(values, name)[owner] + np.float32(0.5))
        assert np.array_equal(window[[0, 1, 2, 3, 25]], np.full(5, 0.5))


# ---- Slots: bitwise the same in every run --------------------------------------------------------


def ordered_sum(values: Sequence[Array]) -> Array:
    """Sum each rank's [pushes, peers, count] in fp32 over its pushes, then over the ranks, in order."""
    total = np.zeros(values[0].shape[1:], dtype=np.float32)
    for rank, value in enumerate(values):
        slot = np.zeros_like(total)
        for push in value:
            slot = slot + push
        total = slot if rank == 0 else total + slot
    return total


@pytest.mark.parametrize("name", [*NAMES, *ALONE])
@pytest.mark.parametrize("peers", [1, 2, 3, 8])
def test_slots_sum_to_the_same_bits_in_every_run(library: ctypes.CDLL, name: str, peers: int) -> None:
    count, stride = 37, 40
    random = np.random.default_rng(peers)
    # Spread over many binades, so that another order gives other bits.
    values = [
        (random.standard_normal((2 + rank % 2, peers, count)) * 10.0 ** random.integers(-3, 4, count)).astype("f4")
        for rank in range(peers)
    ]
    expected = ordered_sum([rounded(value, name) for value in values])
    if peers > 2:
        assert not np.array_equal(expected, ordered_sum([rounded(value, name) for value in values[::-1]]))
    gradients = [stored(value, name) for value in values]
    slots = guarded(peers, peers * stride, skip=2)
    for run in range(6):
        launch = Launch(offset=2, slot_stride=stride, pause_us=300, seed=run)
        launch.run(library, name, gradients, slots, count)
        for owner, window in enumerate(slots):
            gradient = aligned(count, np.float32, owner % 4)
            library.run_take(2, 4, address(window[2:]), *sizes(stride, peers, count), address(gradient))
            assert gradient.tobytes() == expected[owner].tobytes()
            assert np.array_equal(window, [GUARD] * 2 + [0.0] * (peers * stride) + [GUARD] * 2)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("count", [0, 1, 2, 29])
@pytest.mark.parametrize("gradient_skip", range(4))
@pytest.mark.parametrize("window_skip", range(4))
def test_adds_alone_load_and_store(
    library: ctypes.CDLL, name: str, count: int, gradient_skip: int, window_skip: int
) -> None:
    """Every element once and not atomically, four at a time from the first boundary on; what is beside stays."""
    values = np.arange(1.0, 1 + 3 * count, dtype=np.float32).reshape(3, count)
    gradients = [stored(values, name, gradient_skip) for _ in range(3)]
    stride = count + 3
    slots = guarded(3, 3 * stride, window_skip)
    did = Launch(offset=2, slot_stride=stride).run(library, name, gradients, slots, count)
    for owner, window in enumerate(slots):
        assert np.array_equal(window[2:-2].reshape(3, stride)[:, :count], [values[owner]] * 3)
        assert not window[2:-2].reshape(3, stride)[:, count:].any()
        assert np.array_equal(window[[0, 1, -2, -1]], [GUARD] * 4)
    assert (did.adds, did.vector_adds, did.misaligned) == (0, 0, 0)
    assert did.stored_bytes == 4 * 9 * count
    heads = [min(-(window_skip + 2 + rank * stride) % 4, count) for rank in range(3)]
    assert did.wide_stores == 3 * sum((count - head) // 4 for head in heads)


@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [2, 33])
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("slots_skip", [0, 1])
@pytest.mark.parametrize("gradient_skip", [0, 1, 3])
def test_taking_the_gradient_adds_in_order_and_zeroes(
    library: ctypes.CDLL, number: int, count: int, padding: int, slots_skip: int, gradient_skip: int
) -> None:
    stride = count + padding
    slots = aligned(number * stride, np.float32, slots_skip)
    slots[:] = np.random.default_rng(stride).standard_normal(slots.size) * 10.0 ** (np.arange(slots.size) % 5)
    expected = slots.reshape(number, stride)[0, :count]
    for slot in slots.reshape(number, stride)[1:]:
        expected = expected + slot[:count]
    between = slots.reshape(number, stride)[:, count:].copy()
    for face in ("run", "reference"):
        given, gradient = aligned(slots.size, np.float32, slots_skip), aligned(count + 2, np.float32, gradient_skip)
        given[:] = slots
        gradient[:] = GUARD
        arguments = [address(given), *sizes(stride, number, count), address(gradient[1:])]
        library.run_take(2, 4, *arguments) if face == "run" else library.reference_take(*arguments)
        assert np.array_equal(gradient, [GUARD, *expected, GUARD])
        assert not given.reshape(number, stride)[:, :count].any()
        assert np.array_equal(given.reshape(number, stride)[:, count:], between)
    did = take_counters(library)
    assert did.misaligned == 0
    assert did.stored_bytes == 4 * count * (number + 1)
    # Four at a time if slots and gradient are equally far from a boundary, all of them.
    together = slots_skip == (gradient_skip + 1) % 4 and (number == 1 or stride % 4 == 0)
    head = min(-slots_skip % 4, count)
    assert did.vector_stores == ((count - head) // 4 * (number + 1) if together else 0)


# ---- What the compiler makes of it ---------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "vectors"), [("sm_80", False), ("sm_90", True), ("sm_100", True)])
def test_adds_are_reductions_of_system_scope(architecture: str, vectors: bool) -> None:
    ptx, _ = find_nvrtc().compile((CUDA / "scatter_accumulate.cu").read_text(), architecture)
    kernels = {kernel.split("(")[0].strip(): kernel for kernel in ptx.split(".entry ")[1:]}
    assert set(kernels) == {*(f"scatter_accumulate_{name}" for name in (*NAMES, *ALONE)), "take_gradient"}
    for name in NAMES:
        kernel = kernels[f"scatter_accumulate_{name}"]
        assert "red.relaxed.sys.global.add.f32" in kernel
        assert ("red.relaxed.sys.global.add.v4.f32" in kernel) == vectors
        if vectors:  # of near windows, before the add that is to find them in L2
            assert 0 < kernel.index("prefetch.global.L2") < kernel.index("red.relaxed.sys.global.add.v4.f32")
        assert "atom." not in kernel
        assert "st.global" not in kernel
        alone = kernels[f"scatter_accumulate_alone_{name}"]
        assert not any(word in alone for word in ("red.", "atom.", "prefetch."))
        assert "ld.global.cg.v4.f32" in alone
        assert re.search(r"ld\.global\.cs\.v2", alone), "gradients that are not where four can be loaded"
        assert "st.global.cg.v4.f32" in alone
    assert "ld.global.cg.v4" in kernels["take_gradient"]
