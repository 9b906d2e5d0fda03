"""The process group of a run: who this rank is, on which device, and when it gives up waiting."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from osdp.training.tasks import Sample
from profiler.errors import OsdpError
from runtime.failures.liveness import announce
from runtime.host_copies import on_device
from runtime.own_gpu import barrier, own_gpu, raise_lost_ranks, refuse_shared_gpus

NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
"""Environment variables that say which rank this is, and where rank 0 listens; MASTER_ADDR says on which host."""
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Ranks:
    """This rank among all."""

    rank: int
    world_size: int
    device: torch.device

    def tensors(self, sample: Sample) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a sample's arrays as tensors on this rank's device."""
        tokens, keywords = sample
        there = {name: on_device(torch.from_numpy(array), self.device) for name, array in keywords.items()}
        return on_device(torch.from_numpy(tokens), self.device), there

    def mean(self, value: Tensor) -> float:
        total = value.detach().to(torch.float64 if self.device.type == "cpu" else torch.float32).clone()
        dist.all_reduce(total)
        return float(total) / self.world_size

    def maximum(self, values: list[int]) -> list[int]:
        return self.total(values, dist.ReduceOp.MAX)

    def everyone(self, values: list[int]) -> list[list[int]]:
        """Return what each rank gives, equally many numbers; in the order of ranks. A collective call."""
        own = on_device(torch.tensor(values, dtype=torch.int64), self.device)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own)
        return [one.tolist() for one in found]

    def total(self, values: list[int], operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[int]:
        found = on_device(torch.tensor(values, dtype=torch.int64), self.device)
        dist.all_reduce(found, operation)
        return found.tolist()


def end_at_once_on_signals() -> None:
    """Let Ctrl-C and SIGTERM end this rank even while it waits inside a collective.

    Python's own handler runs only after the collective. Checkpoints are whole at any moment.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _check_environment() -> None:
    """Raise OsdpError unless the environment says whom to join, and as which rank."""
    texts = [os.environ.get(name, "") for name in NUMBERS]
    rank, size, port = (int(text) if text.isdecimal() and len(text) < 10 else -1 for text in texts)
    if 0 <= rank < size and 0 < port < 2**16 and os.environ.get("MASTER_ADDR"):
        return
    names = (*NUMBERS, "MASTER_ADDR")
    got = ", ".join(f"{name}={os.environ[name]}" if os.environ.get(name) else f"no {name}" for name in names)
    expected = "RANK below WORLD_SIZE, and MASTER_ADDR and MASTER_PORT of rank 0, as torchrun sets them"
    advice = "torchrun --nproc-per-node N -m osdp ...; or unset RANK WORLD_SIZE, so that OSDP starts the ranks itself"
    raise OsdpError("the environment does not say which ranks to join", got=got, expected=expected, advice=advice)


def end_with_launcher() -> None:
    """Let this rank be killed when the process that started it ends, however it does; on Linux.

    It would train on alone, and hold the folder of checkpoints against the run that is started instead.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def joined(device: str, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that the environment describes, as torchrun sets it, and leave it.

    Nothing that was made inside may be held on to when it ends.
    """
    here, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        here, backend = own_gpu(), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(here)
        raise_lost_ranks()
    _check_environment()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        if dist.get_world_size() > 1:
            announce("starting")
        if device == "cuda":
            refuse_shared_gpus(here)
        yield Ranks(dist.get_rank(), dist.get_world_size(), here)
        # What holds the group must be gone before it: DistributedDataParallel's reducer would join gloo's
        # thread under Python's lock, which that thread may be waiting for (seen with torch 2.13).
        gc.collect()
        barrier(here)  # Nobody leaves while another still needs its answer.
    finally:
        dist.destroy_process_group()
