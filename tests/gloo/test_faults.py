"""A rank that dies, hangs or computes nonsense in the middle of training is named by the others."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from profiler.errors import FaultError, OsdpError
from runtime.failures.liveness import announce
from runtime.failures.peer_faults import PeerLost, check_finite, naming_faults
from runtime.failures.rank_agreement import Agreement

TIMEOUT_S = 3.0
"""Timeout of the process group in these tests."""


class Falter(torch.autograd.Function):
    """The identity, whose backward dies, hangs or raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, how: str) -> Tensor:
        ctx.how = how
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.how == "dies":
            os._exit(9)
        if ctx.how == "hangs":
            time.sleep(60)
        if ctx.how == "raises":
            raise RuntimeError("no fault of communication: a timed out socket")
        return gradients[0], None


class Chain(nn.Module):
    """Four linear layers; backward falters after the fourth and before the third."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.how = how

    def forward(self, value: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            value = layer(value)
            if index == 2:
                value = Falter.apply(value, self.how)
        return value


def _train(rank: int, kind: str, guilty: int, how: str) -> tuple[str, float, str]:
    """Return the error of a step, how long it took to come, and its cause."""
    model: nn.Module = Chain(how if rank == guilty else "")
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)  # type: ignore[arg-type]
        fully_shard(model)
    start_s = time.monotonic()
    try:
        with naming_faults("step 7", TIMEOUT_S):
            model(torch.ones(2, 8)).sum().backward()
    except PeerLost as error:
        return str(error), time.monotonic() - start_s, type(error.__cause__).__name__
    except RuntimeError as error:
        return f"passed on: {error}", 0.0, ""
    return "", 0.0, ""


@pytest.mark.parametrize("guilty", some([0, 2], 2, 1))
def test_a_rank_that_dies_in_backward_is_named_with_collective_and_unit(guilty: int) -> None:
    results = run_ranks(_train, 4, "fsdp", guilty, "dies", lost=[guilty], collective_timeout_s=TIMEOUT_S)
    for rank, (message, took_s, cause) in ((rank, result) for rank, result in enumerate(results) if result):
        assert message.startswith(f"rank {rank} failed in all_gather of unit layers.1 among ranks 0, 1, 2, 3 "), message
        assert f"during step 7: rank {guilty} died (last seen in step 7)\n" in message
        assert "got: RuntimeError: " in message
        assert f"try: the log of rank {guilty} " in message
        assert took_s < TIMEOUT_S + 8
        assert cause == "RuntimeError"
    assert results[guilty] is None
    assert min(took_s for _, took_s, _ in filter(None, results)) < TIMEOUT_S, "a neighbour of the dead sees it at once"


def test_a_rank_that_hangs_is_named() -> None:
    results = run_ranks(_train, 4, "fsdp", 2, "hangs", lost=[2], collective_timeout_s=TIMEOUT_S)
    for rank in (0, 1, 3):
        message, took_s, _ = results[rank]
        assert message.startswith(f"rank {rank} failed in all_gather of unit layers.1 among ranks 0, 1, 2, 3 ")
        assert ": rank 2 did not answer: it hangs or cannot be reached (last seen in step 7)\n" in message
        assert "expected: every rank to take part within 3 s" in message
        assert took_s < 2 * TIMEOUT_S + 12


def test_ddp_names_the_rank() -> None:
    results = run_ranks(_train, 3, "ddp", 1, "dies", lost=[1], collective_timeout_s=TIMEOUT_S)
    for rank in (0, 2):
        assert results[rank][0].startswith(f"rank {rank} failed in a collective during step 7: rank 1 died")


def test_other_errors_pass_and_the_others_learn_of_them() -> None:
    results = run_ranks(_train, 2, "fsdp", 1, "raises", collective_timeout_s=TIMEOUT_S)
    assert results[1][0] == "passed on: no fault of communication: a timed out socket"
    expected = "during step 7: rank 1 raised RuntimeError: no fault of communication: a timed out socket (last seen in"
    assert expected in results[0][0]


def _misuses(rank: int) -> str:
    with pytest.raises(Exception, match=r"(?i)tensor") as caught, naming_faults("step 1", TIMEOUT_S):
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(1))
    return type(caught.value).__name__


def test_a_wrong_call_is_no_lost_peer() -> None:
    assert "PeerLost" not in run_ranks(_misuses, 2)


def _loses_its_store(rank: int, port: int) -> str:
    """The store is rank 0's own, as without torchrun; rank 0 dies and takes it along."""
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        with naming_faults("step 1", TIMEOUT_S):
            dist.barrier()
            if rank == 0:
                os._exit(9)
            dist.all_reduce(torch.ones(4))
    except PeerLost as error:
        return str(error)
    return ""


def test_the_store_may_be_gone_as_well() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = run_ranks(_loses_its_store, 3, port, lost=[0], joins=False, timeout_s=30)
    for rank in (1, 2):
        told = rf"rank {rank} failed in all_reduce among ranks 0, 1, 2 during step 1: the store .* is gone too"
        assert re.match(told, results[rank])


def _finite(rank: int, bad: dict[int, float]) -> str:
    try:
        check_finite(torch.tensor(bad.get(rank, 1.0), requires_grad=True), 12)
    except OsdpError as error:
        return error.what
    return ""


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({}, ""),
        ({1: float("nan")}, "the loss of step 12 is not finite on rank 1"),
        ({0: float("inf"), 2: float("-inf")}, "the loss of step 12 is not finite on ranks 0, 2"),
    ],
)
def test_a_loss_that_is_not_finite_is_refused_by_all_ranks_alike(bad: dict[int, float], expected: str) -> None:
    assert run_ranks(_finite, 3, bad) == [expected] * 3


def test_without_a_process_group() -> None:
    check_finite(torch.tensor(1.0), 1)
    with pytest.raises(OsdpError, match="step 2 is not finite on rank 0"):
        check_finite(torch.tensor([1.0, float("nan")]), 2)
    with pytest.raises(RuntimeError, match="timed out"), naming_faults("step 1", 1.0):
        raise RuntimeError("gloo/ timed out")


def stops(rank: int) -> str:
    """Lose rank 1, which somebody stops, in the middle of a collective."""

    def step() -> None:
        with naming_faults("step 7", TIMEOUT_S):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(1))

    with pytest.raises(PeerLost) as caught:
        step()
    return caught.value.what


def test_a_rank_that_is_stopped_is_named_as_such() -> None:
    told = run_ranks(stops, 2, collective_timeout_s=TIMEOUT_S, lost=(1,))[0]
    assert "rank 1 is stopped (by SIGSTOP" in told
    assert "last seen in step 7" in told


def gathers(rank: int) -> tuple[str, bool]:
    """Lose rank 1 outside of a step, where ranks agree."""
    announce("starting")
    ranks = Agreement.all()
    ranks.gather("begin", lambda: 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        ranks.gather("report", lambda: 1)
    return caught.value.what, isinstance(caught.value, FaultError)


def test_a_rank_that_is_lost_outside_a_step_is_named() -> None:
    told, is_fault = run_ranks(gathers, 2, collective_timeout_s=TIMEOUT_S, lost=(1,))[0]
    assert told.startswith("could not report: another rank is gone or does not answer: rank 1 died")
    assert is_fault


def meets_a_full_disk(rank: int, number: int) -> bool:
    """Fail as a disk does; return whether that counts as a fault."""

    def write() -> None:
        if rank == 1:
            raise OSError(number, os.strerror(number))

    with pytest.raises(OsdpError) as caught:
        Agreement.all().gather("write", write)
    assert str(caught.value).startswith("rank 1 could not write\n  got: ")
    return isinstance(caught.value, FaultError)


@pytest.mark.parametrize(
    ("number", "is_fault"),
    [(errno.ENOSPC, True), (errno.EIO, True), (errno.EDQUOT, True), (errno.ENOENT, False), (errno.EACCES, False)],
)
def test_disks_that_fail_are_faults_and_wrong_paths_are_not(number: int, is_fault: bool) -> None:
    assert run_ranks(meets_a_full_disk, 2, number) == [is_fault] * 2
