"""The GPU of this rank, and how ranks on GPUs wait for each other.

A launcher may let each rank see all GPUs of the machine, as torchrun does, or one alone, as Slurm can.  So the GPU is
the one of the local rank, of as many as the process sees.
"""

import os
import socket
from math import nextafter

import torch
import torch.distributed as dist

from profiler.errors import OsdpError
from runtime.failures.peer_lost import format_ranks
from runtime.failures.rank_agreement import Agreement

NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that says what NCCL's watchdog does about a collective that fails or takes too long."""
ABORT_COLLECTIVES = "2"
"""End the communicator, so that the next collective raises.  By default (3) the watchdog ends the process, and nobody
says which rank was lost (`ErrorHandlingMode` of ProcessGroupNCCL.hpp)."""


def own_gpu() -> torch.device:
    """Return the GPU of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def keep_within(limit_bytes: int, gpu: torch.device) -> None:
    """Have PyTorch's allocator reserve no more of a GPU than this."""
    total_bytes = torch.cuda.get_device_properties(gpu).total_memory
    part = limit_bytes / total_bytes
    while int(part * total_bytes) < limit_bytes <= total_bytes:  # the allocator rounds down, and may lose a byte so
        part = nextafter(part, 1.0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, part), gpu)


def raise_lost_ranks() -> None:
    """Have a lost rank raise an error in the others, unless the user says otherwise; before there is a group."""
    os.environ.setdefault(NCCL_ERRORS, ABORT_COLLECTIVES)


def barrier(device: torch.device) -> None:
    """Wait for all ranks. NCCL is told this rank's GPU, which it would have to guess."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def refuse_shared_gpus(gpu: torch.device) -> None:
    """Raise OsdpError on all ranks if two of them have the same GPU: NCCL cannot connect them. Collective."""
    found = Agreement.all().gather("name its GPU", lambda: _name(gpu))
    for name in found:
        ranks = [rank for rank, other in enumerate(found) if other == name]
        if len(ranks) > 1:
            got = f"{format_ranks(ranks)} on one"
            advice = "fewer ranks (--ranks-per-node), or let each rank see another GPU (CUDA_VISIBLE_DEVICES)"
            raise OsdpError("ranks share a GPU", got=got, expected="a GPU for every rank", advice=advice)


def _name(gpu: torch.device) -> str:
    """Return what tells a GPU from all others, whatever number it has in this process."""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(gpu).uuid}"
