"""What all ranks of a run must have alike, and the error that says which rank has what."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version

import torch

from osdp.training.job import Job
from profiler.errors import OsdpError
from runtime.failures.peer_lost import format_ranks
from runtime.failures.rank_agreement import Agreement

OF_ONE_RANK = (
    "checkpoint",
    "data",
    "log_every",
    "memory_snapshot",
    "model",
    "plan",
    "tensorboard",
    "timeline",
    "timeout_s",
    "trace",
)
"""Fields of the configuration that may differ: what they name is compared, where that matters, and not the name."""
SHOWN = 6
"""Settings that a message names."""


def check_alike(job: Job) -> None:
    """Raise OsdpError on all ranks if they are about to train different things. Collective."""
    found = Agreement.all().gather("compare what ranks train", lambda: settings(job))
    differing = []
    for name in found[0].keys() | {name for other in found for name in other}:
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, other in enumerate(found):
            by_value[other.get(name, "nothing")].append(rank)
        if len(by_value) > 1:
            values = "; ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in by_value.items())
            differing.append(f"{name}: {values}")
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        got = "; ".join(sorted(differing)[:SHOWN]) + more
        advice = "the same command, files and versions on every node"
        raise OsdpError("ranks are about to train different things", got=got, expected="the same", advice=advice)


def settings(job: Job) -> dict[str, str]:
    """Return what must be alike, by name."""
    config = dataclasses.asdict(job.config)
    own = {name: str(value) for name, value in config.items() if name not in OF_ONE_RANK}
    own |= {"torch": torch.__version__, "osdp": _version(), "python": platform.python_version()}
    own |= {"model": _digest_of_model(job), "data": str(job.task.identity()), "plan": _digest(str(job.plan))}
    own |= {"resumed checkpoint": job.resume.name if job.resume else "none"}
    return own


def _digest_of_model(job: Job) -> str:
    """Return a short digest of names, shapes and dtypes of all parameters and buffers."""
    module = job.without_data
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return _digest(str([(name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in tensors]))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _version() -> str:
    try:
        return version("osdp-planner")
    except PackageNotFoundError:
        return "not installed"
