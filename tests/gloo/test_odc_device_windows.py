"""Windows in GPUs' memory: all but the GPU itself, with the kernels on CPU threads and memory that ranks map."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from host_device import FOLDER, ONE, HostDevice, HostStream, no_device, open_windows
from ranks import run_ranks
from windows import integers

from profiler.errors import OsdpError
from runtime.failures.peer_faults import PeerLost
from runtime.odc import choose_transport, cupy_device, gpu_windows
from runtime.odc.choose_transport import open_transport, why_no_windows, why_none
from runtime.odc.gpu_windows import COPIED_BYTES, DeviceTransport
from runtime.odc.shared_memory import SharedMemoryTransport
from runtime.odc.windows import WindowSpec

SIZES = (1, 7, 999, 4097)
SPECS = tuple(
    WindowSpec(f"layer {size} {dtype}", size, dtype, size // 3)
    for size in SIZES
    for dtype in (torch.float32, torch.bfloat16)
)
FROZEN = (WindowSpec("frozen", 8, torch.float32, 8),)
STEPS = 12
"""On streams that lag behind."""


def left(prefix: str) -> list[str]:
    """Return the names of memory that was not freed."""
    return [path.name for path in FOLDER.glob(f"{prefix}*")]


# --- what collectives do


def _as_collectives(rank: int, ranks: int, library: Path, prefix: str, ordered: bool) -> tuple[int, int, set[str]]:
    """Publish, pull and push all windows, twice; return what is open and was freed in the end, and the kernels used."""
    device = HostDevice(library, prefix)
    with open_windows(device, SPECS + FROZEN, ordered=ordered) as transport:
        assert device.opened == ranks
        assert transport.device_bytes == sum(path.stat().st_size for path in FOLDER.glob(f"{prefix}-{os.getpid()}-*"))
        for step in range(2):
            shards = [
                [
                    torch.randn(spec.shard_numel, generator=torch.Generator().manual_seed(100 * step + other))
                    for spec in SPECS + FROZEN
                ]
                for other in range(ranks)
            ]
            for window, shard in zip(transport.windows, shards[rank], strict=True):
                window.publish(*torch.split(shard, max(1, shard.numel() // 3)))
            assert transport.barrier(10.0 * rank) == tuple(10.0 * other for other in range(ranks))
            for index, window in enumerate(transport.windows):
                out = torch.full((ranks * window.spec.shard_numel,), float("nan"), dtype=window.spec.dtype)
                window.pull(out)
                assert torch.equal(out, torch.cat([of[index].to(window.spec.dtype) for of in shards]))
                for dtype in (torch.float32, torch.bfloat16, torch.float64):
                    window.push(integers(ranks * window.spec.gradient_numel, rank, step, index, dtype=dtype))
            transport.barrier()
            for index, window in enumerate(transport.windows):
                numel = window.spec.gradient_numel
                pushed = sum(integers(ranks * numel, other, step, index) for other in range(ranks))
                assert isinstance(pushed, torch.Tensor)
                assert torch.equal(window.take_gradient(), 3 * pushed.view(ranks, numel)[rank])
    return device.opened, device.frees, set(device.launched)


@pytest.mark.parametrize(("ranks", "ordered"), [(1, False), (2, False), (3, True)])
def test_windows_do_what_collectives_do(ranks: int, ordered: bool, library: Path, prefix: str) -> None:
    """Adds are atomic where several ranks add to the same place."""
    push = "scatter_accumulate_alone" if ordered else "scatter_accumulate"
    kernels = {"pack_cast_bf16", "pack_cast_fp32", "gather", f"{push}_bf16", f"{push}_fp32", "take_gradient", "barrier"}
    assert run_ranks(_as_collectives, ranks, ranks, library, prefix, ordered) == [(0, 1, kernels)] * ranks
    assert left(prefix) == []


def _trains(rank: int, library: Path, prefix: str) -> int:
    """Do different numbers of micro-batches, with random pauses; every pull and every sum has to be exact."""
    pauses, pulls = Random(rank), 0
    with open_windows(HostDevice(library, prefix), (WindowSpec("a", 301, torch.float32),)) as transport:
        (window,) = transport.windows
        for step in range(8):
            window.publish(integers(301, rank, step))
            transport.barrier()
            counts = [Random(f"{other} {step}").randrange(4) for other in range(2)]
            for micro_batch in range(counts[rank]):
                time.sleep(pauses.random() * 2e-3)
                out = torch.empty(602)
                window.pull(out)
                assert torch.equal(out, torch.cat([integers(301, other, step) for other in range(2)]))
                window.push(integers(602, rank, step, micro_batch))
                pulls += 1
            assert transport.barrier(counts[rank]) == tuple(counts)
            wanted = torch.zeros(602)
            for other in range(2):
                for micro_batch in range(counts[other]):
                    wanted += integers(602, other, step, micro_batch)
            assert torch.equal(window.take_gradient(), wanted.view(2, 301)[rank])
    return pulls


def test_uneven_ranks(library: Path, prefix: str) -> None:
    assert run_ranks(_trains, 2, library, prefix) == [
        sum(Random(f"{rank} {step}").randrange(4) for step in range(8)) for rank in range(2)
    ]


def _ordered(rank: int, library: Path, prefix: str, seed: int) -> bytes:
    """Return the bits of a sum that three ranks push with pauses; it is that in the order of ranks."""
    given = [torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(other)) for other in range(3)]
    with open_windows(HostDevice(library, prefix), ordered=True) as transport:
        for full in given[rank]:
            time.sleep(Random(f"{rank} {seed}").random() * 5e-3)
            transport.windows[0].push(full)
        transport.barrier()
        gradient = transport.windows[0].take_gradient()
    first, second, third = (full[0][rank] + full[1][rank] for full in given)
    assert torch.equal(gradient, first + second + third)
    return gradient.numpy().tobytes()


def test_ordered_sums_have_the_same_bits_in_every_run(library: Path, prefix: str) -> None:
    assert run_ranks(_ordered, 3, library, prefix, 1) == run_ranks(_ordered, 3, library, prefix, 2)


# --- streams


def _on_streams(rank: int, library: Path, prefix: str, joins: bool, ordered: bool) -> int:
    """Publish, push and take on streams that lag behind, in random order; return how many steps were exact."""
    device, order, exact = HostDevice(library, prefix), Random(rank), 0
    # Until all is done: streams that nobody waits for read what they were given, and where that is, late.
    shard, kept = torch.empty(301), list[torch.Tensor]()
    if not joins:
        device.join = lambda: None  # type: ignore[method-assign]
    streams = [HostStream(2 * rank + number) for number in range(2)]
    with open_windows(device, (WindowSpec("a", 301, torch.float32),), ordered=ordered) as transport:
        (window,) = transport.windows
        for step in range(STEPS):
            shard.copy_(integers(301, rank, step))
            out = torch.empty(602)
            with device.on(order.choice(streams)):
                window.publish(shard)
            transport.barrier()
            window.pull(out)
            for micro_batch in range(3):
                kept.append(integers(602, rank, step, micro_batch))
                with device.on(order.choice(streams)):
                    window.push(kept[-1])
            transport.barrier()
            with device.on(stream := order.choice(streams)):
                taken = window.take_gradient()
            stream.synchronize()
            wanted = sum(integers(602, other, step, micro_batch) for other in range(2) for micro_batch in range(3))
            assert isinstance(wanted, torch.Tensor)
            pulled = torch.cat([integers(301, other, step) for other in range(2)])
            exact += torch.equal(out, pulled) and torch.equal(taken, wanted.view(2, 301)[rank])
        for stream in streams:
            stream.synchronize()  # what nobody waited for reads tables of the windows, which are freed next
    return exact


@pytest.mark.parametrize("ordered", [False, True])
def test_barriers_wait_for_all_streams(ordered: bool, library: Path, prefix: str) -> None:
    assert run_ranks(_on_streams, 2, library, prefix, True, ordered) == [STEPS] * 2


def test_without_joining_streams_values_are_wrong(library: Path, prefix: str) -> None:
    """So that the test before can fail."""
    assert max(run_ranks(_on_streams, 2, library, prefix, False, False)) < STEPS


# --- over other groups


def _sums_over_groups(rank: int, library: Path, prefix: str) -> bool:
    """Have a group of each rank alone, and sum up over both; on the CPU and on GPUs."""
    groups = [dist.new_group([other]) for other in range(2)]
    world = dist.group.WORLD
    assert world is not None
    right = True
    for transport in (
        SharedMemoryTransport(groups[rank], SPECS + FROZEN, 60.0),
        DeviceTransport(groups[rank], SPECS + FROZEN, HostDevice(library, prefix), 60.0),
    ):
        with transport:
            for index, window in enumerate(transport.windows):
                window.push(integers(window.spec.gradient_numel, rank, index))
            transport.barrier()
            with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduced:
                transport.all_reduce(world)
            right &= reduced.call_count == 1
            for index, window in enumerate(transport.windows):
                wanted = sum(integers(window.spec.gradient_numel, other, index) for other in range(2))
                assert isinstance(wanted, torch.Tensor)
                right &= torch.equal(window.take_gradient(), wanted)
    return right


def test_all_windows_are_summed_over_groups_at_once(library: Path, prefix: str) -> None:
    assert run_ranks(_sums_over_groups, 2, library, prefix) == [True, True]
    assert left(prefix) == []


# --- GPUs of their own


def _pulls_from_other_gpus(rank: int, library: Path, prefix: str) -> tuple[bool, int, int]:
    """Pull a large and a small window; return whether all was right, and how many copies and gathers it took."""
    device = HostDevice(library, prefix, f"gpu {rank}")
    specs = tuple(WindowSpec(f"of {numel}", numel, torch.float32) for numel in (COPIED_BYTES // 4, 1000))
    with open_windows(device, specs) as transport:
        for window in transport.windows:
            window.publish(integers(window.spec.shard_numel, rank))
        transport.barrier()
        right = True
        for window in transport.windows:
            out = torch.empty(3 * window.spec.shard_numel)
            window.pull(out)
            right &= torch.equal(out, torch.cat([integers(window.spec.shard_numel, other) for other in range(3)]))
        transport.barrier()
    return right, device.launched["copy"], device.launched["gather"]


def test_large_shards_of_other_gpus_are_copied(library: Path, prefix: str) -> None:
    assert run_ranks(_pulls_from_other_gpus, 3, library, prefix) == [(True, 3, 1)] * 3


# --- faults


class Stalled(HostDevice):
    """Does not come to barriers: dies at one, or hangs."""

    dies = False

    def launch(self, kernel: str, *arguments: object) -> None:
        if kernel == "barrier":
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30.0)
        super().launch(kernel, *arguments)  # type: ignore[arg-type]


def _is_told(rank: int, library: Path, prefix: str, how: str) -> tuple[str, float, int, int]:
    """Lose rank 1 at the first meeting; return what rank 0 is told, after how long, and what it has open and freed."""
    device = (Stalled if rank else HostDevice)(library, prefix)
    transport = open_windows(device, timeout_s=1.0 if how in ("hangs", "is late") else 60.0)
    gpu_windows.LEAVE_S = 0.5
    Stalled.dies = how == "dies on the GPU"
    if rank and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank and how == "is late":
        time.sleep(30.0)
    began_s = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        transport.barrier()
    took_s = time.monotonic() - began_s
    with pytest.raises(OsdpError, match="cannot be used any more"):
        transport.windows[0].push(torch.ones(600))
    transport.close()
    return caught.value.what, took_s, device.opened, device.frees


@pytest.mark.parametrize(
    ("how", "told", "frees"),
    [
        ("dies", "rank 1 died", 1),
        ("dies on the GPU", "rank 1 died", 1),
        ("is late", "rank 1 did not reach the barrier", 0),
        ("hangs", "rank 1 reached the barrier, but its GPU did not", 0),
    ],
)
def test_a_lost_rank_is_named(how: str, told: str, frees: int, library: Path, prefix: str) -> None:
    """Memory that a rank that hangs may still use stays; the dead use none. A next run is none the worse."""
    what, took_s, opened, freed = run_ranks(_is_told, 2, library, prefix, how, lost=(1,))[0]
    assert told in what
    assert took_s < 15.0  # of the 60 s for the dead, and of the 30 s that the others sleep
    assert (opened, freed) == (1 - frees, frees)
    for name in left(prefix):  # a driver would have freed it
        (FOLDER / name).unlink()
    run_ranks(_as_collectives, 2, 2, library, prefix, False)
    assert left(prefix) == []


def _cannot_open(rank: int, library: Path, prefix: str) -> tuple[str, int]:
    device = HostDevice(library, prefix, refuses="open" if rank else "")
    with pytest.raises(OsdpError) as caught:
        open_windows(device)
    return str(caught.value), device.opened


def test_what_one_rank_cannot_open_none_keeps(library: Path, prefix: str) -> None:
    for told, opened in run_ranks(_cannot_open, 2, library, prefix):
        assert "rank 1 could not open the windows of the others" in told
        assert "invalid device context" in told
        assert opened == 0
    assert left(prefix) == []


# --- whether there can be windows


def _without_cupy(rank: int) -> tuple[str, str]:
    """Return why there are no windows on GPUs, asked before and told by who opens them, if only rank 1 lacks CuPy."""
    group = dist.group.WORLD
    assert group is not None
    if rank == 1:
        vars(cupy_device)["import_module"] = no_device
    else:
        vars(choose_transport)["CupyDevice"] = object
    reason = why_none(group, "cuda")
    with pytest.raises(OsdpError) as caught:
        open_transport(group, ONE, "cuda", 60.0)
    return reason, caught.value.what


def test_one_rank_without_cupy_stops_all() -> None:
    told = ("rank 1: CuPy cannot be loaded (No module named 'cupy')", "CuPy cannot be loaded")
    assert run_ranks(_without_cupy, 2) == [told] * 2


class WithoutAtomics(HostDevice):
    """A GPU that loses what others add at once, and says so or, where it is not seen, cannot be asked."""

    def __init__(self, library: Path, prefix: str, *, seen: bool) -> None:
        super().__init__(library, prefix, f"gpu {dist.get_rank()}")
        self.seen = seen

    def obstacle(self, identity: str, needs_atomics: bool) -> str:
        return "has no native atomics" if self.seen and needs_atomics else ""

    def launch(
        self, kernel: str, grid: Any, threads: int, arguments: Sequence[int], subject: int | None = None
    ) -> None:
        if kernel == "scatter_accumulate_fp32" and self.launched[kernel] == 5:
            arguments = (*arguments[:3], 0, *arguments[4:])  # adds nothing
        super().launch(kernel, grid, threads, arguments, subject)


def _asks_without_atomics(rank: int, library: Path, prefix: str) -> list[str]:
    """Ask about GPUs without atomics between them: seen and not seen, for one accumulator and for ordered ones."""
    group = dist.group.WORLD
    assert group is not None
    return [
        why_no_windows(group, partial(WithoutAtomics, library, prefix, seen=seen), ordered)
        for seen in (True, False)
        for ordered in (False, True)
    ]


def test_ordered_windows_need_no_atomics(library: Path, prefix: str) -> None:
    """And what cannot be asked is found out by a trial."""
    wrong = "rank 0: a trial window returned other values than were sent"
    wanted = ["rank 0: has no native atomics", "", wrong, ""]
    assert run_ranks(_asks_without_atomics, 2, library, prefix) == [wanted] * 2
    assert left(prefix) == []


class Noting(HostDevice):
    """Rank 2 has another GPU than ranks 0 and 1; notes which windows pushes take for near."""

    def __init__(self, library: Path, prefix: str) -> None:
        super().__init__(library, prefix, "gpu 1" if dist.get_rank() == 2 else "gpu 0")
        self.near: list[int] = []

    def launch(
        self, kernel: str, grid: Any, threads: int, arguments: Sequence[int], subject: int | None = None
    ) -> None:
        if kernel.startswith("scatter_accumulate"):
            self.near.append(arguments[-1])
        super().launch(kernel, grid, threads, arguments, subject)


def _pushes(rank: int, library: Path, prefix: str) -> list[int]:
    device = Noting(library, prefix)
    with open_windows(device, (WindowSpec("a", 5, torch.float32),)) as transport:
        transport.windows[0].push(torch.ones(15))
        transport.barrier()
        assert transport.windows[0].take_gradient().tolist() == [3.0] * 5
    return device.near


def test_pushes_know_which_windows_are_in_the_memory_of_their_gpu(library: Path, prefix: str) -> None:
    assert run_ranks(_pushes, 3, library, prefix) == [[0b011], [0b011], [0b100]]


def _asks(rank: int, library: Path, prefix: str) -> list[str]:
    """Ask about GPUs of which that of rank 1 is missing, out of reach, not open or broken; then about good ones."""
    group = dist.group.WORLD
    assert group is not None
    reasons = [why_no_windows(group, no_device if rank else lambda: HostDevice(library, prefix))]
    for refuses in ("peers", "open", "gather", ""):
        device = HostDevice(library, prefix, f"gpu {rank}", refuses if rank else "")
        reasons.append(why_no_windows(group, partial(HostDevice.itself, device)))
        assert device.opened == 0
    return reasons


def test_all_ranks_agree_on_why_there_can_be_no_windows(library: Path, prefix: str) -> None:
    here, there = run_ranks(_asks, 2, library, prefix)
    assert here == there
    missing, peers, ipc, kernel, nothing = here
    assert missing == "rank 1: CuPy cannot be loaded (No module named 'cupy')"
    assert peers == "rank 1: cannot reach gpu 0"
    assert "invalid device context" in ipc
    assert kernel == "rank 1: windows cannot be made: an illegal memory access was encountered"
    assert nothing == ""
    assert left(prefix) == []


# --- what `osdp profile` times


def _exchanges(rank: int, library: Path, prefix: str) -> tuple[set[str], list[list[float]], str]:
    """Pull, push and publish as a profile of GPUs does; return the kernels, what was pulled, and why none are timed."""
    from osdp.profile import runtime_exchanges, session

    HostDevice.most = (1, 1)
    device, group = HostDevice(library, prefix), dist.group.WORLD
    vars(runtime_exchanges)["open_windows"] = lambda group, specs, _: DeviceTransport(group, specs, device)
    pulled = []
    for operation in ("pull", "push", "publish"):
        exchange = runtime_exchanges.prepare(operation, "native", group, 64, device.torch_device, sets=2)
        for turn in range(3):
            got = exchange(turn)
            pulled += [torch.stack(got).unique().tolist()] if operation == "pull" else []
        del exchange
    vars(session)["why_none_anywhere"] = lambda groups, device_type: f"{groups[0][0].size()} ranks on {device_type}"
    return set(device.launched), pulled, session._why_no_windows(1, 2, torch.device("cuda"))


def test_a_profile_times_windows_of_gpus(library: Path, prefix: str) -> None:
    kernels = {"pack_cast_fp32", "gather", "scatter_accumulate_fp32", "take_gradient", "barrier"}
    assert run_ranks(_exchanges, 2, library, prefix) == [(kernels, [[1.0, 2.0]] * 3, "2 ranks on cuda")] * 2
    assert left(prefix) == []
