"""How good plans are and what finding them costs: `python scripts/bench/search_quality.py [--help]`.

Every model of the zoo on every cluster, in fp32 and bf16, within 1.02, 1.05, 1.1, 1.3 and 2 times the smallest limit
and within all that the device has; some with a global batch (accumulation), uneven micro-batches, pins or offload.
`--named` are a few difficult ones beside, among them layers of which no two are alike.

For each: the certified gap, CPU seconds of the search without the trace, and samples per second.  At the end, what of
the targets is met.  `--json FILE` keeps the rows; `--against FILE` says which plans are slower than those kept before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from _shared import GIB, machine
from planning_time import layer_stack

from osdp.zoo import cluster_names, load_cluster, load_model, model_names
from planner.cost.stragglers import Imbalance
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.pins import parse_pin, resolve
from planner.problem import Task, micro_batches
from planner.search.least_memory import smallest_of
from planner.search.search import search
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

FACTORS = (1.02, 1.05, 1.1, 1.3, 2.0)
"""Limits in the smallest ones."""
PRECISIONS = ("fp32", "bf16")
VARIANTS = ("plain", "accumulation", "imbalance", "pins", "offload")
"""One of the last four for each model, cluster and precision, in turn, beside the first."""
GAPS = (0.002, 0.01)
"""Targets: at most the first in 95 % of problems, and the second in all."""
SECONDS = (0.7, 4.0)
"""Targets of the search: CPU seconds at the median, and in the worst."""
SLOWER = 1e-6
"""Relative difference of speeds from which a plan counts as slower than another."""


@dataclass(frozen=True)
class Problem:
    """One plan to be found."""

    model: str
    """Of the zoo, or `10-alike`, `100-distinct` and the like: layers of `planning_time.layer_stack`."""
    cluster: str
    precision: str = "fp32"
    variant: str = "plain"
    factor: float | None = None
    """Of the smallest limit."""
    limit_bytes: int | None = None
    """None, without a factor either: all that the device has."""

    @property
    def name(self) -> str:
        """What identifies it in files."""
        limit = f"x{self.factor}" if self.factor else "ample"
        limit = f"{self.limit_bytes / GIB:.2f}GB" if self.limit_bytes else limit
        return " ".join((self.model, self.cluster, self.precision, self.variant, limit))


NAMED = (
    *(Problem("uneven", "rtx4090-2", limit_bytes=gib * GIB) for gib in (2, 3)),
    *(Problem("gpt2-1.5b", "titan-rtx-8", limit_bytes=gib * GIB) for gib in (6, 8, 12)),
    Problem("gpt2-1.5b", "titan-rtx-8", limit_bytes=1785 * 2**20),
    *(Problem("gpt2-1.5b", "titan-rtx-8", factor=factor) for factor in (1.02, 1.3)),
    Problem("llama-7b", "a100-80g-8", "bf16", limit_bytes=24 * GIB),
    *(Problem("llama-7b", "a100-80g-8", "bf16", factor=factor) for factor in (1.02, 1.1)),
    Problem("bert-large", "rtx4090-2", "bf16", limit_bytes=6 * GIB),
    *(Problem("bert-large", "rtx4090-2", "bf16", factor=factor) for factor in (1.02, 1.05)),
    Problem("llama-1b", "rtx4090-2", "bf16", limit_bytes=12 * GIB),
    *(Problem(f"10-{kind}", "titan-rtx-8", factor=factor) for kind in ("alike", "distinct") for factor in (1.05, 1.5)),
    *(Problem(f"100-{kind}", "titan-rtx-8", factor=1.5) for kind in ("alike", "distinct")),
)


def zoo() -> Iterator[Problem]:
    """Yield every problem of the zoo."""
    for turn, (model, cluster, precision) in enumerate(product(model_names(), cluster_names(), PRECISIONS)):
        if precision not in load_cluster(cluster).device.matmul_flops_per_s:
            continue
        for variant in ("plain", VARIANTS[1 + turn % 4]):
            yield from (Problem(model, cluster, precision, variant, factor) for factor in (*FACTORS, None))


@cache
def traced(model: str, precision: str, kind: str) -> ModelGraph:
    """Return a model's graph."""
    layers, _, how = model.partition("-")
    if layers.isdigit():
        stack = layer_stack(int(layers), distinct=how == "distinct")
        source = ModelSource(model, lambda: stack, lambda module, batch: module.inputs(batch), 128)
        return trace_model(source, precision, kind)
    return trace_model(load_model(model), precision, kind)


@cache
def unlimited(problem: Problem) -> Task:
    """Return what is asked, with all the memory of the device; the problem is without a limit.

    Raises OsdpError where the variant does not exist on the cluster.
    """
    cluster = load_cluster(problem.cluster)
    graph = traced(problem.model, problem.precision, cluster.device.kind)
    task = Task(graph, cluster, int(cluster.device.memory_bytes.value))
    first = graph.operators[0].name
    pins = {"pins": (f"{first}=shard",), "offload": ("*=shard+offload",)}.get(problem.variant, ())
    if problem.variant == "accumulation":
        task = replace(task, global_batch=16 * cluster.world_size)
    if problem.variant == "imbalance":
        task = replace(task, imbalance=Imbalance(0.5, source="0.5"))
    return replace(task, pins=resolve([parse_pin(pin) for pin in pins], graph, cluster))


@cache
def smallest_bytes(problem: Problem) -> float:
    """Return the peak of the smallest plan that is found; the problem is without a limit."""
    task = unlimited(problem)
    settings = task.graph, task.cluster, task.optimizer
    loads = tuple(Workload.of(*settings, *sizes, task.waits(*sizes)) for sizes in micro_batches(task))
    return smallest_of(Space(task.graph, pins=task.pins), loads, float("inf")).peak.total_bytes


def asked(problem: Problem) -> Task | None:
    """Return what is to be solved; None where the device has less memory than the problem asks for."""
    without = replace(problem, factor=None, limit_bytes=None)
    task = unlimited(without)
    limit = problem.limit_bytes or task.limit_bytes
    if problem.factor is not None:
        limit = int(problem.factor * smallest_bytes(without)) + 1
    return replace(task, limit_bytes=limit) if limit <= task.limit_bytes else None


def solved(problem: Problem) -> dict[str, Any] | None:
    """Return a problem's row; None where the device has less memory than it asks for."""
    task = asked(problem)
    if task is None:
        return None
    started = time.process_time()
    found = search(task)
    cpu_s = time.process_time() - started
    row = {"problem": problem.name, "limit_bytes": task.limit_bytes, "gap": found.gap, "cpu_s": cpu_s}
    return row | {"samples_per_s": found.samples_per_s, "micro_batch": found.load.micro_batch}


def print_targets(rows: Sequence[dict[str, Any]]) -> None:
    """Print what of the targets is met, and every problem that misses one."""
    gaps, seconds = [row["gap"] for row in rows], [row["cpu_s"] for row in rows]
    close = sum(gap <= GAPS[0] for gap in gaps) / len(gaps)
    high = quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0]
    print(f"{len(rows)} problems")
    print(f"  gap at most {GAPS[0]:.1%}: {close:.1%} of problems (target 95 %)")
    print(f"  gap at most {GAPS[1]:.1%}: {sum(gap <= GAPS[1] for gap in gaps)} (target all); largest {max(gaps):.3%}")
    print(f"  CPU s of the search, median {median(seconds):.2f} (target {SECONDS[0]}), 95 % {high:.2f}, ", end="")
    print(f"worst {max(seconds):.2f} (target {SECONDS[1]}), sum {sum(seconds):.1f}")
    for row in rows:
        if row["gap"] > GAPS[1] or row["cpu_s"] > SECONDS[1]:
            print(f"  misses: {row['problem']}: gap {row['gap']:.3%}, {row['cpu_s']:.2f} CPU s")


def print_against(rows: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> None:
    """Print plans that are slower than those of an earlier run, and by how much others are faster."""
    was = {(row["problem"], row["limit_bytes"]): row["samples_per_s"] for row in before}
    both = [(row, was[key]) for row in rows if (key := (row["problem"], row["limit_bytes"])) in was]
    ratios = [row["samples_per_s"] / speed for row, speed in both]
    slower = [(row, ratio) for (row, _), ratio in zip(both, ratios, strict=True) if ratio < 1 - SLOWER]
    faster = [ratio for ratio in ratios if ratio > 1 + SLOWER]
    print(f"{len(both)} problems as before: {len(faster)} plans are faster, {len(slower)} are slower")
    if faster:
        print(f"  faster: by {median(faster) - 1:.3%} at the median, {max(faster) - 1:.3%} at the most")
    for row, ratio in slower:
        print(f"  slower: {row['problem']} by {1 - ratio:.4%}")


def main() -> None:
    """Solve the problems that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--named", action="store_true", help="the difficult problems alone")
    parser.add_argument("--every", type=int, default=1, help="only every so many-th problem of the zoo")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--only", default="", help="problems whose line contains this")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--against", type=Path, help="file of rows to compare with")
    options = parser.parse_args()
    problems = list(NAMED) if options.named else list(zoo())[options.first :: options.every]
    print(machine())
    print(f"{'gap':>8}  {'CPU s':>6}  {'samples/s':>10}  batch  {'GiB':>6}  problem")
    rows = []
    for problem in problems:
        if options.only not in problem.name:
            continue
        try:
            row = solved(problem)
        except OsdpError as error:
            print(f"{'':38}{problem.name}: {error}".split("\n")[0])
            continue
        if row is None:
            continue
        rows.append(row)
        numbers = f"{row['gap']:8.3%}  {row['cpu_s']:6.2f}  {row['samples_per_s']:10.4g}  {row['micro_batch']:5d}"
        print(f"{numbers}  {row['limit_bytes'] / GIB:6.2f}  {problem.name}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if rows:
        print_targets(rows)
    if options.against:
        print_against(rows, json.loads(options.against.read_text()))


if __name__ == "__main__":
    main()
