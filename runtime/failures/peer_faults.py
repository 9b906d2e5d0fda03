"""Says what failed when a peer is gone or a loss is not finite: which rank, which collective, which unit.

    with naming_faults("step 7", timeout_s=600):
        loss.backward()

PyTorch's error names the socket on which a collective failed.  The traceback shows more: the innermost
frame inside `torch.distributed.distributed_c10d` is the collective with its group, and the innermost
FSDP2 frame around it is the unit.  DDP issues its collectives from C++, so there only the ranks that
are missing can be named.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.errors import OsdpError, first_line
from runtime.failures.liveness import announce, answer, find_lost, report_failure
from runtime.failures.peer_lost import ANSWER_S, PeerLost, describe_lost, format_ranks

__all__ = ["PeerLost", "check_finite", "is_lost_peer", "naming_faults", "naming_peers"]

TRANSPORT = re.compile(r"gloo/|NCCL|ncclRemoteError|ncclSystemError")
"""Marks of an error of a communication library."""
LOST = re.compile(r"timed out|connection (was )?(reset|closed|refused)|broken pipe|socket|aborted", re.IGNORECASE)
"""Marks of a lost peer in an error out of a function of torch.distributed; other errors there are misuse."""
LIBRARY_SUFFIX = re.compile(r"_(single|into_tensor|tensor)$")
"""torch 2.13 says all_gather_single for the all_gather_into_tensor of 2.11: both are an all_gather."""


@contextmanager
def naming_faults(what: str, timeout_s: float) -> Iterator[None]:
    """Turn a failed collective into a `PeerLost` that names what is known about it.

    Other errors pass unchanged, and the other ranks are notified. Nothing is done if there is only
    one rank.

    Args:
        what: what runs, for the message: "step 7".
        timeout_s: the process group's timeout, for the message; it also bounds how long the other
            ranks are asked for, which takes some seconds at most.

    Raises:
        PeerLost: on every surviving rank, from PyTorch's error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    try:
        announce(what)
        with naming_peers(what, timeout_s):
            yield
    except PeerLost:
        raise
    except Exception as error:
        report_failure(error)
        raise


@contextmanager
def naming_peers(what: str, timeout_s: float) -> Iterator[None]:
    """Do what `naming_faults` does about lost peers alone, for ranks that have announced themselves."""
    try:
        yield
    except PeerLost:
        answer()
        raise
    except Exception as error:
        if not is_lost_peer(error):
            raise
        fates, advice = describe_lost(find_lost(min(ANSWER_S, timeout_s)))
        failed = f"rank {dist.get_rank()} failed in {_failed_collective(error)} during {what}: {fates}"
        got = f"{type(error).__name__}: {first_line(error)}"
        expected = f"every rank to take part within {timeout_s:g} s"
        raise PeerLost(failed, got=got, expected=expected, advice=advice) from error


def check_finite(loss: Tensor, step: int) -> None:
    """Refuse a loss that is infinite or not a number on any rank. Costs one small all-reduce.

    Raises:
        OsdpError: on all ranks alike, naming the step and the ranks.
    """
    is_bad = ~torch.isfinite(loss.detach()).all()
    if dist.is_initialized():
        bad = torch.zeros(dist.get_world_size(), device=loss.device)
        bad[dist.get_rank()] = is_bad
        dist.all_reduce(bad)
    else:
        bad = is_bad.reshape(1)
    ranks = [rank for rank, is_bad_there in enumerate(bad.tolist()) if is_bad_there]
    if ranks:
        what = f"the loss of step {step} is not finite on {format_ranks(ranks)}"
        advice = "a lower learning rate, gradient clipping or fp32 instead of bf16; check the data"
        raise OsdpError(what, expected="a finite loss", advice=advice)


def is_lost_peer(error: Exception) -> bool:
    """Whether an error is one of communication, and not of a wrong call or of the model."""
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError) or TRANSPORT.search(str(error)):
        return True
    return _frame_of_collective(error) is not None and LOST.search(str(error)) is not None


def _failed_collective(error: BaseException) -> str:
    """Say in which collective, of which unit and among whom an error came, as far as its traceback tells."""
    unit, frame = _unit(error), _frame_of_collective(error)
    of_unit = "" if unit is None else f" of unit {unit}" if unit else " of the root unit"
    if frame is None:
        return f"a collective{of_unit}"
    name = LIBRARY_SUFFIX.sub("", frame.f_code.co_name)
    try:
        ranks = dist.get_process_group_ranks(frame.f_locals.get("group"))
    except (KeyError, ValueError, TypeError):  # the group is gone, or the local is no group
        return f"{name}{of_unit}"
    return f"{name}{of_unit} among {format_ranks(ranks)}"


def _frame_of_collective(error: BaseException) -> FrameType | None:
    """Return the innermost frame of a traceback that is a function of torch.distributed."""
    module = "torch.distributed.distributed_c10d"
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_globals.get("__name__") == module]
    return frames[-1] if frames else None


def _unit(error: BaseException) -> str | None:
    """Return the name of the innermost FSDP2 unit in a traceback, empty for the root; None if there is none.

    `FSDPParamGroup._module_fqn` is private (the same in torch 2.11, read, and 2.13, run); without it no unit is named.
    """
    unit = None
    for frame, _ in walk_tb(error.__traceback__):
        owner: Any = frame.f_locals.get("self")
        if hasattr(type(owner), "wait_for_unshard") and hasattr(owner, "_module_fqn"):
            unit = owner._module_fqn or ""
    return unit
