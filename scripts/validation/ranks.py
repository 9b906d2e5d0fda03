"""Ranks that torchrun starts: training steps under some strategies, and `osdp verify`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from osdp.planning.plan_file import write_plan
from osdp.zoo import cluster_names, load_cluster, load_model
from profiler.trace.trace import trace_model
from validation.bounds import judged
from validation.check import Finding, Place
from validation.first_steps import CLUSTER
from validation.processes import command_output, end_commands
from validation.steps import uniform_view

TIMEOUT_S = 80.0
SAME = 1e-4
"""Relative difference of losses that are to be the same."""


def torchrun(ranks: int, *command: str) -> list[str]:
    """Return the command line that starts ranks of this machine, for `command_output`."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]


def one_rank(place: Place) -> Finding:
    """Train by DistributedDataParallel's way and by FSDP2 with offload at world size 1, and verify a plan there.

    Both run at once, but a context and a communicator are measured before the second process has any.
    """
    figures: dict[str, Any] = {}
    before = 0 if place.is_dry else _free_with_own_context()
    with ThreadPoolExecutor(1) as pool:
        try:
            training = pool.submit(steps, place, 1, ("replicate", "replicate+offload"), figures)
            plans = write_plans(place, 1, ("replicate",))
            while not (training.done() or _result(place).exists()):
                time.sleep(0.1)
            complaints = verified(place, 1, plans, figures)
            complaints += training.result()
        except BaseException:
            end_commands()
            raise
    if "free_with_context_bytes" in figures:
        figures["context_bytes"] = before - figures.pop("free_with_context_bytes")
    figures["assumed_bytes"] = _assumed()
    told = "context and communicator have no bytes in a dry run" if place.is_dry else _sizes(figures)
    return judged(told, complaints, figures)


def several_ranks(place: Place) -> Finding:
    """Train and verify on two ranks: losses are the same whatever the strategy."""
    figures: dict[str, Any] = {}
    others = () if place.is_dry else ("shard", "odc_ordered:2", "owner")
    strategies = ("replicate", "odc:2", "shard+offload", *others)
    complaints = steps(place, 2, strategies, figures)
    plans = write_plans(place, 2, ("shard",) if place.is_dry else ("replicate", "shard", "odc:2"))
    complaints += verified(place, 2, plans, figures)
    return judged(f"{len(figures.get('losses', ()))} strategies trained", complaints, figures)


def steps(place: Place, ranks: int, strategies: Sequence[str], figures: dict[str, Any]) -> list[str]:
    """Run `first_steps.py`, add what it found to the figures and return complaints."""
    result = _result(place)
    model = "gpt2-tiny" if place.is_dry else "gpt2"
    status, output = command_output(
        torchrun(ranks, "-m", "validation.first_steps", place.device, model, str(result), *strategies), TIMEOUT_S
    )
    if status:
        return [f"first_steps.py ended with {status}: {output[-2000:]}"]
    figures |= json.loads(result.read_text())
    return unlike(figures["losses"])


def unlike(losses: dict[str, list[float]]) -> list[str]:
    """Return complaints about losses that are not finite, do not sink, or differ between strategies."""
    first, complaints = next(iter(losses.values())), []
    for strategy, found in losses.items():
        if not all(math.isclose(one, other, rel_tol=SAME) for one, other in zip(found, first, strict=True)):
            complaints.append(f"{strategy}: losses {found}, not {first}")
        elif not found[-1] < found[0] < math.inf:
            complaints.append(f"{strategy}: losses {found} do not sink")
    return complaints


def write_plans(place: Place, ranks: int, strategies: Sequence[str]) -> dict[str, Path]:
    """Write a plan of each strategy; return where."""
    graph = trace_model(load_model("gpt2-tiny" if place.is_dry else "gpt2-medium"), "fp32", "cuda")
    paths = {strategy: place.scratch / f"{strategy.replace(':', '-')}.yaml" for strategy in strategies}
    for strategy, path in paths.items():
        write_plan(path, uniform_view(graph, CLUSTER, ranks, strategy, 2, "adam").plan)
    return paths


def verified(place: Place, ranks: int, plans: Mapping[str, Path], figures: dict[str, Any]) -> list[str]:
    """Run `osdp verify` on plans, by strategy; return complaints."""
    complaints = []
    for strategy, path in plans.items():
        verify = ("-m", "osdp", "verify", str(path), "--json", "--device", "fake" if place.is_dry else "cuda")
        # A dry run makes a process group of its own.
        command = [sys.executable, *verify] if place.is_dry else torchrun(ranks, *verify)
        status, output = command_output(command, TIMEOUT_S)
        if status:
            complaints.append(f"osdp verify of {strategy} ended with {status}: {output[-1000:]}")
        if found := _object_in(output):
            figures[f"verify_{strategy}"] = {name: found[name] for name in ("error", "tracked_peak_bytes", "how")}
    return complaints


def _result(place: Place) -> Path:
    """Return where `first_steps.py` writes what it measured, as soon as it has, and again once it has trained."""
    return place.scratch / "first-steps.json"


def _object_in(output: str) -> dict[str, Any]:
    """Return the JSON object among lines that libraries print, empty if there is none."""
    start, end = output.find("{"), output.rfind("}")
    try:
        return dict(json.loads(output[start : end + 1]))
    except ValueError:
        return {}


def _free_with_own_context() -> int:
    torch.zeros(1, device="cuda")
    return torch.cuda.mem_get_info()[0]


def _assumed() -> dict[str, dict[str, float]]:
    """Return what the clusters that come with OSDP reserve for context and communicator."""
    machines = [load_cluster(name) for name in cluster_names()]
    parts = ("cuda_context", "nccl_buffers")
    return {
        one.name: {part: one.device.reserve_bytes[part].value for part in parts if part in one.device.reserve_bytes}
        for one in machines
        if one.device.kind == "cuda"
    }


def _sizes(figures: dict[str, Any]) -> str:
    sizes = {name: figures.get(f"{name}_bytes", math.nan) / 2**20 for name in ("context", "communicator")}
    return ", ".join(f"{name} {size:.0f} MiB" for name, size in sizes.items())
