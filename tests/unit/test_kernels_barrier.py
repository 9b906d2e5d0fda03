"""cuda/barrier.cu on CPU threads: nobody leaves before all came, and who does not come is named."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pytest
from host_kernels import CUDA, Array, address, addresses, build, find_nvrtc
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import THOROUGH

HARNESS = """
#include <random>
#include "cuda_host_shim.h"
#include "barrier.cu"

// All ranks whose bit is set in `present` come once, at once.  seen is [peers][peers], status [peers].
extern "C" void meet(unsigned block, Size present, Size* const* flags, Size peers, Size epoch, Size timeout_ns,
                     Size* seen, Size* status, Size* waited_ns) {
    at_once(peers, [=](Size rank) {
        if ((present >> rank & 1) == 0) return;
        const Size start = nanoseconds();
        launch({1, 1}, {block}, [=] {
            barrier(flags, peers, rank, epoch, timeout_ns, seen + rank * peers, status + rank);
        });
        waited_ns[rank] = nanoseconds() - start;
    });
}

// Every rank meets the others `epochs` times, after a random pause before some of them.  Before an
// epoch it writes its number into a place that everyone reads right after; there are two such
// places per rank, because a rank may be one meeting ahead of one that is still reading.
// out = {reads of another number, ranks that gave up}.
extern "C" void meet_often(unsigned block, Size* const* flags, Size peers, Size epochs, Size pause_us, Size seed,
                           Size* out) {
    std::vector<Size> written(2 * peers, 0);
    std::atomic<Size> early{0}, failed{0};
    at_once(peers, [&](Size rank) {
        std::mt19937_64 random(seed * peers + rank);
        std::vector<Size> seen(peers);
        for (Size epoch = 1; epoch <= epochs; ++epoch) {
            if (pause_us && random() % 8 == 0)
                std::this_thread::sleep_for(std::chrono::microseconds(random() % pause_us));
            Size* const now = written.data() + epoch % 2 * peers;
            now[rank] = epoch;
            Size status = 77;
            launch({1, 1}, {block}, [&] {
                barrier(flags, peers, rank, epoch, 20'000'000'000ull, seen.data(), &status);
            });
            if (status != 0) {
                ++failed;
                return;
            }
            for (Size q = 0; q < peers; ++q)
                if (now[q] != epoch) ++early;
        }
    });
    out[0] = early;
    out[1] = failed;
}

extern "C" Size status_reference(const Size* flags, Size peers, Size epoch) {
    return barrier_reference(flags, peers, epoch);
}
"""
UNSET = 77
"""What results hold before a kernel writes them."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("barrier"), HARNESS)


def sizes(*values: int) -> list[ctypes.c_ulonglong]:
    return [ctypes.c_ulonglong(value) for value in values]


@dataclass(frozen=True)
class Meeting:
    """What each rank was told; rows and entries of absent ranks are UNSET."""

    seen: Array
    """[peers, peers] epochs."""
    status: Array
    """[peers]"""
    waited_s: Array
    """[peers]"""


def windows(peers: int) -> list[Array]:
    """Return each peer's flags, all 0, and behind them one more that must stay UNSET."""
    flags = [np.zeros(peers + 1, dtype=np.uint64) for _ in range(peers)]
    for own in flags:
        own[-1] = UNSET
    return flags


def meet(
    library: ctypes.CDLL,
    flags: list[Array],
    epoch: int,
    absent: Collection[int] = (),
    timeout_s: float = 60.0,
    block: int = 4,
) -> Meeting:
    """Let all but the absent ranks meet once."""
    peers = len(flags)
    seen = np.full((peers, peers), UNSET, dtype=np.uint64)
    status, waited_ns = np.full(peers, UNSET, dtype=np.uint64), np.full(peers, UNSET, dtype=np.uint64)
    present = sum(1 << rank for rank in range(peers) if rank not in absent)
    library.meet(
        block,
        *sizes(present),
        address(addresses(flags)),
        *sizes(peers, epoch, round(timeout_s * 1e9)),
        *(address(array) for array in (seen, status, waited_ns)),
    )
    return Meeting(seen, status, waited_ns / 1e9)


@pytest.mark.parametrize(
    ("peers", "block", "pause_us", "meetings"),
    [
        (1, 1, 0, 1000),
        (2, 32, 0, 1000 if THOROUGH else 150),
        (2, 2, 300, 1000 if THOROUGH else 300),
        (3, 2, 300, 1000 if THOROUGH else 300),
        (8, 8, 0, 250 if THOROUGH else 80),
        (8, 3, 300, 250 if THOROUGH else 80),
    ],
)
def test_nobody_leaves_before_all_came(
    library: ctypes.CDLL, peers: int, block: int, pause_us: int, meetings: int
) -> None:
    """Many meetings over the same flags, never reset, and what was written before is read after."""
    flags = windows(peers)
    out = np.full(2, UNSET, dtype=np.uint64)
    library.meet_often(block, address(addresses(flags)), *sizes(peers, meetings, pause_us, peers), address(out))
    assert list(out) == [0, 0]
    for own in flags:
        assert list(own) == [meetings] * peers + [UNSET]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_leaves_before_all_came_however_late(library: ctypes.CDLL, seed: int) -> None:
    """Pauses much longer than a meeting takes."""
    out = np.full(2, UNSET, dtype=np.uint64)
    library.meet_often(4, address(addresses(windows(3))), *sizes(3, 40, 20_000, seed), address(out))
    assert list(out) == [0, 0]


@pytest.mark.parametrize(
    ("peers", "absent"), [(2, [0]), (2, [1]), (3, [2]), (8, [0]), (8, [5]), (8, [7, 2]), (8, [1, 3, 4, 6])]
)
def test_who_does_not_come_is_named_by_all_others(library: ctypes.CDLL, peers: int, absent: list[int]) -> None:
    flags = windows(peers)
    assert not meet(library, flags, epoch=1).status.any()
    timeout_s = 0.2
    meeting = meet(library, flags, 2, absent, timeout_s)
    for rank in range(peers):
        if rank in absent:
            assert meeting.status[rank] == UNSET
        else:
            assert meeting.status[rank] == 1 + min(absent)
            assert list(meeting.seen[rank]) == [1 if peer in absent else 2 for peer in range(peers)]
            assert timeout_s <= meeting.waited_s[rank] < 30


def test_a_rank_that_was_late_is_in_time_for_the_next_meeting(library: ctypes.CDLL) -> None:
    """It even comes to the one that it missed, where the others' flags still are."""
    flags = windows(3)
    assert list(meet(library, flags, 1, absent=[1], timeout_s=0.1).status) == [2, UNSET, 2]
    assert list(meet(library, flags, 1, absent=[0, 2]).status) == [UNSET, 0, UNSET]
    assert list(meet(library, flags, 2).status) == [0, 0, 0]


def test_nobody_waits_for_the_timeout_when_all_come(library: ctypes.CDLL) -> None:
    start = time.monotonic()
    assert not meet(library, windows(3), epoch=1, timeout_s=600).status.any()
    assert time.monotonic() - start < 60


@given(
    st.integers(1, 8).flatmap(lambda peers: st.lists(st.integers(0, 4), min_size=peers, max_size=peers)),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_the_status_is_the_references(library: ctypes.CDLL, came: list[int], epoch: int, block: int) -> None:
    """Rank 0 with no time to wait: its flags are as they are, but for its own."""
    peers = len(came)
    flags = windows(peers)
    flags[0][:-1] = came
    own = np.array([epoch, *came[1:]], dtype=np.uint64)
    library.status_reference.restype = ctypes.c_ulonglong
    expected = library.status_reference(address(own), *sizes(peers, epoch))
    missing = [rank for rank, at in enumerate(own) if at < epoch]
    assert expected == (1 + missing[0] if missing else 0)

    meeting = meet(library, flags, epoch, absent=range(1, peers), timeout_s=0, block=block)

    assert meeting.status[0] == expected
    assert list(meeting.seen[0]) == list(own)
    assert list(flags[0]) == [*own, UNSET]
    for other in flags[1:]:
        assert list(other) == [epoch, *[0] * (peers - 1), UNSET], "the others' windows hold rank 0's flag only"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_flags_are_released_and_acquired_at_system_scope(architecture: str) -> None:
    ptx, _ = find_nvrtc().compile((CUDA / "barrier.cu").read_text(), architecture)
    assert "st.release.sys.global.u64" in ptx
    assert "ld.acquire.sys.global.u64" in ptx
    assert "%globaltimer" in ptx
    assert "bar.sync" in ptx or "barrier.sync" in ptx
