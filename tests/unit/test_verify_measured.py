"""`osdp verify` on a GPU, as far as the CPU can run it: real steps of one rank, with a stand-in for the allocator."""

from __future__ import annotations

import os
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rehearsals import plan_of

from osdp import api
from osdp.planning import verify
from osdp.planning.verify import Verified
from osdp.zoo import load_cluster, load_model
from planner.analysis.explain import open_plan
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model
from runtime.own_gpu import NCCL_ERRORS
from runtime.sharded_model import WrappedUnit

MIB = 1 << 20
ALLOCATED, RESERVED, LIMIT = 3 * MIB, 4 * MIB, 8192 * MIB
BESIDE = (550 + 1024) * MIB
"""Of the limit, for the context and NCCL's buffers, as the cluster file has them."""
init_process_group = dist.init_process_group


@cache
def traced() -> ModelGraph:
    return trace_model(load_model("gpt2-tiny"), "fp32", "cuda")


def join(*_: Any, **__: Any) -> None:
    """Join a group of one rank on the CPU."""
    init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def measure(strategy: str = "replicate") -> tuple[Verified, list[int]]:
    """Verify a plan, and leave the process group; return what was found, and what the allocator was limited to."""
    graph, machine = traced(), load_cluster("h100-8", 1, 1)
    choices = {operator.name: strategy for operator in graph.operators}
    plan = plan_of(graph, machine, choices, limit_bytes=LIMIT)
    counts = {"max_memory_allocated": ALLOCATED, "max_memory_reserved": RESERVED, "reset_peak_memory_stats": None}
    limits: list[int] = []
    try:
        with (
            patch.multiple(torch.cuda, **{name: lambda *_, found=found: found for name, found in counts.items()}),
            patch.object(verify, "keep_within", lambda limit_bytes, gpu: limits.append(limit_bytes)),
            patch.object(verify, "_check_ranks"),  # which refuses to go on without a GPU
        ):
            return verify.verify(open_plan(plan, graph, machine), on_gpus=True), limits
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["replicate", "replicate+offload"])
def test_steps_are_run_and_the_allocator_is_asked(strategy: str) -> None:
    join()
    found, limits = measure(strategy)
    assert (found.tracked_peak_bytes, found.reserved_bytes, found.how) == (ALLOCATED, RESERVED, "cuda")
    assert limits == [LIMIT - BESIDE]


class Windows(WrappedUnit):
    """Has memory of a GPU that PyTorch's allocator does not know of."""

    bytes_beside_allocator = 5 * MIB


def test_windows_count_as_if_the_allocator_had_given_them() -> None:
    """Two units have windows: they are taken off what it may have, and added to what it gave."""

    def with_windows(*args: Any, **options: Any) -> api.OSDP:
        model = OSDP(*args, **options)
        model.sharded.units += [Windows(), Windows()]
        return model

    OSDP = api.OSDP  # noqa: N806 - a class
    join()
    with patch.object(api, "OSDP", with_windows):
        found, limits = measure()
    assert limits == [LIMIT - BESIDE - 10 * MIB]
    assert (found.tracked_peak_bytes, found.reserved_bytes) == (ALLOCATED + 10 * MIB, RESERVED + 10 * MIB)
    assert found.allocatable_bytes == LIMIT - BESIDE


@pytest.mark.parametrize("given", [None, "1"])
def test_a_lost_rank_is_to_raise_unless_the_user_says_otherwise(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's watchdog reads the variable when a group is made, here by verify itself."""
    monkeypatch.setenv(NCCL_ERRORS, given or "")  # so that it is put back afterwards
    if given is None:
        monkeypatch.delenv(NCCL_ERRORS)
    groups: list[tuple[str, str | None]] = []

    def note_and_join(backend: str, **_: Any) -> None:
        groups.append((backend, os.environ.get(NCCL_ERRORS)))
        join()

    monkeypatch.setattr(dist, "init_process_group", note_and_join)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(verify, "own_gpu", lambda: torch.device("cuda", 0))
    measure()
    assert groups == [("cpu:gloo,cuda:nccl", given or "2")]
