"""A model that one GPU cannot train whole, within 8 GB of it: as one rank of eight, and alone with offload."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import date
from typing import Any

import torch
from yaml import safe_dump

from osdp.planning.allocator_headroom import ROOMY, TIGHT, roomier_headroom
from osdp.planning.clusters import allocatable_bytes, memory_limit
from osdp.planning.request import Planned, Request, plan_model
from osdp.profile.fsdp_overhead import LaunchedStacks, launch_of, unit_launch
from osdp.zoo import load_cluster, load_model, model_card
from planner.analysis.explain import open_plan
from planner.optimizers import fused_name
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster, Launch, Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import Measured, pass_launch_s
from profiler.timing.host_launches import mean_s
from profiler.timing.operator_times import measure_calls
from profiler.trace.trace import trace_model
from runtime.compile_plan import compile_plan
from runtime.meshes import Meshes
from runtime.observe.dry_run import fake_world
from runtime.observe.one_rank import Step, one_rank
from validation.allocator import retries, start_over
from validation.bounds import judged, outside
from validation.check import Finding, Place
from validation.memory import script_of
from validation.processes import ROOT, command_output
from validation.steps import dry_device, median_step_s

FREE = Link(Figure(0.0, "assumed: a fake process group"), Figure(1e18, "assumed: a fake process group"))
"""A link over which sending takes no time."""
CLUSTER, CHIPS = "h100-8", ("H100", "H200")
"""Whose compute times are predicted, and the names of cards with that chip."""
LIMIT_BYTES = 8 * GIB
MOST_OFF = 0.15
"""Of the step as it is predicted for a network that takes no time."""
STEPS = 5
LAYERS = 2
"""Of the model whose layers are timed: all of a model's are alike."""
TRAIN_TIMEOUT_S = 230.0


def of_eight(place: Place) -> Finding:
    """Train as rank 0 of 8 with what 8 GB leave the allocator; time it against what is predicted without a network.

    Twice: as planned by default, and with the least headroom, which makes the allocator give cached memory back in
    every step.  What retries cost is in no prediction, but in what the planner compares plans by: it is added here.
    """
    model = "gpt2-tiny" if place.is_dry else "gpt2-1.5b"
    source, machine = load_model(model), load_cluster(CLUSTER)
    limit_bytes, micro_batch = memory_limit(machine, LIMIT_BYTES), 1 if place.is_dry else None
    told, complaints, figures = list[str](), list[str](), dict[str, Any]()
    least = Request(limit_bytes, "fp32", fused_name("adam"), micro_batch, headroom=TIGHT.headroom)
    plans = {
        "by default": plan_model(source, machine, replace(least, roomier=roomier_headroom(machine))),
        "with the least headroom": plan_model(source, machine, least),
    }
    device = dry_device() if place.is_dry else start_over()
    micro_batches = [one.plan.micro_batch for one in plans.values()]
    measured = of_this_device(machine, model, "fp32", micro_batches, device, place)
    assert measured.launch is not None
    figures |= {field.name: getattr(measured.launch, field.name).value for field in fields(Launch)}
    is_known = not place.is_dry and any(chip in torch.cuda.get_device_name() for chip in CHIPS)
    for name, planned in plans.items():
        schedule = compile_plan(planned.plan, planned.graph, machine)
        if not place.is_dry:
            start_over(allocatable_bytes(machine, limit_bytes))
        view = open_plan(planned.plan, planned.graph, measured)
        try:
            with one_rank(script_of(view, source), schedule, device) as step:
                step_s = median_step_s(step, device, 2 if place.is_dry else STEPS)
                found_retries = 0 if place.is_dry else retries_of(step)
        except torch.OutOfMemoryError as error:  # of the other plan there are figures yet
            complaints.append(f"{name}: {str(error).partition(chr(10))[0]}")
            continue
        expected_s, terms = view.step_with_host_ahead_s + counted_retries_s(planned), view.prediction.time_by_term
        figures[name] = {"step_s": step_s, "predicted_s": expected_s, "retries": found_retries, **terms}
        figures[name] |= {"recomputed_blocks": len(view.plan.recomputations), "micro_batch": view.plan.micro_batch}
        off = f"{step_s / expected_s - 1:+.0%} of {expected_s:.3f} s"
        told.append(f"{name}: a step takes {step_s:.3f} s, {off}, {found_retries} retries")
        if is_known:
            complaints += outside(f"{name}: step / predicted", step_s / expected_s, 1 - MOST_OFF, 1 + MOST_OFF)
    return judged("; ".join(told) + ("" if is_known else ", which is of another device"), complaints, figures)


def counted_retries_s(planned: Planned) -> float:
    """Return what the planner counts for retries of the allocator in a step of a plan with a headroom by default."""
    return (TIGHT if planned.tighter is None else ROOMY).retries_s


def retries_of(step: Step) -> int:
    """Return how often a step makes the allocator give cached memory back."""
    before = retries()
    step()
    return retries() - before


def of_this_device(
    machine: Cluster, model: str, precision: str, micro_batches: Sequence[int], device: torch.device, place: Place
) -> Cluster:
    """Return the cluster with what the model's layers take of this device and host, and a free network.

    A fake process group sends nothing; what FSDP2 copies is predicted from the rates of the cluster's file.
    """
    card, shallow = model_card(model), place.scratch / "shallow.yaml"
    shallow.write_text(safe_dump(asdict(replace(card, parameters=None, config={**card.config, "layers": LAYERS}))))
    source = load_model(str(shallow))
    graph = trace_model(source, precision, device.type)
    calls = measure_calls(source, graph, device, micro_batches, repetitions=2 if place.is_dry else STEPS).calls
    launches = sum(call.forward.launches + call.backward.launches for call in graph.calls)
    kernel_s = pass_launch_s(graph, calls) / launches
    with fake_world(8, 0):
        stacks = LaunchedStacks(Meshes(device.type, 1, 8).mesh(8), device, precision)
        unit = unit_launch(*map(mean_s, zip(*stacks.rounds(8 * STEPS), strict=True)))
    how = "measured: in this process"
    launch = launch_of(Figure(kernel_s, how), unit, how)
    measured = Measured(
        date.today().isoformat(), f"torch {torch.__version__}", STEPS, calls=calls, unit_overhead_s=None
    )
    return replace(machine, intra=FREE, nccl=None, launch=launch, measured=measured)


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
    return found_in(output, STEPS, offloads=not place.is_dry)


def found_in(output: str, steps: int, *, offloads: bool = False) -> Finding:
    """Judge what `osdp train` has printed, which must say that it offloads if told so."""
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
    if offloads and "+offload" not in figures["operators"]:
        complaints.append(f"nothing was offloaded: {figures['operators'] or 'no operators were reported'}")
    told = f"loss {losses[-1] if losses else math.nan:.4g}, peak {peak_bytes / MIB:.0f} of {limit_bytes / MIB:.0f} MiB"
    return judged(told, complaints, figures)
