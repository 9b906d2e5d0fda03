"""From a model and a cluster to a plan, and from a plan file back: what joins the stages.

    ModelSource --trace_model--> ModelGraph --search--> Found --make_plan--> Plan --write_plan--> YAML
    YAML --read_plan--> Plan --reopen--> OpenPlan (what `planner.analysis.explain` takes apart)

Nothing here prints; `osdp.cli` does.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from osdp.planning.headroom import NO_HEADROOM, Headroom, check_headroom
from osdp.planning.imbalance_option import lasting
from osdp.zoo import cluster_names, load_cluster, load_model
from planner.analysis.explain import OpenPlan, open_plan
from planner.cost.stragglers import BALANCED, Imbalance
from planner.cost.workload import Workload
from planner.pins import Pin, parse_pin, resolve
from planner.plan import Asked, Plan, cluster_fingerprint
from planner.pricing import make_plan
from planner.problem import Pins, Progress, Task
from planner.search.baselines import Baseline
from planner.search.infeasible import NothingFits, Remedy, blame
from planner.search.search import Found, search
from profiler.byte_sizes import MIB, format_bytes
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.yaml_files import Problem, read_text, read_yaml, write_yaml

Loaded = TypeVar("Loaded")

DEFAULT_CLUSTER = "titan-rtx-8"
"""What is planned for where the user names no cluster and there is none to see."""

_VARIANT = re.compile(r"nvidia|sxm\d*|hbm\d\w*|\d+gb", re.IGNORECASE)
"""Words of a device's name that its vendor and torch do not use alike."""
_SAME_MEMORY = 0.1
"""Relative difference up to which two sizes are the same card's: drivers keep a part."""


@dataclass(frozen=True)
class Request:
    """What the user asks of a model and a cluster."""

    limit_bytes: int
    """Memory per device that may be used, reserve included; see `memory_limit`."""
    precision: str = "fp32"
    """Compute dtype: `fp32` or `bf16`."""
    optimizer: str = "adam"
    """Key of `planner.cost.unit_memory.OPTIMIZERS`."""
    micro_batch: int | None = None
    """Samples per rank in one forward; None: searched."""
    global_batch: int | None = None
    """Samples per step of all ranks; None: one micro-batch per step."""
    headroom: Headroom = NO_HEADROOM
    """Part of the limit that is left free."""
    pins: tuple[Pin, ...] = ()
    """What every plan of the search has to keep."""
    imbalance: Imbalance = BALANCED
    """How unlike micro-batches are."""
    imbalance_as_given: str = ""
    """As the user gave that; the plan's file gets it as `lasting` makes it."""

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the limit that are left free."""
        return self.headroom.of(self.limit_bytes)

    @property
    def usable_bytes(self) -> int:
        """What the search may use."""
        return self.limit_bytes - self.headroom_bytes


@dataclass(frozen=True)
class Planned:
    """A plan and all that a report says of how it came about."""

    plan: Plan
    graph: ModelGraph
    found: Found
    trace_s: float
    """Seconds that tracing the model took."""

    @property
    def cluster(self) -> Cluster:
        """The cluster that the plan is for."""
        return self.found.load.cluster

    @property
    def pins(self) -> Pins:
        """What the user decided."""
        return pins_of(self.plan, self.graph, self.cluster)

    @property
    def best_baseline(self) -> Baseline | None:
        """The fastest uniform configuration that fits, if one does."""
        fitting = [baseline for baseline in self.found.baselines if baseline.feasible]
        return max(fitting, key=lambda baseline: baseline.samples_per_s, default=None)


def plan_model(
    source: ModelSource, cluster: Cluster, request: Request, progress: Progress = lambda what, fraction: None
) -> Planned:
    """Trace a model and return the fastest plan within the limit.

    Raises OsdpError for what cannot be asked, a model that cannot be traced, and where nothing fits.
    """
    graph, trace_s = trace(source, cluster, request, progress)
    task = task_of(request, graph, cluster)
    try:
        found = search(task, progress)
    except NothingFits as refused:
        raise explain_refusal(refused, task, request) from None
    return Planned(written(found, request), graph, found, trace_s)


def trace(source: ModelSource, cluster: Cluster, request: Request, progress: Progress) -> tuple[ModelGraph, float]:
    """Return the model's graph and the seconds that tracing took.

    Raises OsdpError for what cannot be asked, and for a model that cannot be traced.
    """
    check_headroom(request.headroom, request.limit_bytes, cluster)
    # Says at once what is wrong with precision or optimizer, before the trace takes its seconds.
    Workload(cluster, request.optimizer, request.precision, micro_batch=1)
    from profiler.trace.trace import trace_model  # imports torch, which takes longer than all the rest

    progress(f"tracing {source.name}", 0.0)
    started = time.perf_counter()
    graph = trace_model(source, request.precision, cluster.device.kind)
    return graph, time.perf_counter() - started


def task_of(request: Request, graph: ModelGraph, cluster: Cluster) -> Task:
    """Return what the search is asked; raises OsdpError for pins that cannot be honoured."""
    return Task(
        graph,
        cluster,
        request.usable_bytes,
        request.optimizer,
        request.global_batch,
        request.micro_batch,
        pins=resolve(request.pins, graph, cluster),
        imbalance=request.imbalance,
    )


def pins_of(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Pins:
    """Return what the user pinned when a plan was made; raises OsdpError as `task_of` does."""
    return resolve([parse_pin(pin) for pin in plan.asked.pins], graph, cluster)


def written(found: Found, request: Request) -> Plan:
    """Return the plan that was found for a request."""
    asked = Asked(
        request.micro_batch,
        request.global_batch,
        [str(pin) for pin in request.pins],
        lasting(request.imbalance_as_given),
    )
    return make_plan(
        found.options,
        found.spanning,
        found.space,
        found.load,
        limit_bytes=request.limit_bytes,
        gap=found.gap,
        headroom_bytes=request.headroom_bytes,
        asked=asked,
    )


def explain_refusal(refused: NothingFits, task: Task, request: Request) -> NothingFits:
    """Return the refusal in the user's terms: with the headroom, and the pin that is to blame, if one is."""
    refusal = refused.refusal
    remedies = list(blame(task, refusal.load, request.pins)) if request.pins else []
    if request.headroom_bytes and refusal.needed_bytes <= request.limit_bytes:
        remedies.append(Remedy("without --headroom", refusal.needed_bytes))
    return NothingFits(
        replace(
            refusal,
            remedies=(*remedies, *refusal.remedies),
            headroom_bytes=request.headroom_bytes,
            advised_bytes=request.headroom.over(refusal.needed_bytes),
        )
    )


def memory_limit(cluster: Cluster, limit_bytes: int | None) -> int:
    """Return the limit per device: what was asked for, but at most what the driver leaves of the device.

    So the 24 GB of a card sold with 24 GB are taken for all that it has. Raises OsdpError for more.
    """
    device = cluster.device
    available, nominal = int(device.memory_bytes.value), int(device.nominal_bytes.value)
    if limit_bytes is not None and limit_bytes > max(available, nominal):
        raise OsdpError(
            f"the memory limit is larger than the memory of {device.name} ({cluster.name})",
            got=f"{format_bytes(limit_bytes)} ({limit_bytes / MIB:,.0f} MiB)",
            expected=f"at most {format_bytes(nominal)}; its driver leaves {available // MIB:,} MiB to programs",
            advice=f"--mem {available // MIB}MB, no --mem at all, or another --cluster",
        )
    return available if limit_bytes is None else min(limit_bytes, available)


def default_cluster(nodes: int | None = None, gpus_per_node: int | None = None) -> tuple[Cluster, str]:
    """Return the cluster to plan for where the user names none, and why it was taken.

    That is the preset of the GPUs that torch sees, with as many of them, or else `DEFAULT_CLUSTER`.
    """
    import torch

    if not torch.cuda.is_available():
        return load_cluster(DEFAULT_CLUSTER, nodes, gpus_per_node), "the default, as no GPU is visible"
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    preset = _preset_of(name, memory_bytes)
    if preset is None:
        why = f"the default, as no preset is for the {name} that is visible; --cluster takes your own file"
        return load_cluster(DEFAULT_CLUSTER, nodes, gpus_per_node), why
    cluster = load_cluster(preset, nodes or 1, gpus_per_node or count)
    return cluster, f"the preset of what is visible, {count} x {name}"


def _preset_of(name: str, memory_bytes: int) -> str | None:
    """Return the preset whose device has that name and memory, one of a single node if there is."""
    presets = {preset: load_cluster(preset) for preset in cluster_names()}
    for preset in sorted(presets, key=lambda preset: presets[preset].nodes):
        device = presets[preset].device
        known_bytes = device.memory_bytes.value
        same_size = abs(memory_bytes - known_bytes) <= _SAME_MEMORY * known_bytes
        if device.kind == "cuda" and same_size and _words(device.name) == _words(name):
            return preset
    return None


def _words(name: str) -> set[str]:
    """Return the words of a device's name that tell it from another model."""
    return {word for word in re.split(r"\W+", name.lower()) if word and not _VARIANT.fullmatch(word)}


def check_output(path: Path, kind: str = "plan") -> None:
    """Raise OsdpError if a plan (or a `cluster`) should not or cannot be written to `path`.

    One that is there may be replaced, and so may an empty file; nothing else of the user's.
    """
    if path.is_dir():
        raise OsdpError(f"{path} cannot be written", got="it is a directory", expected=f"a file, such as {kind}.yaml")
    if not path.parent.is_dir():
        advice = f"make the directory first: mkdir -p {path.parent}"
        raise OsdpError(f"{path} cannot be written", got="no such directory", advice=advice)
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        is_ours = re.search(rf"^schema: osdp\.{kind}/", read_text(path), re.MULTILINE) is not None
    except OsdpError:
        is_ours = False  # Not text, or nothing that we may read.
    if not is_ours:
        raise OsdpError(
            f"{path} is there and is not a {kind}, so it is not overwritten",
            advice="another -o, or move that file away",
        )


def write_plan(path: Path, plan: Plan, how: str = "") -> None:
    """Write a plan as YAML, whole or not at all; `how` says in a comment how it was made.

    Raises OsdpError.
    """
    check_output(path)
    write_yaml(path, plan, how)


def read_plan(path: Path) -> Plan:
    """Return the plan in the file at `path`; raises OsdpError with the line of what is wrong."""
    return read_yaml(path, Plan, schema=Plan.SCHEMA, check=_problems)


def _problems(plan: Plan) -> Iterator[Problem]:
    """Find values that have the right type and yet cannot be."""
    counts = {
        ("micro_batch",): plan.micro_batch,
        ("accumulation",): plan.accumulation,
        ("limit_bytes",): plan.limit_bytes,
        ("cluster", "nodes"): plan.cluster.nodes,
        ("cluster", "gpus_per_node"): plan.cluster.gpus_per_node,
        ("model", "sequence_length"): plan.model.sequence_length,
    }
    for at, value in counts.items():
        if value < 1:
            yield Problem(at, "is wrong", str(value), "at least 1")
    if not 0 <= plan.headroom_bytes < max(plan.limit_bytes, 1):
        yield Problem(("headroom_bytes",), "is wrong", str(plan.headroom_bytes), "at least 0 and less than the limit")
    for name in ("per_micro_batch", "per_step"):
        factor = getattr(plan.waits, name)
        if not 1 <= factor < float("inf"):
            yield Problem(("waits", name), "is wrong", str(factor), "at least 1")
    if not 0 < plan.waits.fill <= 1:
        yield Problem(("waits", "fill"), "is wrong", str(plan.waits.fill), "more than 0 and at most 1")
    if not 0 <= plan.gap < 1:
        yield Problem(("gap",), "is wrong", str(plan.gap), "at least 0 and less than 1")


def reopen(plan: Plan, model: str | None = None, cluster: str | None = None) -> OpenPlan:
    """Trace the plan's model again and return the plan with all that its figures are made of.

    `model` and `cluster` replace the names that the plan knows them by.  Warns if the cluster's
    figures are not those that the plan was made with.  Raises OsdpError if they cannot be loaded, or
    if the model is not the one that the plan was made for.
    """
    length, ranks = plan.model.sequence_length, (plan.cluster.nodes, plan.cluster.gpus_per_node)
    source = _load("model", model, plan.model.name, lambda spec: load_model(spec, sequence_length=length))
    target = _load("cluster", cluster, plan.cluster.name, lambda spec: load_cluster(spec, *ranks))
    if cluster_fingerprint(target) != plan.cluster.fingerprint:
        warnings.warn(
            f"the figures of the cluster {target.name} are not those that the plan was made with, "
            "so predictions differ",
            stacklevel=2,
        )
    from profiler.trace.trace import trace_model

    graph = trace_model(source, plan.model.precision, target.device.kind)
    return open_plan(plan, graph, target)


def _load(what: str, given: str | None, known: str, load: Callable[[str], Loaded]) -> Loaded:
    """Load what was given, or by the name in the plan, and say then how to give another."""
    if given is not None:
        return load(given)
    try:
        return load(known)
    except OsdpError as error:
        raise OsdpError(
            f"the plan's {what} cannot be loaded by its name: {error.what}",
            got=error.got or repr(known),
            expected=error.expected,
            advice=f"--{what}, to say where it is now" + (f"; {error.advice}" if error.advice else ""),
        ) from error
