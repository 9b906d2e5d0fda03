"""Windows in shared memory: they gather and reduce what collectives do, without waiting."""

from __future__ import annotations

import os
import signal
import time
from random import Random

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from windows import SPECS, integers, open_transport, sums_large_windows

from runtime.failures.peer_faults import PeerLost
from runtime.odc.shared_memory import SharedMemoryTransport
from runtime.odc.windows import WindowSpec
from runtime.torch_compat import all_gather, reduce_scatter

# --- what collectives do


def _gathers(rank: int, world_size: int) -> int:
    compared = 0
    group = dist.group.WORLD
    assert group is not None
    with open_transport() as transport:
        shards = [torch.randn(window.spec.shard_numel) for window in transport.windows]
        for window, shard in zip(transport.windows, shards, strict=True):
            window.publish(*shard.split(max(1, shard.numel() // 3)))
        transport.barrier()
        for window, shard in zip(transport.windows, shards, strict=True):
            cast = shard.to(window.spec.dtype)
            wanted, pulled = torch.empty(2, world_size * cast.numel(), dtype=cast.dtype)
            all_gather(wanted, cast, group)
            window.pull(pulled)
            assert torch.equal(pulled, wanted)
            compared += 1
    return compared


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pull_is_an_all_gather(world_size: int) -> None:
    assert run_ranks(_gathers, world_size, world_size) == [len(SPECS)] * world_size


def _reduces(rank: int, world_size: int, ordered: bool) -> int:
    """Push fp32 and bf16 gradients at once from all ranks, for several steps of a window."""
    compared = 0
    group = dist.group.WORLD
    assert group is not None
    with open_transport(ordered=ordered) as transport:
        for step in range(3):
            pushed = []
            for index, window in enumerate(transport.windows):
                dtype = (torch.float32, torch.bfloat16)[step % 2]
                full = integers(world_size * window.spec.shard_numel, rank, step, index, dtype=dtype)
                window.push(full)
                pushed.append(full.float())
            transport.barrier()
            for window, full in zip(transport.windows, pushed, strict=True):
                wanted = torch.empty(window.spec.shard_numel)
                reduce_scatter(wanted, full, dist.ReduceOp.SUM, group)
                assert torch.equal(window.take_gradient(), wanted)
                compared += 1
            transport.barrier()
    return compared


@pytest.mark.parametrize(("world_size", "ordered"), [(1, False), (2, False), (3, False), (3, True)])
def test_push_is_a_reduce_scatter(world_size: int, ordered: bool) -> None:
    assert run_ranks(_reduces, world_size, world_size, ordered) == [3 * len(SPECS)] * world_size


def test_large_windows() -> None:
    assert run_ranks(sums_large_windows, 2) == [True] * 2


# --- no rendezvous between meetings


def _trains(rank: int, world_size: int, steps: int, ordered: bool) -> int:
    """Do different numbers of micro-batches, with random pauses; every pull and every sum has to be exact."""
    specs = tuple(WindowSpec(str(size), size, torch.float32) for size in (5, 3001))
    pauses = Random(rank)
    pulls = 0
    with open_transport(specs, ordered=ordered) as transport:
        for step in range(steps):
            for window in transport.windows:
                window.publish(integers(window.spec.shard_numel, rank, step))
            transport.barrier()
            micro_batches = [Random(f"{other} {step}").randrange(4) for other in range(world_size)]
            for micro_batch in range(micro_batches[rank]):
                for window in transport.windows:
                    time.sleep(pauses.random() * 2e-3)
                    size = window.spec.shard_numel
                    out = torch.full((world_size * size,), float("nan"))
                    window.pull(out)
                    assert torch.equal(out, torch.cat([integers(size, other, step) for other in range(world_size)]))
                    window.push(integers(world_size * size, rank, step, micro_batch))
                    pulls += 1
            notes = transport.barrier(micro_batches[rank])
            assert notes == tuple(micro_batches)
            for window in transport.windows:
                size = window.spec.shard_numel
                full = torch.zeros(world_size * size)
                for other in range(world_size):
                    for micro_batch in range(micro_batches[other]):
                        full += integers(world_size * size, other, step, micro_batch)
                assert torch.equal(window.take_gradient(), full.view(world_size, size)[rank])
    return pulls


@pytest.mark.parametrize(("world_size", "ordered"), [(2, False), (4, False), (3, True)])
def test_many_steps_of_uneven_ranks(world_size: int, ordered: bool) -> None:
    pulls = run_ranks(_trains, world_size, world_size, 40, ordered)
    wanted = [2 * sum(Random(f"{rank} {step}").randrange(4) for step in range(40)) for rank in range(world_size)]
    assert pulls == wanted


def _sleeper(rank: int) -> tuple[float, float]:
    """Return how long 20 pulls and pushes took while rank 1 slept for 4 s, and how long the meeting after it."""
    with open_transport((WindowSpec("a", 5000, torch.float32),)) as transport:
        window = transport.windows[0]
        window.publish(torch.ones(5000))
        transport.barrier()
        started_s = time.monotonic()
        if rank == 1:
            time.sleep(4.0)
        for _ in range(20):
            window.pull(torch.empty(10000))
            window.push(torch.ones(10000))
        worked_s = time.monotonic() - started_s
        transport.barrier()
        met_s = time.monotonic() - started_s - worked_s
        assert torch.equal(window.take_gradient(), torch.full((5000,), 40.0))
    return worked_s, met_s


def test_nobody_waits_for_a_sleeper_before_the_meeting() -> None:
    (worked_s, met_s), (slept_s, _) = run_ranks(_sleeper, 2)
    assert worked_s < 2.0
    assert slept_s >= 4.0
    assert met_s > 1.5


def _ordered_bits(rank: int, seed: int) -> bytes:
    """Return the bits of a gradient of three steps, summed in the order of ranks, whatever the order of pushes."""
    pauses = Random(f"{rank} {seed}")
    with open_transport((WindowSpec("a", 2003, torch.float32),), ordered=True) as transport:
        window = transport.windows[0]
        bits = b""
        for step in range(3):
            given = [
                [
                    torch.randn(4, 2003, generator=torch.Generator().manual_seed(1000 * step + 10 * other + k))
                    for k in range(1 + other)
                ]
                for other in range(4)
            ]
            for mine in given[rank]:
                time.sleep(pauses.random() * 5e-3)
                window.push(mine.view(-1))
            transport.barrier()
            gradient = window.take_gradient()
            wanted = torch.zeros(2003)
            for other in range(4):
                of_rank = given[other][0][rank].clone()
                for later in given[other][1:]:
                    of_rank += later[rank]
                wanted = wanted + of_rank
            assert torch.equal(gradient, wanted)
            bits += gradient.numpy().tobytes()
            transport.barrier()
    return bits


def test_ordered_sums_have_the_same_bits_in_every_run() -> None:
    assert run_ranks(_ordered_bits, 4, 1) == run_ranks(_ordered_bits, 4, 2)


def _in_groups(rank: int) -> list[float]:
    """Open windows over neighbours only; return what was pulled."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with SharedMemoryTransport(groups[rank // 2], [WindowSpec("a", 1, torch.float32)], 60.0) as transport:
        transport.windows[0].publish(torch.tensor([float(rank)]))
        transport.barrier()
        out = torch.empty(2)
        transport.windows[0].pull(out)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            with pytest.raises(PeerLost, match="rank 3 died"):
                transport.barrier()
        return out.tolist()


def test_groups_have_windows_of_their_own() -> None:
    """Ranks are named by their number in the world."""
    assert run_ranks(_in_groups, 4, lost=(3,)) == [[0, 1], [0, 1], [2, 3], None]
