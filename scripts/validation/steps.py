"""Times of training steps on this process's device, and how busy they keep a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import torch
from rehearsals import plan_of

from osdp.zoo import load_cluster
from planner.analysis.explain import OpenPlan, open_plan
from profiler.model_graph import ModelGraph
from runtime.observe.one_rank import Step

WARM_UP_STEPS, TIMED_STEPS = 3, 7


def dry_device() -> torch.device:
    """Return the CPU, on which one thread computes: a machine may be busy, and threads wait for each other."""
    torch.set_num_threads(1)
    return torch.device("cpu")


def median_step_s(step: Step, device: torch.device, timed: int = TIMED_STEPS) -> float:
    """Return the median of some steps, each from an idle device to an idle device."""
    for _ in range(WARM_UP_STEPS):
        step()
    return median(seconds_of(step, device) for _ in range(timed))


def seconds_of(step: Step, device: torch.device) -> float:
    """Return the seconds of a step, from an idle device to an idle device."""
    finish(device)
    started = time.perf_counter()
    step()
    finish(device)
    return time.perf_counter() - started


def finish(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy_s(step: Step, device: torch.device) -> float:
    """Return for how many seconds of a step the GPU computes or copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        finish(device)
    events = profiler.events() or ()
    spans = [one.time_range for one in events if one.device_type == torch.autograd.DeviceType.CUDA]
    return covered((span.start, span.end) for span in spans) / 1e6  # it counts in microseconds


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def uniform_view(
    graph: ModelGraph,
    cluster: str | Path,
    ranks: int,
    strategy: str,
    batch: int,
    optimizer: str,
    recomputes: bool = False,
) -> OpenPlan:
    """Return the plan that gives all operators one strategy, for so many ranks of one node."""
    machine = load_cluster(str(cluster), 1, ranks)
    blocks: Sequence[str] = [block.name for block in graph.blocks] if recomputes else []
    choices = {operator.name: strategy for operator in graph.operators}
    plan = plan_of(graph, machine, choices, blocks, micro_batch=batch, optimizer=optimizer)
    return open_plan(plan, graph, machine)
