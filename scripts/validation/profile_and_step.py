"""`osdp profile`, and then a step as it is predicted from that against one that nothing measures but a clock."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from osdp.profile.fsdp_overhead import LaunchedStacks, UnitLaunch, launch_of, unit_launch
from osdp.zoo import load_model
from planner.analysis.explain import OpenPlan, open_plan
from profiler.cluster.cluster import Cluster
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import pass_launch_s
from profiler.cluster.read_cluster import read_cluster
from profiler.mixed_precision import cast_inputs
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.timing.host_launches import host_launches_s, mean_s
from profiler.trace.trace import trace_model
from runtime.compile_plan import compile_plan
from runtime.meshes import Meshes
from runtime.observe.one_rank import Step, one_rank
from validation.allocator import start_over
from validation.bounds import judged, outside
from validation.check import Finding, Place
from validation.memory import script_of
from validation.processes import command_output
from validation.steps import WARM_UP_STEPS, busy_s, dry_device, seconds_of, uniform_view

BATCHES = (1, 8)
ROUNDS = 24
"""Of steps and of what times the host, in turn."""
MOST_OFF = 0.10
LEAST_BUSY = 0.90
"""Of a step that does not wait for Python."""
PROFILE_TIMEOUT_S = 130.0


def profiled(place: Place, ranks: int, model: str, precision: str) -> Path | Finding:
    """Run `osdp profile`; return the cluster file, or what went wrong."""
    path = place.scratch / "profiled.yaml"
    command = [sys.executable, "-m", "osdp", "profile", "-o", str(path), "--device", place.device, "--model", model]
    command += ["--precision", precision, "--batch", ",".join(map(str, BATCHES)), "--ranks-per-node", str(ranks)]
    command += ["--budget-s", "12", "--repetitions", "2"] if place.is_dry else ["--budget-s", "30"]
    # On CPUs as many threads in profile and step: more than cores wait for each other.
    status, output = command_output(command, PROFILE_TIMEOUT_S, {"OMP_NUM_THREADS": "1"} if place.is_dry else None)
    return Finding(False, f"osdp profile ended with {status}\n{output[-2000:]}") if status else path


def check(place: Place) -> Finding:
    """Profile this device, and compare steps of both micro-batches.

    A host may change its speed by a third within seconds.  So what it takes to launch is measured again between the
    steps, and a prediction with that is judged too, which says how much of an error is the host's.
    """
    model = "gpt2-tiny" if place.is_dry else "gpt2-medium"
    path = profiled(place, 1, model, "bf16")
    if isinstance(path, Finding):
        return path
    source = load_model(model)
    graph = trace_model(source, "bf16", place.device)
    views = {batch: uniform_view(graph, path, 1, "replicate", batch, "fused_adam") for batch in BATCHES}
    taken = {batch: beside_the_host(view, source, place) for batch, view in views.items()}
    # Last, as what watches the GPU for that stays with the process, and makes launching slower.
    busy = {
        batch: None if place.is_dry else busy_share(view, source, taken[batch].step_s) for batch, view in views.items()
    }
    told, complaints, figures = list[str](), list[str](), dict[str, Any]()
    if (launch := read_cluster(path).launch) is not None:
        figures["launch"] = {field.name: getattr(launch, field.name).value for field in fields(launch)}
    for batch, view in views.items():
        seconds = taken[batch].step_s
        now = open_plan(view.plan, graph, relaunched(view.load.cluster, graph, taken[batch]))
        errors = {
            "predicted": view.step_with_host_ahead_s / seconds - 1,
            "with the host as between the steps": now.step_with_host_ahead_s / seconds - 1,
        }
        figures[f"batch_{batch}"] = {
            "step_s": seconds,
            "predicted_s": view.step_with_host_ahead_s,
            "predicted_without_a_lead_s": view.prediction.step_time_s,
            "predicted_with_the_host_between_steps_s": now.step_with_host_ahead_s,
            "plain_launches_s": taken[batch].plain_s,
            **asdict(taken[batch].unit),
            "busy": busy[batch],
            **now.prediction.time_by_term,
        }
        off = ", ".join(f"{how} {error:+.1%}" for how, error in errors.items())
        told.append(f"batch {batch}: {off} of {seconds * 1e3:.1f} ms{said_of(busy[batch])}")
        if not place.is_dry:
            for how, error in errors.items():
                complaints += outside(f"batch {batch}: {how} / measured - 1", error, -MOST_OFF, MOST_OFF)
    return judged("; ".join(told), complaints, figures)


class PlainPasses:
    """Passes of the model without units, but cast as under a plan, to time the host by."""

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        with device:
            self.module = source.build().to(torch.bfloat16)
        cast_inputs(self.module, "bf16")
        inputs = source.example_inputs(self.module, 1)
        self.inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
        self.device = device

    def launch_s(self) -> float:
        """Return the seconds in which the host launches a pass."""
        found = host_launches_s(self.module, self.inputs, self.device, 2)
        assert found, "there is room for so small a model"
        return fmean(found)


@dataclass(frozen=True)
class Beside:
    """Means of what was timed in turn."""

    step_s: float
    plain_s: float
    """Of launching a pass without units."""
    unit: UnitLaunch


def beside_the_host(view: OpenPlan, source: ModelSource, place: Place) -> Beside:
    """Time steps of a plan, and between them what the host takes to launch plain passes and stacks of units."""
    device = dry_device() if place.is_dry else start_over()
    plain = PlainPasses(source, device)
    with running(view, source, device) as step:
        stacks = LaunchedStacks(Meshes(device.type, 1, 1).mesh(1), device, "bf16")
        stacks.rounds(1)
        for _ in range(WARM_UP_STEPS):
            step()
        found = list[tuple[float, ...]]()
        for _ in range(2 if place.is_dry else ROUNDS):
            found.append((seconds_of(step, device), plain.launch_s(), *stacks.round_s(), seconds_of(step, device)))
    before_s, plain_s, *stacks_s, after_s = zip(*found, strict=True)
    return Beside(mean_s(before_s + after_s), mean_s(plain_s), unit_launch(*map(mean_s, stacks_s)))


def busy_share(view: OpenPlan, source: ModelSource, step_s: float) -> float:
    """Return for which share of a step's seconds the GPU computes or copies."""
    gpu = start_over()
    with running(view, source, gpu) as step:
        step()
        return busy_s(step, gpu) / step_s


def running(view: OpenPlan, source: ModelSource, device: torch.device) -> AbstractContextManager[Step]:
    """Return the steps of a plan's rank."""
    return one_rank(script_of(view, source), compile_plan(view.plan, view.space.graph, view.load.cluster), device)


def relaunched(cluster: Cluster, graph: ModelGraph, now: Beside) -> Cluster:
    """Return the cluster with what launching takes of the host now: plain passes of the model, and units."""
    measured = cluster.measured
    assert measured is not None
    if cluster.launch is None:
        return cluster
    share = now.plain_s / pass_launch_s(graph, measured.calls)
    calls = tuple(
        replace(one, forward_launch_s=share * one.forward_launch_s, backward_launch_s=share * one.backward_launch_s)
        for one in measured.calls
    )
    how = "measured: between the steps of this check"
    kernel_s = Figure(share * cluster.launch.kernel_s.value, how)
    return replace(cluster, launch=launch_of(kernel_s, now.unit, how), measured=replace(measured, calls=calls))


def said_of(busy: float | None) -> str:
    """Say how busy the GPU is; None: there is none."""
    if busy is None:
        return ""
    return f", GPU busy {busy:.0%}{' (host-bound)' if busy < LEAST_BUSY else ''}"
