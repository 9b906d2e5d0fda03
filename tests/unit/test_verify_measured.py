"""`osdp verify` on a GPU, as far as the CPU can run it: real steps of one rank, with a stand-in for the allocator."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rehearsals import plan_of

from osdp.planning import verify
from osdp.zoo import load_cluster, load_model
from planner.analysis.explain import open_plan
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model

ALLOCATED, RESERVED = 3 << 20, 4 << 20


@cache
def traced() -> ModelGraph:
    return trace_model(load_model("gpt2-tiny"), "fp32", "cuda")


@pytest.mark.parametrize("strategy", ["replicate", "replicate+offload"])
def test_steps_are_run_and_the_allocator_is_asked(strategy: str) -> None:
    graph, machine = traced(), load_cluster("h100-8", 1, 1)
    plan = plan_of(graph, machine, {operator.name: strategy for operator in graph.operators})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    counts = {"max_memory_allocated": ALLOCATED, "max_memory_reserved": RESERVED, "reset_peak_memory_stats": None}
    try:
        with (
            patch.multiple(torch.cuda, **{name: lambda *_, found=found: found for name, found in counts.items()}),
            patch.object(verify, "keep_within") as limited,
            patch.object(verify, "_check_ranks"),  # which refuses to go on without a GPU
        ):
            found = verify.verify(open_plan(plan, graph, machine), on_gpus=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert (found.tracked_peak_bytes, found.reserved_bytes, found.how) == (ALLOCATED, RESERVED, "cuda")
    assert limited.call_count == 1
