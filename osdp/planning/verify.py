"""Predicted memory of a plan against what the runtime holds: in a dry run on fake tensors, or measured on GPUs.

    error = (predicted - tracked) / tracked

A dry run (`runtime.observe.dry_run`) runs anywhere, in one process, at the plan's own number of ranks.  On
GPUs, with as many ranks as the plan has, real steps are run and the allocator is asked; there what it
reserved of the device has to be within the limit too, beyond which it gets nothing.  What is no tensor (the reserve:
context, communicators, workspaces) is on neither side of the error, but on GPUs cuBLAS's workspaces, which the
allocator hands out, are on both, and windows of one-sided communication count as if they came out of it.

What a dry run allocates is replayed through a model of CUDA's caching allocator, with its default
settings and with `expandable_segments:True`, which `osdp train` sets: so set, it has to serve every
request of a few steps with what the limit leaves it.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from osdp.planning.clusters import allocatable_bytes, rounding_bytes, workspaces_bytes
from osdp.zoo import load_model
from planner.analysis.explain import OpenPlan
from profiler.autocast import Autocast
from profiler.errors import OsdpError
from profiler.model_source import ModelSource
from profiler.trace.data_dependent import DataDependent
from profiler.trace.device_kernels import device_kernels
from profiler.trace.metered_pass import find_loss
from profiler.trace.python_values import answering
from runtime.compile_plan import compile_plan
from runtime.observe.allocation_trace import AllocationTrace
from runtime.observe.allocator_replay import least_limit_bytes, limit_without_retries_bytes, replay
from runtime.observe.dry_run import DryRun, Script, dry_run
from runtime.observe.part_peaks import PartPeak
from runtime.optimizers import as_priced
from runtime.own_gpu import keep_within, own_gpu, raise_lost_ranks

MOST_TOO_LOW = 0.01
"""A plan that holds so much more than predicted does not pass: it may run out of memory."""
MOST_TOO_HIGH = 0.03
"""A plan that holds so much less than predicted does not pass: memory is wasted."""
ROUNDING_BYTES = 2**20
"""What a prediction may always be off by: of a few MiB, the rounding of tensors to 512 bytes is percents."""
RESERVE = "reserve"
"""Category of a prediction that is no tensor's."""
RESERVED = "reserved"
"""Category of a measurement that is not part of the peak: what the allocator had of the device."""
DEFAULT, EXPANDABLE = "default", "expandable_segments"
"""Settings of PyTorch's allocator."""
WORKSPACES = "cublas_workspaces"
"""Category of a prediction on GPUs: the allocator hands them out, so that they are measured there."""
MEASURED_STEPS = 3
"""Steps on GPUs; the first makes optimizer states and is not counted."""


@dataclass(frozen=True)
class Allocator:
    """What CUDA's caching allocator is predicted to do within the limit, workspaces of cuBLAS included."""

    allocated_bytes: int
    """At the peak."""
    reserved_bytes: int
    """At the peak of what it has of the device; if the steps do not fit, the least that they need."""
    retries: int
    """Times a step that it has to give cached memory back to the device."""
    fits: bool
    """Whether the steps run within `Verified.allocatable_bytes`."""
    without_retries_bytes: int
    """What a limit would have to leave it for no retries, the cluster's `rounding_bytes` included."""


@dataclass(frozen=True)
class Verified:
    """What a plan was predicted to hold, and what it held."""

    how: str
    """`rehearsal`, which is a dry run, or `cuda`."""
    rank: int
    """Rank that was run, or that held most: the fullest one."""
    world_size: int
    predicted: Mapping[str, int]
    """Bytes at the predicted peak by category, without the reserve."""
    tracked: Mapping[str, int]
    """Bytes at the peak by category; on GPUs, what the allocator has `allocated`, and the most it has `reserved`."""
    predicted_peak_bytes: int
    tracked_peak_bytes: int
    predicted_phase: str
    tracked_phase: str
    seconds: float
    allocatable_bytes: int
    """What the plan's limit leaves PyTorch's allocator to reserve."""
    allocators: Mapping[str, Allocator] = field(default_factory=dict)
    """Of a dry run for CUDA, what the allocator would do: by `DEFAULT` and `EXPANDABLE`."""
    parts: tuple[PartPeak, ...] = ()
    """Of a dry run, what lived at most while each part of the model ran, in the order of the step."""

    @property
    def error(self) -> float:
        """(predicted - tracked) / tracked."""
        return (self.predicted_peak_bytes - self.tracked_peak_bytes) / self.tracked_peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """The most that the allocator of any rank had of its device; None in a dry run."""
        return self.tracked.get(RESERVED)

    @property
    def is_close(self) -> bool:
        """Whether the prediction is as close as it is meant to be."""
        off_bytes = abs(self.predicted_peak_bytes - self.tracked_peak_bytes)
        return -MOST_TOO_LOW <= self.error <= MOST_TOO_HIGH or off_bytes <= ROUNDING_BYTES

    @property
    def fits(self) -> bool:
        """Whether the allocator kept within the limit, so far as that was measured, or would."""
        if self.reserved_bytes is not None:
            return self.reserved_bytes <= self.allocatable_bytes
        return EXPANDABLE not in self.allocators or self.allocators[EXPANDABLE].fits

    @property
    def holds(self) -> bool:
        return self.is_close and self.fits


def verify(
    view: OpenPlan, model: str | None = None, on_gpus: bool | None = None, expert_imbalance: float | None = None
) -> Verified:
    """Run a plan dry, or measure it on GPUs (None: if this process is one of the plan's ranks and has one).

    `model` replaces the name that the plan knows its model by, and `expert_imbalance`, in the dry run, the
    plan's.  On GPUs it is a collective call of all ranks that torchrun started.  Raises OsdpError.
    """
    plan = view.plan
    source = load_model(model or plan.model.name, sequence_length=plan.model.sequence_length)
    predicted = {name: size for name, size in view.prediction.memory_by_category.items() if name != RESERVE}
    if on_gpus is None:
        on_gpus = torch.cuda.is_available() and _ranks() == view.load.cluster.world_size
    if on_gpus:
        _check_ranks(view)
        predicted[WORKSPACES] = sum(workspaces_bytes(view.load.cluster))
    started = time.perf_counter()
    held = (
        _measure(view, source) if on_gpus else _dry_run(view, source, expert_imbalance or plan.asked.expert_imbalance)
    )
    return Verified(
        how="cuda" if on_gpus else "rehearsal",
        rank=held.rank,
        world_size=view.load.cluster.world_size,
        predicted=predicted,
        tracked=held.categories,
        predicted_peak_bytes=sum(predicted.values()),
        tracked_peak_bytes=held.peak_bytes,
        predicted_phase=view.prediction.peak_phase,
        tracked_phase=held.phase,
        seconds=time.perf_counter() - started,
        allocatable_bytes=allocatable_bytes(view.load.cluster, view.plan.limit_bytes),
        allocators=held.allocators,
        parts=held.parts,
    )


@dataclass(frozen=True)
class _Held:
    """What a run held."""

    rank: int
    categories: Mapping[str, int]
    peak_bytes: int
    phase: str
    allocators: Mapping[str, Allocator] = field(default_factory=dict)
    parts: tuple[PartPeak, ...] = ()


def rehearse(view: OpenPlan, source: ModelSource, expert_imbalance: float) -> tuple[int, DryRun]:
    """Return the rank that holds most, and its dry run."""
    plan, space = view.plan, view.space
    schedule = compile_plan(plan, space.graph, view.load.cluster)
    model = source.build, source.example_inputs, lambda output: find_loss(output)[0]
    rank = view.decided.fullest(space, view.load)[0]
    data, device_type = DataDependent(expert_imbalance), view.load.cluster.device.kind
    contexts = (partial(as_on, device_type, data, is_building=is_building) for is_building in (False, True))
    script = Script(*model, plan.optimizer, plan.micro_batch, *contexts)
    return rank, dry_run(script, schedule, rank)


@contextmanager
def as_on(device_type: str, data: DataDependent, *, is_building: bool) -> Iterator[None]:
    """Have fake tensors of the CPU run the kernels of a plan's devices, and answer what depends on data."""
    autocast = Autocast(device_type, "cpu").standing_in() if device_type != "cpu" else nullcontext()
    with device_kernels(device_type, "cpu"), answering(data, is_building=is_building), autocast:
        yield


def _dry_run(view: OpenPlan, source: ModelSource, expert_imbalance: float) -> _Held:
    rank, found = rehearse(view, source, expert_imbalance)
    peak, limit_bytes = found.peak, allocatable_bytes(view.load.cluster, view.plan.limit_bytes)
    allocators = {}
    if view.load.cluster.device.kind == "cuda":
        workspaces = workspaces_bytes(view.load.cluster)
        rounding = rounding_bytes(view.load.cluster)
        allocators = {
            name: _replayed(found.trace, name, limit_bytes, workspaces, rounding) for name in (DEFAULT, EXPANDABLE)
        }
    return _Held(rank, peak.categories, peak.total_bytes, f"{peak.phase}, {peak.op}", allocators, found.parts)


def _replayed(
    trace: AllocationTrace, settings: str, limit_bytes: int, workspaces: Sequence[int], rounding: int
) -> Allocator:
    how: Any = {"expandable": settings == EXPANDABLE, "workspaces_bytes": workspaces}
    found, without_bytes = replay(trace, limit_bytes, **how), limit_without_retries_bytes(trace, **how) + rounding
    if found.runs:
        return Allocator(found.allocated_bytes, found.reserved_bytes, found.retries, True, without_bytes)
    needed_bytes = least_limit_bytes(trace, limits=20, **how)
    needed = replay(trace, needed_bytes, **how)
    return Allocator(needed.allocated_bytes, needed_bytes, needed.retries, False, without_bytes)


def _ranks() -> int:
    """Return how many ranks torchrun started, 1 if it did not start this process."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def _check_ranks(view: OpenPlan) -> None:
    if not torch.cuda.is_available():
        raise OsdpError("there is no GPU to measure on", advice="leave --device out to check on fake tensors")
    wanted = view.load.cluster.world_size
    if _ranks() != wanted:
        what = "the plan is for another number of ranks"
        advice = f"torchrun --nproc-per-node {view.load.cluster.gpus_per_node} -m osdp verify PLAN"
        raise OsdpError(what, got=str(_ranks()), expected=str(wanted), advice=advice)


def _measure(view: OpenPlan, source: ModelSource) -> _Held:
    """Run steps on this rank's GPU and return what the fullest rank's allocator gave out."""
    from osdp.api import OSDP

    plan = view.plan
    if not dist.is_initialized():
        torch.cuda.set_device(own_gpu())
        raise_lost_ranks()
        # One rank may have been started by hand, without torchrun's addresses.
        ranks: dict[str, Any] = {}
        if "RANK" not in os.environ:
            ranks = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        dist.init_process_group("cpu:gloo,cuda:nccl", **ranks)
    with torch.device("meta"):
        without_data = source.build()
    inputs_of = partial(source.example_inputs, without_data)
    model = OSDP(source.build, plan, view.load.cluster, example_inputs=inputs_of)
    device = model.sharded.device
    windows_bytes = sum(unit.bytes_beside_allocator for unit in model.sharded.units)
    keep_within(allocatable_bytes(view.load.cluster, plan.limit_bytes) - windows_bytes, device)
    optimizer = as_priced(plan.optimizer)(model.parameters())
    for step in range(MEASURED_STEPS):
        if step == 1:
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(plan.accumulation):
            inputs = source.example_inputs(model.module, plan.micro_batch)
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
            output = model(*args, **kwargs)
            if view.space.graph.trains:
                find_loss(output)[0].backward()  # type: ignore[no-untyped-call]
            del output
        optimizer.step()
        optimizer.zero_grad()
    own = [found + windows_bytes for found in (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())]
    every = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor(own, dtype=torch.int64, device=device))
    rank = max(range(len(every)), key=lambda index: int(every[index][0]))
    allocated, reserved = int(every[rank][0]), max(int(each[1]) for each in every)
    dist.destroy_process_group()
    return _Held(rank, {"allocated": allocated, RESERVED: reserved}, allocated, "as torch.cuda measures it")
