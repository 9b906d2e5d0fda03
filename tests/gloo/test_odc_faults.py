"""Windows whose ranks die, stop, leave, differ or misuse them: everybody is told, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from windows import open_transport, sums_large_windows

from profiler.errors import FaultError, OsdpError
from runtime.failures.peer_faults import PeerLost
from runtime.odc import shared_memory, shared_segment
from runtime.odc.shared_memory import can_share
from runtime.odc.windows import WindowSpec

ONE = (WindowSpec("a", 3500, torch.float32),)


def names_left(*pids: int) -> list[Path]:
    """Return the files that some processes have left."""
    return [path for pid in pids for path in shared_segment.FOLDER.glob(f"{shared_segment.PREFIX}{pid}-*")]


def all_pids() -> list[int]:
    """Return the processes of all ranks."""
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


# --- ranks that are lost


def _loses_one(rank: int, how: str) -> tuple[str, float]:
    """Lose rank 2 between two barriers; return what the others are told, and after how long."""
    transport = open_transport(ONE, timeout_s=1.0 if how == "stalls" else 30.0)
    window = transport.windows[0]
    window.publish(torch.ones(3500))
    transport.barrier()
    if rank == 2 and how == "dies, but not its child" and os.fork() == 0:
        time.sleep(20.0)
        os._exit(0)
    if rank == 2 and how.startswith("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2 and how == "stalls":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2:
        transport.close()
        return "", 0.0
    window.pull(torch.empty(3 * 3500))
    window.push(torch.ones(3 * 3500))
    started_s = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        transport.barrier()
    waited_s = time.monotonic() - started_s
    for action in (transport.barrier, window.take_gradient):
        with pytest.raises(OsdpError, match="cannot be used any more"):
            action()
    transport.close()
    return str(caught.value), waited_s


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", "rank 2 died"),
        ("dies, but not its child", "rank 2 died"),
        ("closes", "rank 2 closed its windows"),
        ("stalls", "rank 2 did not reach the barrier"),
    ],
)
def test_a_lost_rank_is_named_on_every_other(how: str, told: str) -> None:
    results = run_ranks(_loses_one, 3, how, lost=(2,))
    for rank, (message, waited_s) in enumerate(results[:2]):
        assert message.startswith(f"a barrier of odc failed: {told}\n"), message
        assert f"rank {rank} waited at barrier 2" in message
        if how == "stalls":
            assert 0.9 < waited_s < 15.0
            assert "within 1 s" in message
        else:
            assert waited_s < 15.0  # much less than the timeout


def _comes_late(rank: int) -> str:
    """Reach a barrier that others have given up."""
    with open_transport(ONE) as transport:
        transport.barrier()
        if rank == 0:
            with pytest.raises(PeerLost, match="rank 1 did not reach the barrier"):
                transport.barrier(timeout_s=0.2)
            dist.barrier()
            dist.barrier()
            return ""
        dist.barrier()
        with pytest.raises(PeerLost) as caught:
            transport.barrier()
        dist.barrier()
        return str(caught.value)


def test_who_comes_too_late_is_told_so() -> None:
    assert "rank 0 gave up waiting" in run_ranks(_comes_late, 2)[1]


def _is_ahead(rank: int) -> None:
    """Leave a barrier late, when a faster rank has already given up the one after it."""
    with open_transport(ONE) as transport:
        if rank == 0:
            transport._segments[0].state = 2
        transport.barrier()
        dist.barrier()
        if rank == 1:
            with pytest.raises(PeerLost, match="rank 0 gave up waiting"):
                transport.barrier()
        dist.barrier()


def test_a_barrier_that_all_reached_holds_though_a_later_one_failed() -> None:
    run_ranks(_is_ahead, 2)


def _in_a_push(rank: int, kills: bool) -> str:
    """Have rank 1 stop, or die, while it holds a chunk of rank 0's accumulator."""
    transport = open_transport(ONE, timeout_s=0.5)
    if rank == 1:
        assert transport._segments[0].try_lock(*transport._range(0, 0, 1000))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL if kills else signal.SIGSTOP)
    dist.barrier()
    if kills:
        transport.windows[0].push(torch.ones(7000))
        return ""
    with pytest.raises(PeerLost) as caught:
        transport.windows[0].push(torch.ones(7000))
    with pytest.raises(OsdpError, match="cannot be used any more"):
        transport.barrier()
    return str(caught.value)


def test_a_rank_that_stops_inside_a_push_is_named() -> None:
    assert "rank 1 is stuck" in run_ranks(_in_a_push, 2, False, lost=(1,))[0]


def test_the_locks_of_the_dead_are_free() -> None:
    assert run_ranks(_in_a_push, 2, True, lost=(1,))[0] == ""


# --- refusals


def _differs(rank: int, spec: WindowSpec, ordered: bool) -> str:
    own = (ONE[0], spec) if rank == 1 else (ONE[0], WindowSpec("b", 10, torch.float32))
    with pytest.raises(OsdpError) as caught:
        open_transport(own, ordered=ordered and rank == 1)
    assert not names_left(os.getpid())
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "ordered", "words"),
    [
        (WindowSpec("b", 11, torch.float32), False, "'b': shards of 11 x torch.float32 on rank 1"),
        (WindowSpec("b", 10, torch.bfloat16), False, "'b': shards of 10 x torch.bfloat16 on rank 1"),
        (WindowSpec("b", 10, torch.float32), True, "ordered, 2 windows on rank 1"),
    ],
)
def test_different_windows_are_refused(spec: WindowSpec, ordered: bool, words: str) -> None:
    for message in run_ranks(_differs, 3, spec, ordered):
        assert message.startswith("the windows of rank 1 differ from those of rank 0")
        assert words in message


def _elsewhere(rank: int, place: tuple[tuple[str, ...], str]) -> tuple[str, str]:
    """Return what `can_share` says before and after rank 1 is elsewhere."""
    group = dist.group.WORLD
    assert group is not None
    before = can_share(group)
    if rank == 1:
        boot, *_ = shared_memory._shared_place()[0]
        where = tuple(boot if part == "same" else part for part in place[0])
        shared_memory._shared_place = lambda: (where, place[1])
    after = can_share(group)
    with pytest.raises(OsdpError, match="cannot share memory"):
        open_transport(ONE)
    return before, after


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ((("other", "1", "1"), ""), "rank 1 is on another machine than rank 0"),
        ((("same", "1", "1"), ""), "rank 1 has another /dev/shm than rank 0 (another container?)"),
        (((), "runs on darwin, not Linux"), "rank 1 runs on darwin, not Linux"),
    ],
)
def test_ranks_without_common_memory_are_refused(place: tuple[tuple[str, ...], str], reason: str) -> None:
    assert run_ranks(_elsewhere, 2, place) == [("", reason)] * 2


def _no_room(rank: int) -> str:
    with pytest.raises(OsdpError) as caught:
        open_transport((WindowSpec("huge", 1 << 44, torch.float32),))
    assert not names_left(os.getpid())
    return str(caught.value)


def test_too_little_shared_memory_is_an_error_and_not_a_crash() -> None:
    for message in run_ranks(_no_room, 2):
        assert "/dev/shm is too small for the windows" in message
        assert "131072.00 GiB for each rank" in message  # 2^44 x (4 + 4) bytes


@pytest.mark.parametrize(
    ("number", "size_bytes", "is_fault"),
    [(errno.ENOSPC, 1 << 60, False), (errno.ENOSPC, 4096, True), (errno.EFBIG, 4096, True), (errno.EDQUOT, 4096, True)],
)
def test_what_may_go_in_another_time_is_a_fault(number: int, size_bytes: int, is_fault: bool) -> None:
    """And not bad input, which `osdp train --restarts` would not try again."""
    full = OSError(number, os.strerror(number))
    with patch.object(os, "posix_fallocate", side_effect=full), pytest.raises(OsdpError) as caught:
        shared_segment.Segment.create(size_bytes)
    assert isinstance(caught.value, FaultError) == is_fault
    assert not names_left(os.getpid())


def _misused(rank: int) -> None:
    transport = open_transport(ONE)
    window = transport.windows[0]
    out = torch.empty(3500)
    with pytest.raises(OsdpError, match="never published"):
        window.pull(out)
    window.publish(out)
    with pytest.raises(OsdpError, match="pull after publish without a barrier"):
        window.pull(out)
    transport.barrier()
    window.pull(out)
    with pytest.raises(OsdpError, match="publish after pull without a barrier"):
        window.publish(out)
    window.push(out)
    with pytest.raises(OsdpError, match="take_gradient after push without a barrier"):
        window.take_gradient()
    transport.barrier()
    window.take_gradient()
    with pytest.raises(OsdpError, match="push after take_gradient without a barrier"):
        window.push(out)
    with pytest.raises(OsdpError, match="is not that of window"):
        window.pull(out.bfloat16())
    for wrong in (torch.empty(3501), torch.empty(7000)[::2], torch.empty(3500, device="meta")):
        with pytest.raises(OsdpError, match="3500 contiguous elements on cpu"):
            window.publish(wrong)
    transport.close()
    transport.close()
    with pytest.raises(OsdpError, match="they are closed"):
        window.pull(out)


def test_misuse_is_refused() -> None:
    run_ranks(_misused, 1)
    for numel, dtype in ((0, torch.float32), (1, torch.float64)):
        with pytest.raises(OsdpError, match="window 'x'"):
            WindowSpec("x", numel, dtype)


# --- nothing is left


def mapped() -> int:
    """Return how many windows' files are part of this process' memory."""
    return Path("/proc/self/maps").read_text().count(f"{shared_segment.FOLDER}/{shared_segment.PREFIX}")


def _lets_go(rank: int, fails: bool) -> None:
    """Have no named file as soon as the windows are open, and nothing at all after them."""
    files = len(os.listdir("/proc/self/fd"))
    pids = all_pids()
    try:
        with open_transport(ONE) as transport:
            dist.barrier()
            assert names_left(*pids) == []
            assert mapped() == 3
            transport.windows[0].push(torch.ones(3 * 3500))
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert mapped() == 0
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_after_the_windows(fails: bool) -> None:
    run_ranks(_lets_go, 3, fails)


def _killed(rank: int, folder: Path, when: str) -> None:
    """Note the process and kill it: all ranks while they train, or one that has just made its file."""
    (folder / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if when == "at the start":
        if rank == 0:
            shared_segment.Segment.create(1 << 20)
            os.kill(os.getpid(), signal.SIGKILL)
        open_transport(ONE)
    open_transport(ONE).windows[0].push(torch.ones(7000))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_crash_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(_killed, 2, tmp_path, "in training")
    assert names_left(*(int((tmp_path / str(rank)).read_text()) for rank in range(2))) == []
    assert run_ranks(sums_large_windows, 2) == [True] * 2


def _apart(rank: int, prefix: str, task: Callable[..., Any], *arguments: Any) -> Any:
    """Do something with shared memory of another name, so that no rank of a test beside this one removes it."""
    with patch.object(shared_segment, "PREFIX", prefix):
        return task(rank, *arguments)


def test_the_next_run_removes_what_a_crash_at_the_start_left(tmp_path: Path) -> None:
    prefix = f"osdp-test-{os.getpid()}-"
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(_apart, 2, prefix, _killed, tmp_path, "at the start")
    dead = int((tmp_path / "0").read_text())
    assert len(list(shared_segment.FOLDER.glob(f"{prefix}{dead}-*"))) == 1
    assert run_ranks(_apart, 2, prefix, sums_large_windows) == [True] * 2
    assert list(shared_segment.FOLDER.glob(f"{prefix}*")) == []
