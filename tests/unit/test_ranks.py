"""The starter of ranks: results, and what a failing, dying or hanging rank looks like."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks


def _sum_of_ranks(rank: int, offset: int) -> tuple[int, float, torch.Tensor]:
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return rank, total.item(), torch.full((2,), rank)


def _raises_on(rank: int, guilty: int) -> None:
    if rank == guilty:
        raise ValueError("the reason")
    dist.barrier()


def _dies_on(rank: int, guilty: int) -> None:
    if rank == guilty:
        os._exit(7)
    dist.barrier()


def _sleeps_on(rank: int, guilty: int) -> None:
    if rank == guilty:
        time.sleep(60)


def _environment(rank: int) -> tuple[str, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    return (*(os.environ[name] for name in names), str(torch.get_num_threads()))


def _joins_itself(rank: int) -> int:
    dist.init_process_group("gloo")
    return dist.get_world_size()


def _returns_late(rank: int) -> int:
    if rank == 1:
        time.sleep(0.5)
    return os.getpid()


def test_results_come_back_in_order_of_rank() -> None:
    results = run_ranks(_sum_of_ranks, 3, 10)
    assert [(rank, total) for rank, total, _ in results] == [(0, 33.0), (1, 33.0), (2, 33.0)]
    assert [tensor.tolist() for *_, tensor in results] == [[0, 0], [1, 1], [2, 2]]


def test_ranks_are_new_processes_every_time() -> None:
    assert len({*run_ranks(_returns_late, 2), *run_ranks(_returns_late, 2), os.getpid()}) == 5


def test_environment_is_that_of_torchrun_on_two_nodes() -> None:
    assert run_ranks(_environment, 4, ranks_per_node=2) == [
        ("0", "4", "0", "2", "0", "1", "1"),
        ("1", "4", "1", "2", "0", "1", "1"),
        ("2", "4", "0", "2", "1", "1", "1"),
        ("3", "4", "1", "2", "1", "1", "1"),
    ]


def test_a_function_may_make_the_process_group_itself() -> None:
    assert run_ranks(_joins_itself, 2, joins=False) == [2, 2]


@pytest.mark.parametrize("guilty", [0, 2])
def test_the_first_rank_that_raises_is_shown(guilty: int) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)raised.*_raises_on.*ValueError: the reason") as caught:
        run_ranks(_raises_on, 3, guilty)
    assert caught.value.rank == guilty
    assert time.monotonic() - start_s < 20


@pytest.mark.parametrize("guilty", [0, 2])
def test_a_rank_that_dies_is_named(guilty: int) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=f"rank {guilty} died without a word, exit code 7"):
        run_ranks(_dies_on, 3, guilty)
    assert time.monotonic() - start_s < 20


def test_a_rank_that_hangs_is_killed_and_tells_where_it_was() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)did not finish in 3 s.*in _sleeps_on") as caught:
        run_ranks(_sleeps_on, 2, 1, timeout_s=3)
    assert caught.value.rank == 1
    assert time.monotonic() - start_s < 10


def test_lost_ranks_are_not_waited_for() -> None:
    assert run_ranks(_sleeps_on, 2, 1, lost=[1]) == [None, None]
    pids = run_ranks(_returns_late, 3, lost=[1])
    assert pids[1] is None
    assert pids[0] != pids[2]
