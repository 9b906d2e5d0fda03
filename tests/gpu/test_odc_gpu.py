"""One-sided communication on a GPU that ranks share: windows, faults, leaks, streams, and the cache of kernels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_gpu import missing
from ranks import run_ranks
from windows import integers

from profiler.errors import OsdpError
from runtime.failures.peer_faults import PeerLost
from runtime.odc.choose_transport import open_transport, why_none
from runtime.odc.cupy_device import CupyDevice
from runtime.odc.windows import Transport, WindowSpec

CHECKOUT = Path(__file__).resolve().parents[2]
SIZES = (1, 7, 999, (1 << 20) + 3)
SPECS = tuple(
    WindowSpec(f"layer {size} {dtype}", size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)
)


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def open_windows(kind: str, specs: tuple[WindowSpec, ...], timeout_s: float = 60.0, ordered: bool = False) -> Transport:
    """Open windows over all ranks, for tensors of a kind of device."""
    group = dist.group.WORLD
    assert group is not None
    assert why_none(group, kind) == ""
    return open_transport(group, specs, kind, timeout_s, ordered)


def _as_collectives(rank: int, ranks: int, kind: str, ordered: bool) -> int:
    """Publish, pull and push every window twice; return how many were compared."""
    compared = 0
    with open_windows(kind, SPECS, ordered=ordered) as transport:
        for step in range(2):
            shards = [
                [
                    torch.randn(spec.shard_numel, generator=torch.Generator().manual_seed(100 * step + other))
                    for spec in SPECS
                ]
                for other in range(ranks)
            ]
            for window, shard in zip(transport.windows, shards[rank], strict=True):
                window.publish(*torch.split(shard.to(kind), max(1, shard.numel() // 3)))
            assert transport.barrier(rank) == tuple(range(ranks))
            for index, window in enumerate(transport.windows):
                out = torch.full((ranks * window.spec.shard_numel,), float("nan"), dtype=window.spec.dtype, device=kind)
                window.pull(out)
                assert torch.equal(out.cpu(), torch.cat([of[index].to(window.spec.dtype) for of in shards]))
                for dtype in (torch.float32, torch.bfloat16):
                    window.push(integers(out.numel(), rank, step, index, dtype=dtype).to(kind))
            transport.barrier()
            for index, window in enumerate(transport.windows):
                wanted = torch.zeros(window.spec.shard_numel)
                for other in range(ranks):
                    wanted += 2 * integers(ranks * wanted.numel(), other, step, index).view(ranks, -1)[rank]
                assert torch.equal(window.take_gradient().cpu(), wanted)
                compared += 1
    return compared


@pytest.mark.parametrize(("ranks", "ordered"), [(1, False), (2, False), (3, True), (4, False), (4, True)])
def test_windows_do_what_collectives_do(ranks: int, ordered: bool) -> None:
    assert run_ranks(_as_collectives, ranks, ranks, "cuda", ordered) == [2 * len(SPECS)] * ranks


def _ordered(rank: int, kind: str, seed: int) -> bytes:
    """Return the bits of what four ranks pushed, in another order of time for each seed and on streams of their own."""
    given = [torch.randn(3, 4, 5003, generator=torch.Generator().manual_seed(other)) for other in range(4)]
    with open_windows(kind, (WindowSpec("a", 5003, torch.float32),), ordered=True) as transport:
        for full in given[rank].to(kind):
            time.sleep(((rank + 1) * seed % 5) * 3e-3)
            with torch.cuda.stream(torch.cuda.Stream() if kind == "cuda" else None):  # type: ignore[no-untyped-call]
                transport.windows[0].push(full.clone())
        transport.barrier()
        gradient = transport.windows[0].take_gradient().cpu()
    first, *others = (full[0][rank] + full[1][rank] + full[2][rank] for full in given)
    for other in others:
        first = first + other
    assert torch.equal(gradient, first)
    return gradient.numpy().tobytes()


def test_ordered_sums_have_the_same_bits_in_every_run() -> None:
    assert run_ranks(_ordered, 4, "cuda", 2) == run_ranks(_ordered, 4, "cuda", 3)


def _uneven(rank: int, ranks: int, kind: str, ordered: bool) -> None:
    """Push as often as the rank's number says, from no times on."""
    numel = 1009
    with open_windows(kind, (WindowSpec("a", numel, torch.float32),), ordered=ordered) as transport:
        for step in range(3):
            for k in range(rank):
                transport.windows[0].push(integers(ranks * numel, rank, step, k).to(kind))
            transport.barrier()
            pushed = [integers(ranks * numel, other, step, k) for other in range(ranks) for k in range(other)]
            wanted = torch.stack(pushed).sum(0).view(ranks, numel)[rank]
            assert torch.equal(transport.windows[0].take_gradient().cpu(), wanted)
            transport.barrier()  # nobody pushes before all have taken


@pytest.mark.parametrize("ordered", [False, True], ids=["odc", "odc_ordered"])
def test_windows_of_ranks_that_push_unequally_often(ordered: bool) -> None:
    run_ranks(_uneven, 3, 3, "cuda", ordered)


# --- faults and leaks


def _is_told(rank: int, kind: str, how: str) -> str:
    transport = open_windows(kind, SPECS[:1], timeout_s=60.0 if how == "dies" else 1.0)
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # its first launch loads the kernel, which may take a second
    transport.barrier(timeout_s=60.0)
    if rank and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank and how == "is late":
        time.sleep(60.0)
    if rank and how == "hangs":
        torch.cuda._sleep(20 * 10**9)  # type: ignore[no-untyped-call]  # ten seconds and more of the GPU
    with pytest.raises(PeerLost) as caught:
        transport.barrier()
    with pytest.raises(OsdpError, match="cannot be used any more"):
        transport.windows[0].take_gradient()
    transport.close()
    return caught.value.what


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", "rank 1 died"),
        ("is late", "rank 1 did not reach the barrier"),
        ("hangs", "rank 1 reached the barrier, but its GPU did not"),
    ],
)
def test_a_lost_rank_is_named_and_a_next_run_works(how: str, told: str) -> None:
    assert told in run_ranks(_is_told, 2, "cuda", how, lost=(1,))[0]
    assert run_ranks(_as_collectives, 2, 2, "cuda", False) == [2 * len(SPECS)] * 2


def _left_bytes(rank: int, expandable: bool) -> int:
    """Return by how many bytes less are free after windows were opened and closed nine times more."""
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    large = (WindowSpec("large", 16 << 20, torch.float32),)  # 128 MiB on each rank, with its accumulator
    free = []
    for _ in range(10):
        open_windows("cuda", large).close()
        dist.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        dist.barrier()
    return free[0] - free[-1]


@pytest.mark.parametrize("expandable", [False, True])
def test_windows_leave_no_memory_behind(expandable: bool) -> None:
    """Of three tries in one, as other processes may take memory meanwhile; what leaks does so in each."""
    tries = (max(run_ranks(_left_bytes, 2, expandable)) for _ in range(3))
    assert any(left_bytes <= 64 << 20 for left_bytes in tries)


# --- streams


def _on_streams(rank: int, kind: str, rounds: int, joins: bool) -> int:
    """Publish, push and take on streams that lag behind, in random order; return how many rounds were exact."""
    if not joins:
        CupyDevice.join = lambda self: None  # type: ignore[method-assign]
    numel, order, exact = 20011, Random(rank), 0
    streams: list[Any] = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    with open_windows(kind, (WindowSpec("a", numel, torch.float32),)) as transport:
        (window,) = transport.windows
        for number in range(rounds):
            shard = integers(numel, rank, number).to(kind)
            pushed = [integers(2 * numel, rank, number, k).to(kind) for k in range(3)]
            torch.cuda.synchronize()
            with lagging(order.choice(streams), order):
                window.publish(shard)
            transport.barrier()
            out = torch.empty(2 * numel, device=kind)
            window.pull(out)
            for full in pushed:
                with lagging(order.choice(streams), order):
                    window.push(full)
            transport.barrier()
            with lagging(stream := order.choice(streams), order):
                taken = window.take_gradient()
            stream.synchronize()
            pulled = torch.cat([integers(numel, other, number) for other in range(2)])
            wanted = torch.stack([integers(2 * numel, other, number, k) for other in range(2) for k in range(3)]).sum(0)
            exact += torch.equal(out.cpu(), pulled) and torch.equal(taken.cpu(), wanted.view(2, numel)[rank])
    return exact


@contextmanager
def lagging(stream: Any, order: Random) -> Iterator[None]:
    """Launch on a stream that does something else first, for up to some milliseconds."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(order.randrange(5_000_000))  # type: ignore[no-untyped-call]
        yield


def test_barriers_wait_for_all_streams() -> None:
    assert run_ranks(_on_streams, 2, "cuda", 200, True) == [200, 200]


def test_without_joining_streams_values_are_wrong() -> None:
    """So that the test before can fail."""
    assert max(run_ranks(_on_streams, 2, "cuda", 50, False)) < 50


# --- compiled kernels


def test_kernels_are_compiled_once_for_all(tmp_path: Path) -> None:
    code = "from runtime.odc.cupy_device import CupyDevice; CupyDevice()"
    found = []
    for _ in range(3):
        subprocess.run(
            [sys.executable, "-c", code], cwd=CHECKOUT, check=True, env={**os.environ, "CUPY_CACHE_DIR": str(tmp_path)}
        )
        found.append({path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.cubin")})
        if len(found) == 2:
            next(tmp_path.glob("*.cubin")).write_bytes(b"damaged")
    assert found[0] == found[1]
    assert found[0].keys() == found[2].keys()
    assert len(found[0]) >= 4  # one for each source
