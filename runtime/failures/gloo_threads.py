"""Waits for gloo's threads, which go on after a collective has returned, before what would end them badly."""

from __future__ import annotations

import atexit
import time
from functools import cache

import torch.distributed as dist

GLOO_ENDS_S = 0.05
"""Far more than the microseconds that gloo's threads take after a collective."""


def let_gloo_end() -> None:
    """Wait until gloo's threads have noted the end of their last collective; call it before a profiler stops.

    They do so after the collective has returned here, and write into what a profiler that stops meanwhile has freed:
    ranks died of a corrupted heap, one run in some hundred (torch 2.13).
    """
    if dist.is_initialized():
        time.sleep(GLOO_ENDS_S)


@cache
def let_gloo_end_at_exit() -> None:
    """Have this process wait so when it ends: a thread that frees a tensor while Python ends aborts the rank.

    Programs whose last call is an all-gather ended so, six of 43 runs ("terminate called without an active exception",
    torch 2.13).
    """
    atexit.register(let_gloo_end)
