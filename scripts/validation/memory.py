"""Memory of plans: one rank of eight, with every strategy, against the prediction."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, product
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from rehearsals import plan_of

from osdp.planning.allocator_headroom import TIGHT, default_headroom
from osdp.planning.clusters import allocatable_bytes, rounding_bytes, workspaces_bytes
from osdp.planning.verify import MOST_TOO_HIGH, MOST_TOO_LOW
from osdp.zoo import load_cluster, load_model
from planner.analysis.explain import OpenPlan, open_plan
from planner.strategies.registry import known_strategies
from profiler.byte_sizes import MIB
from profiler.cluster.cluster import Cluster
from profiler.model_graph import ModelGraph, Recompute
from profiler.model_source import ModelSource
from profiler.trace.metered_pass import find_loss
from profiler.trace.trace import trace_model
from runtime.compile_plan import compile_plan
from runtime.observe.allocator_replay import limit_without_retries_bytes, replay
from runtime.observe.caching_allocator import PAGE_EXCESS_BYTES, OutOfMemoryError
from runtime.observe.dry_run import Script, dry_run
from runtime.observe.one_rank import one_rank
from runtime.schedule import Schedule
from validation.allocator import retries, start_over
from validation.bounds import judged, outside
from validation.check import Finding, Place

GRIDS = ((1, 8), (2, 4))
CLUSTER = "h100-4x8"
MODEL, SMALL_MODEL = "gpt2-medium", "gpt2-tiny"
MICRO_BATCH, STEPS = 2, 3
MOST_RETRIES = 6
"""Of a step of any plan that fills its limit."""
DRY_RUNS = 6
"""At once, beside a GPU."""
BEGIN_WITHIN_S, OFFLOAD_WITHIN_S = 200.0, 110.0
"""On a GPU no case begins later, and none that offloads parameters, unless all are asked for."""
OFFLOAD_FIRST = 2
"""As many of those that offload parameters run before the others, which may leave no time for more."""
AGAIN = {
    Recompute.NOTHING: "",
    Recompute.EVERYTHING: " recomputed",
    Recompute.OFFLOADED: " recomputed, inputs on the host",
}
"""What runs again of all blocks."""
OFFLOAD = "+offload"
"""In the names of strategies that come last, as they take longest."""


@dataclass(frozen=True)
class Case:
    """A plan that gives all operators one strategy."""

    grid: tuple[int, int]
    """Nodes, and ranks of each."""
    strategy: str
    recompute: Recompute
    precision: str

    def __str__(self) -> str:
        return f"{self.grid[0]} x {self.grid[1]} {self.strategy} {self.precision}{AGAIN[self.recompute]}"


@dataclass(frozen=True)
class Held:
    """What a rank held."""

    predicted_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int
    """Of what may be reserved: the least that the planner would give the plan."""
    retries: float
    """Times in a step that cached memory was given back within it."""
    without_retries_bytes: int
    """The limit within which none is, by the replay of a dry run."""
    retries_without: float
    """The same as `retries` within that."""

    def complaints(self, case: Case) -> list[str]:
        """Return what is out of bounds."""
        error = self.predicted_bytes / self.allocated_bytes - 1
        found = outside(f"{case}: predicted / allocated - 1", error, -MOST_TOO_LOW, MOST_TOO_HIGH)
        most = 1 + PAGE_EXCESS_BYTES / self.limit_bytes
        found += outside(f"{case}: reserved / limit", self.reserved_bytes / self.limit_bytes, 0, most)
        found += outside(f"{case}: allocation retries of a step", self.retries, 0, MOST_RETRIES)
        within = f"{case}: allocation retries within {self.without_retries_bytes / MIB:.0f} MiB"
        return found + outside(within, self.retries_without, 0, 0)


def cases(is_long: bool) -> list[Case]:
    """Return all cases, or a sample in which each strategy of the registry is once: they take turns with the rest."""
    strategies = {grid: [str(one) for one in known_strategies(cluster_of(grid))] for grid in GRIDS}
    settings = [*product(GRIDS, AGAIN, ("fp32", "bf16"))]
    if is_long:
        return [Case(grid, one, *rest) for grid, *rest in settings for one in strategies[grid]]
    turns, sample = cycle(settings), []
    for strategy in dict.fromkeys(one for grid in GRIDS for one in strategies[grid]):
        preferred, *rest = next(turns)
        grid = next(one for one in (preferred, *GRIDS) if strategy in strategies[one])
        sample.append(Case(grid, strategy, *rest))
    offloading = [case for case in sample if OFFLOAD in case.strategy]
    others = [case for case in sample if OFFLOAD not in case.strategy]
    return [*offloading[:OFFLOAD_FIRST], *others, *offloading[OFFLOAD_FIRST:]]


@cache
def cluster_of(grid: tuple[int, int]) -> Cluster:
    return load_cluster(CLUSTER, *grid)


@cache
def graph_of(source: ModelSource, precision: str) -> ModelGraph:
    """Return a model as kernels of GPUs run it."""
    return trace_model(source, precision, "cuda")


def opened(case: Case, source: ModelSource) -> OpenPlan:
    """Return a case's plan under the least limit that the planner would give it."""
    graph, machine = graph_of(source, case.precision), cluster_of(case.grid)
    choices = {operator.name: case.strategy for operator in graph.operators}
    blocks = [block.name for block in graph.blocks]
    whole, offloaded = (
        blocks if case.recompute is kind else [] for kind in (Recompute.EVERYTHING, Recompute.OFFLOADED)
    )
    plan = plan_of(graph, machine, choices, whole, (), offloaded, micro_batch=MICRO_BATCH)
    peak_bytes = open_plan(plan, graph, machine).prediction.peak_memory_bytes
    return open_plan(replace(plan, limit_bytes=default_headroom(machine).over(peak_bytes)), graph, machine)


def script_of(view: OpenPlan, source: ModelSource) -> Script:
    """Return how a plan's model trains."""
    return Script(source.build, source.example_inputs, _loss_of, view.plan.optimizer, view.plan.micro_batch)


def _loss_of(output: Any) -> torch.Tensor:
    return find_loss(output)[0]


def limit_of(case: Case) -> int:
    """Return the limit of the allocator within which no cached memory is given back: a dry run's, and the cluster's
    `rounding_bytes` for what kernels make while they run, which it does not see."""
    source = load_model(MODEL)
    view = opened(case, source)
    machine = view.load.cluster
    rank = view.decided.fullest(view.space, view.load)[0]
    run = dry_run(script_of(view, source), compile_plan(view.plan, view.space.graph, machine), rank)
    without_bytes = limit_without_retries_bytes(run.trace, expandable=True, workspaces_bytes=workspaces_bytes(machine))
    return without_bytes + rounding_bytes(machine)


@contextmanager
def limits_of(wanted: Iterable[Case]) -> Iterator[Mapping[Case, Future[int]]]:
    """Yield the limits of cases, for which other processes, without a GPU, run dry beside what this one does."""
    processes = max(1, min(DRY_RUNS, (os.cpu_count() or 1) - 2))
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"):
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        found = {case: pool.submit(limit_of, case) for case in wanted}
    try:
        yield found
    finally:
        pool.shutdown(cancel_futures=True)


def held(view: OpenPlan, source: ModelSource, place: Place, without: Future[int] | None) -> Held:
    """Run a few steps of the plan's fullest rank, on the GPU or dry, within its limit and then without retries.

    `without` is the limit for the latter (`limit_of`); a dry run says that itself.
    """
    machine = view.load.cluster
    workspaces, limit_bytes = workspaces_bytes(machine), allocatable_bytes(machine, view.plan.limit_bytes)
    predicted_bytes = view.prediction.tensors_bytes
    schedule, script = compile_plan(view.plan, view.space.graph, machine), script_of(view, source)
    rank = view.decided.fullest(view.space, view.load)[0]
    if place.is_dry:  # with data: of so small a model that takes less time than fake tensors
        run = dry_run(script, schedule, rank, with_data=True)
        without_bytes = limit_without_retries_bytes(run.trace, expandable=True, workspaces_bytes=workspaces)
        found, free = (
            replay(run.trace, size, expandable=True, workspaces_bytes=workspaces)
            for size in (limit_bytes, without_bytes)
        )
        if not found.runs:
            raise OutOfMemoryError(found.failed)
        ran = run.peak.total_bytes, found.reserved_bytes, limit_bytes, found.retries
        return Held(predicted_bytes, *ran, without_bytes, free.retries)
    assert without is not None
    allocated, reserved, found_retries = run_steps(script, schedule, rank, limit_bytes)
    *_, retries_without = run_steps(script, schedule, rank, without.result())
    ran = allocated, reserved, limit_bytes, found_retries
    return Held(predicted_bytes + sum(workspaces), *ran, without.result(), retries_without)


def run_steps(script: Script, schedule: Schedule, rank: int, limit_bytes: int) -> tuple[int, int, float]:
    """Return bytes allocated and reserved at most, and retries of a step, on the GPU within a limit, but for the first.

    That makes the optimizer's states.
    """
    gpu = start_over(limit_bytes)
    with one_rank(script, schedule, gpu, rank) as step:
        step()
        torch.cuda.reset_peak_memory_stats(gpu)
        before = retries()
        for _ in range(STEPS - 1):
            step()
        torch.cuda.synchronize(gpu)
        taken = (retries() - before) / (STEPS - 1)
        return torch.cuda.max_memory_allocated(gpu), torch.cuda.max_memory_reserved(gpu), taken


def check(place: Place) -> Finding:
    """Compare cases until time is up; what goes wrong in one does not keep others from being run."""
    if place.is_dry:
        torch.set_num_threads(1)  # a machine may be busy, and threads wait for each other
    source = load_model(SMALL_MODEL if place.is_dry else MODEL)
    wanted, started = cases(place.is_long), time.perf_counter()
    found: dict[Case, Held] = {}
    complaints: list[str] = []
    with nullcontext({}) if place.is_dry else limits_of(wanted) as limits:
        for case in wanted:
            within_s = OFFLOAD_WITHIN_S if OFFLOAD in case.strategy else BEGIN_WITHIN_S
            if time.perf_counter() - started > within_s and not (place.is_long or place.is_dry):
                continue
            try:
                found[case] = held(opened(case, source), source, place, limits.get(case))
                complaints += found[case].complaints(case)
                print(f"{time.perf_counter() - started:.1f} s: {case}: {_figures(found[case])}", flush=True)
            except Exception as error:
                complaints.append(f"{case}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return summary(wanted, found, complaints)


def summary(wanted: Sequence[Case], found: Mapping[Case, Held], complaints: Sequence[str]) -> Finding:
    """Say how many cases ran and how far predictions were off."""
    figures = {str(case): _figures(one) for case, one in found.items()}
    told = f"{len(found)} of {len(wanted)} cases ran"
    left_out = [case for case in wanted if case not in found and OFFLOAD not in case.strategy]
    if left_out:
        complaints = [*complaints, f"of those that do not offload {len(left_out)} did not run, {left_out[0]} first"]
    if not found:
        return judged(told, complaints, figures)
    low, high = _range(one.predicted_bytes / one.allocated_bytes - 1 for one in found.values())
    told += f", predictions off by {low:+.2%} to {high:+.2%}"
    mean = fmean(one.retries for one in found.values())
    told += f", {mean:.1f} retries of a step at the least limits"
    too_many = outside("retries of a step at the least limits, the mean", mean, 0, TIGHT.retries)
    return judged(told, complaints + too_many, figures)


def _figures(one: Held) -> str:
    error, share = one.predicted_bytes / one.allocated_bytes - 1, one.reserved_bytes / one.limit_bytes
    told = f"{one.allocated_bytes} bytes allocated, predicted {error:+.2%}, {share:.1%} of the limit reserved"
    more = one.without_retries_bytes / one.limit_bytes - 1
    return f"{told}, {one.retries:g} retries a step; with {more:+.1%} {one.retries_without:g}"


def _range(values: Iterable[float]) -> tuple[float, float]:
    known = list(values)
    return min(known), max(known)
