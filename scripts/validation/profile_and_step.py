"""`osdp profile`, and then a step as it is predicted from that against one that nothing measures but a clock."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from osdp.zoo import load_model
from profiler.cluster.read_cluster import read_cluster
from profiler.trace.trace import trace_model
from runtime.compile_plan import compile_plan
from runtime.observe.one_rank import one_rank
from runtime.own_gpu import own_gpu
from validation.allocator import start_over
from validation.bounds import judged, outside
from validation.check import Finding, Place
from validation.memory import script_of
from validation.processes import command_output
from validation.steps import busy_s, dry_device, median_step_s, uniform_view

BATCHES = (1, 8)
MOST_OFF = 0.10
LEAST_BUSY = 0.90
"""Of a step that does not wait for Python."""
PROFILE_TIMEOUT_S = 110.0


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
    """Profile this device, and compare steps of both micro-batches."""
    model = "gpt2-tiny" if place.is_dry else "gpt2-medium"
    path = profiled(place, 1, model, "bf16")
    if isinstance(path, Finding):
        return path
    source = load_model(model)
    graph = trace_model(source, "bf16", place.device)
    told, complaints, figures = list[str](), list[str](), dict[str, Any]()
    if (launch := read_cluster(path).launch) is not None:
        figures["launch"] = {field.name: getattr(launch, field.name).value for field in fields(launch)}
    for batch in BATCHES:
        view = uniform_view(graph, path, 1, "replicate", batch, "fused_adam")
        device = dry_device() if place.is_dry else start_over()
        with one_rank(script_of(view, source), compile_plan(view.plan, graph, view.load.cluster), device) as step:
            step_s = median_step_s(step, device, 2 if place.is_dry else 10)
            busy = None if place.is_dry else busy_s(step, own_gpu()) / step_s
        error = view.prediction.step_time_s / step_s - 1
        terms = view.prediction.time_by_term
        figures[f"batch_{batch}"] = {
            "step_s": step_s,
            "predicted_s": view.prediction.step_time_s,
            "busy": busy,
            **terms,
        }
        told.append(f"batch {batch}: {error:+.1%} of {step_s * 1e3:.1f} ms{said_of(busy)}")
        if not place.is_dry:
            complaints += outside(f"batch {batch}: predicted / measured - 1", error, -MOST_OFF, MOST_OFF)
    return judged("; ".join(told), complaints, figures)


def said_of(busy: float | None) -> str:
    """Say how busy the GPU is; None: there is none."""
    if busy is None:
        return ""
    return f", GPU busy {busy:.0%}{' (host-bound)' if busy < LEAST_BUSY else ''}"
