"""A model that one GPU cannot train whole, within 8 GB of it: as one rank of eight, and alone with offload."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from osdp.planning.clusters import allocatable_bytes, memory_limit
from osdp.planning.memory_options import default_headroom
from osdp.planning.request import Request, plan_model
from osdp.profile.fsdp_overhead import launched_stacks_s, unit_launch
from osdp.zoo import load_cluster, load_model
from planner.analysis.explain import open_plan
from planner.optimizers import fused_name
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Launch
from profiler.cluster.figure import Figure
from profiler.timing.host_launches import host_launch_s
from profiler.trace.trace import trace_model
from runtime.compile_plan import compile_plan
from runtime.meshes import Meshes
from runtime.observe.dry_run import fake_world
from runtime.observe.one_rank import one_rank
from validation.allocator import start_over
from validation.bounds import judged, outside
from validation.check import Finding, Place
from validation.memory import script_of
from validation.processes import ROOT, command_output
from validation.steps import dry_device, finish, median_step_s

CLUSTER, CHIPS = "h100-8", ("H100", "H200")
"""Whose compute times are predicted, and the names of cards with that chip."""
LIMIT_BYTES = 8 * GIB
MOST_OFF = 0.15
"""Of the step's predicted computation."""
TERMS = ("compute_s", "recompute_s", "launch_wait_s", "optimizer_s")
STEPS = 5
TRAIN_TIMEOUT_S = 170.0


def of_eight(place: Place) -> Finding:
    """Train as rank 0 of 8 with what 8 GB leave the allocator; time it against what is predicted to be computed."""
    source, machine = load_model("gpt2-tiny" if place.is_dry else "gpt2-1.5b"), load_cluster(CLUSTER)
    limit_bytes = memory_limit(machine, LIMIT_BYTES)
    batch = 2 if place.is_dry else None
    request = Request(limit_bytes, "fp32", fused_name("adam"), batch, headroom=default_headroom(machine))
    planned = plan_model(source, machine, request)
    view = open_plan(planned.plan, planned.graph, machine)
    schedule = compile_plan(view.plan, planned.graph, machine)
    device = dry_device() if place.is_dry else start_over(allocatable_bytes(machine, limit_bytes))
    with one_rank(script_of(view, source), schedule, device) as step:
        step_s = median_step_s(step, device, 2 if place.is_dry else STEPS)
        finish(device)
        reserved = 0 if place.is_dry else torch.cuda.max_memory_reserved(device)
    launch = launch_of_host(device, is_dry=place.is_dry)
    view = open_plan(view.plan, planned.graph, replace(machine, launch=launch))
    expected_s = sum(view.prediction.time_by_term[name] for name in TERMS)
    figures: dict[str, Any] = {"step_s": step_s, "expected_s": expected_s, "reserved_bytes": reserved}
    figures |= {field.name: getattr(launch, field.name).value for field in fields(launch)}
    figures |= {"micro_batch": view.plan.micro_batch, "recomputed_blocks": len(view.plan.recomputations)}
    figures |= {f"predicted_{name}": seconds for name, seconds in view.prediction.time_by_term.items()}
    told = f"a step takes {step_s:.3f} s, {step_s / expected_s - 1:+.0%} of {expected_s:.3f} s"
    is_known = not place.is_dry and any(chip in torch.cuda.get_device_name(device) for chip in CHIPS)
    if not is_known:
        return judged(f"{told}, which is of another device", [], figures)
    return judged(told, outside("step / predicted", step_s / expected_s, 1 - MOST_OFF, 1 + MOST_OFF), figures)


def launch_of_host(device: torch.device, *, is_dry: bool) -> Launch:
    """Measure what launching takes of this host, in fp32: a preset's was another one."""
    source = load_model("gpt2-tiny" if is_dry else "gpt2-medium")
    graph = trace_model(source, "fp32", device.type)
    with device:
        module = source.build()
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), source.example_inputs(module, 1))
    launches = sum(call.forward.launches + call.backward.launches for call in graph.calls)
    kernels_s = host_launch_s(module, inputs, device, STEPS)
    assert kernels_s is not None, "there is room for so small a model"
    with fake_world(8, 0):
        unit = unit_launch(*launched_stacks_s(Meshes(device.type, 1, 8).mesh(8), 3 * STEPS, device, "fp32"))
    how = "measured: in this check"
    return Launch(Figure(kernels_s / launches, how), Figure(unit.unit_s, how), Figure(unit.tensor_s, how))


def alone(place: Place) -> Finding:
    """Run `osdp train` on one device."""
    # Bytes, as sums would be asked for at the end, token by token, with all parameters copied for each.
    command = [sys.executable, "-m", "osdp", "train", "gpt2" if place.is_dry else "gpt2-1.5b"]
    command += ["--steps", str(STEPS), "--log-every", "1", "--ranks-per-node", "1", "--device", place.device]
    command += ["--data", str(ROOT / "README.md"), "--seq", "64" if place.is_dry else "1024"]
    command += ["--batch", "2", "--global-batch", "2"] if place.is_dry else []
    status, output = command_output(command, TRAIN_TIMEOUT_S)
    if status:
        return Finding(False, f"osdp train ended with {status}\n{output[-2000:]}")
    return found_in(output, STEPS)


def found_in(output: str, steps: int) -> Finding:
    """Judge what `osdp train` has printed."""
    losses = [float(one) for one in re.findall(r"step +\d+/\d+ +loss (\S+)", output)]
    used = re.search(r"memory utilization: ([0-9.]+) MB / ([0-9.]+) MB", output)
    complaints = outside("steps reported", len(losses), steps, steps)
    complaints += [f"a loss is {one}" for one in losses if not math.isfinite(one)]
    if used is None:
        return judged("no memory was reported", [*complaints, "no memory was reported"], {"losses": losses})
    reserved = re.search(r"allocator reserved ([0-9.]+) MB", output)
    allocated_bytes, limit_bytes = (float(one) * MIB for one in used.groups())
    peak_bytes = max(allocated_bytes, float(reserved[1]) * MIB if reserved else 0.0)
    figures = {
        "losses": losses,
        "allocated_bytes": allocated_bytes,
        "peak_bytes": peak_bytes,
        "limit_bytes": limit_bytes,
    }
    offloaded = re.search(r"operators: (.*?);", output)
    figures["operators"] = offloaded[1] if offloaded else ""
    complaints += outside("peak / limit", peak_bytes / limit_bytes, 0, 1)
    told = f"loss {losses[-1] if losses else math.nan:.4g}, peak {peak_bytes / MIB:.0f} of {limit_bytes / MIB:.0f} MiB"
    return judged(told, complaints, figures)
