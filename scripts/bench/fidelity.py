"""How near predictions and plans come: `python scripts/bench/fidelity.py [BENCH]...`, of

    list      fixed plans of the zoo's models, at 4 to 1,024 ranks: predicted peak against a dry run
    families  the models of families.py, under several plans each: the same
    random    plans with random strategies for every operator, fp32 and bf16, with and without recomputation,
              micro-batch 1 to 4, 4 to 1,024 ranks: the same
    limits    memory that the chosen plan uses of its limit, and what more could still buy, within it and beyond
    rivals    100 random (model, cluster, limit): the plan against every uniform baseline, by the simulator
    planning  `osdp plan --model gpt2-1.5b --mem 8GB` from process start, as `planning_time.py gpt2`

`--seed` and `--count` change the random cases.  Error is (predicted - tracked) / tracked, without the
reserve on both sides.  A dry run computes nothing, so that one process does for any number of ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from _shared import GIB
from planning_time import bench_gpt2

from osdp.planning.verify import Verified, verify
from osdp.zoo import load_cluster, load_model
from planner.analysis.explain import open_plan
from planner.cost.peak_memory import peak_memory
from planner.cost.simulator import simulated_s
from planner.cost.workload import Workload
from planner.model.fsdp_units import check_split
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.plan import Plan
from planner.pricing import fixed, make_plan
from planner.problem import Task
from planner.search.search import search
from planner.strategies.registry import known_strategies
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model

MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-1.5b", "bert-large", "llama-1b", "uneven")
"""Of the zoo; llama-7b is in the fixed list only, gpt2-tiny is too small to be of use."""
GRIDS = ((1, 4), (1, 8), (2, 8), (8, 8), (32, 8), (128, 8))
"""Nodes x ranks of a node, for random plans."""
PROCESSES = max(1, min(4, (os.cpu_count() or 2)))


@dataclass(frozen=True)
class Case:
    """A plan to be compared."""

    model: str
    precision: str
    grid: tuple[int, int]
    micro_batch: int
    choices: Mapping[str, str]
    """Strategy by operator; the key `*` is for all others."""
    recompute: float = 0.0
    """Fraction of the blocks that are recomputed, from the bottom."""
    accumulation: int = 1
    label: str = ""


FIXED = (
    Case("gpt2", "fp32", (1, 4), 2, {"*": "shard"}),
    Case("gpt2", "fp32", (8, 8), 1, {"*": "shard_grad"}),
    Case("gpt2", "bf16", (8, 8), 4, {"*": "group_shard:8"}, 1.0),
    Case("gpt2", "fp32", (1, 8), 1, {"*": "replicate"}),
    Case("gpt2", "bf16", (1, 8), 2, {"*": "replicate"}),
    Case("gpt2", "fp32", (2, 8), 2, {"*": "hierarchical"}, 0.5),
    Case("gpt2", "fp32", (1, 8), 2, {"*": "owner"}),
    Case("gpt2-medium", "bf16", (2, 8), 4, {"*": "secondary_shard:8"}, 1.0),
    Case("gpt2-medium", "fp32", (1, 8), 1, {"*": "shard", "*.mlp.*": "shard_grad"}),
    Case("gpt2-large", "bf16", (8, 8), 2, {"*": "group_shard:8", "*.mlp.*": "shard_grad"}),
    Case("gpt2-large", "fp32", (1, 8), 1, {"*": "shard"}, 1.0, accumulation=4),
    Case("gpt2-1.5b", "fp32", (1, 8), 1, {"*": "shard"}),
    Case("gpt2-1.5b", "bf16", (8, 8), 4, {"*": "group_shard:8"}, 1.0),
    Case("gpt2-1.5b", "bf16", (128, 8), 1, {"*": "shard"}),
    Case("gpt2-1.5b", "bf16", (2, 8), 2, {"*": "hierarchical"}, 1.0),
    Case("bert-large", "fp32", (1, 4), 2, {"*": "shard_grad"}),
    Case("bert-large", "bf16", (8, 8), 4, {"*": "secondary_shard:16", "*.attention.*": "owner"}, 0.5),
    Case("llama-1b", "bf16", (2, 8), 1, {"*": "shard"}, 1.0),
    Case("llama-1b", "fp32", (1, 8), 1, {"*": "group_shard:4"}),
    Case("llama-7b", "bf16", (4, 8), 1, {"*": "shard"}, 1.0),
    Case("llama-7b", "bf16", (4, 8), 1, {"*": "shard", "lm_head": "split(4*shard)"}, 1.0),
    Case("llama-7b", "bf16", (1, 8), 1, {"*": "shard+offload"}, 1.0),
    Case("uneven", "fp32", (1, 4), 2, {"*": "shard"}),
    Case("uneven", "bf16", (32, 8), 2, {"*": "shard", "*.attention.*": "replicate"}, 0.5),
)


OF_FAMILIES = tuple(
    Case(f"families:{model}", precision, (1, 8), micro_batch, {"*": strategy}, recompute)
    for model, precision, micro_batch in (
        *((name, "fp32", 4) for name in ("user_code", "scaled_sums", "tied_alias", "two_losses", "shared_mask")),
        ("two_losses", "fp32", 1),
        ("user_code", "bf16", 4),
        ("batch_norm", "bf16", 16),
        ("batch_norm", "fp32", 16),
        ("hf_gpt2", "fp32", 2),
        ("hf_t5", "fp32", 2),
        ("hf_llama", "fp32", 2),
        ("hf_llama", "bf16", 2),
        ("hf_llama_8k", "bf16", 1),
    )
    for strategy, recompute in (("shard", 0.0), ("shard", 0.5), ("shard", 1.0), ("shard_grad", 1.0))
)


@cache
def traced(model: str, precision: str) -> ModelGraph:
    """Return the graph of a model of the zoo."""
    return trace_model(load_model(model), precision)


def machine(grid: tuple[int, int]) -> Cluster:
    """Return a cluster of so many nodes and ranks; its rates do not matter to memory."""
    return load_cluster("a100-2x8", *grid)


def plan_of(case: Case) -> Plan:
    """Return the plan that a case describes."""
    from fnmatch import fnmatchcase

    graph, cluster = traced(case.model, case.precision), machine(case.grid)
    space, load = Space(graph), Workload.of(graph, cluster, "adam", case.micro_batch, case.accumulation)
    shard = Strategy("shard", cluster.world_size)
    choices = tuple(StageDecision((shard,) * len(stage.operators)) for stage in space.model.stages)
    tied = shard if space.model.spanning else None
    plan = make_plan(fixed(space, load, choices, tied), tied, space, load, limit_bytes=10**15, gap=0.0)
    taken = dict(plan.choices)
    for pattern, choice in case.choices.items():
        taken |= {name: choice for name in taken if fnmatchcase(name, pattern)}
    names = [block.name for block in graph.blocks]
    return replace(plan, choices=taken, recomputed_blocks=names[: round(case.recompute * len(names))])


def compared(case: Case) -> Verified:
    """Return the two peaks of a case and how long the dry run took."""
    return verify(open_plan(plan_of(case), traced(case.model, case.precision), machine(case.grid)), on_gpus=False)


def compare_all(cases: Sequence[Case]) -> None:
    """Print every case and the summary."""
    errors, elsewhere = [], []
    print(f"model         prec  ranks  batch  recomputed  {'strategies':42s}   tracked     error      s")
    with get_context("forkserver").Pool(PROCESSES, maxtasksperchild=8) as pool:
        for case, found in zip(cases, pool.imap(compared, cases), strict=True):
            errors.append(found.error)
            graph = traced(case.model, case.precision)
            head = graph.operators[graph.calls[-1].operator].name
            if not found.predicted_phase.endswith(f" {head}"):
                elsewhere.append(found.error)
            ranks = case.grid[0] * case.grid[1]
            name = case.model.removeprefix("families:")
            what = case.label or ", ".join(case.choices.values())
            print(
                f"{name:12s}  {case.precision}  {ranks:5d}  {case.micro_batch} x {case.accumulation}"
                f"  {case.recompute:10.0%}  {what:42.42s}  {found.tracked_peak_bytes / GIB:6.2f} GiB"
                f"  {found.error:+7.3%}  {found.seconds:5.1f}",
                flush=True,
            )
    for values, which in ((errors, "plans"), (elsewhere, "of them peak elsewhere than at the head and its loss")):
        if values:
            extremes = f"highest {max(values):+.3%}, lowest {min(values):+.3%}"
            print(f"{len(values)} {which}: mean absolute error {mean(map(abs, values)):.3%}, {extremes}", flush=True)


def random_cases(seed: int, count: int) -> Iterator[Case]:
    """Yield plans in which every operator, or every block, takes a random strategy of a random few."""
    for number in range(seed, seed + count):
        rng = random.Random(number)
        model, precision = rng.choice(MODELS), rng.choice(["fp32", "bf16"])
        grid = rng.choice(GRIDS)
        graph, cluster = traced(model, precision), machine(grid)
        # On CPU the copy of an offloaded shard is the shard itself: of whole copies that would be seen.
        known = [str(s) for s in known_strategies(cluster) if not s.offload or s.group == cluster.world_size]
        pool = rng.sample(known, rng.choice([1, 2, 3]))
        per_block = rng.random() < 0.4
        of_block = {index: rng.choice(pool) for index in range(len(graph.blocks))}
        splits = rng.random() < 0.2
        choices = {}
        for operator in graph.operators:
            in_block = per_block and operator.block is not None
            choices[operator.name] = of_block[operator.block or 0] if in_block else rng.choice(pool)
            if splits and rng.random() < 0.1:
                choices[operator.name] = _split(operator, rng, pool) or choices[operator.name]
        label = f"{'by block' if per_block else 'by operator'}{', split' if splits else ''}: {', '.join(pool)}"
        batch, recompute, accumulation = rng.randint(1, 4), rng.choice([0.0, 0.5, 1.0]), rng.choice([1, 1, 1, 2])
        yield Case(model, precision, grid, batch, choices, recompute, accumulation, label)


def _split(operator: Any, rng: random.Random, pool: Sequence[str]) -> str | None:
    """Return a choice of slices, None for an operator that cannot be split."""
    count = rng.choice([2, 4])
    try:
        check_split(operator, count)
    except OsdpError:
        return None
    return f"split({', '.join(rng.choice(pool) for _ in range(count))})"


def bench_limits(options: argparse.Namespace) -> None:
    """Print what plans use of 8 GB, the most that any plan within 8 GB can be faster, and what one more GiB buys."""
    print("model         cluster       prec  used of 8 GB  samples/s  in 8 GB at most  with 9 GB")
    for model in (*MODELS, "llama-7b"):
        for name, precision in (("titan-rtx-8", "fp32"), ("a100-2x8", "bf16")):
            cluster, graph = load_cluster(name), traced(model, precision)
            try:
                found, more = (search(Task(graph, cluster, size * GIB)) for size in (8, 9))
            except OsdpError as refused:
                print(f"{model:12s}  {name:12s}  {precision}  does not fit: {refused.expected}"[:110], flush=True)
                continue
            used = peak_memory(found.options, found.load).total_bytes / (8 * GIB)
            gain = more.samples_per_s / found.samples_per_s - 1
            most = 1.0 / (1.0 - found.gap) - 1.0
            figures = f"{used:12.2%}  {found.samples_per_s:9.2f}  {most:+14.2%}  {gain:+9.2%}"
            print(f"{model:12s}  {name:12s}  {precision}  {figures}", flush=True)


def _problem(number: int) -> tuple[str, float, float, float] | None:
    """Return (what, advantage over the best baseline, over FSDP, gap) of a random problem; None if nothing fits."""
    rng = random.Random(number)
    model, precision = rng.choice(MODELS), rng.choice(["fp32", "bf16"])
    names = ["titan-rtx-8", "a100-80g-8", "a100-2x8", "h100-8", "h100-4x8", "rtx4090-2"]
    cluster = load_cluster(rng.choice(names))
    limit = rng.uniform(3, min(40.0, cluster.device.memory_bytes.value / GIB))
    what = f"{model} {precision} on {cluster.name} at {limit:.1f} GiB"
    try:
        found = search(Task(traced(model, precision), cluster, int(limit * GIB)))
    except OsdpError:
        return None
    speed = found.load.samples_per_step / simulated_s(found.options, found.load)
    rivals = {b: b.load.samples_per_step / simulated_s(b.options, b.load) for b in found.baselines if b.feasible}
    best = max(rivals.values(), default=0.0)
    fsdp = max((s for b, s in rivals.items() if b.name == "FSDP"), default=0.0)
    return what, speed / best if best else float("inf"), speed / fsdp if fsdp else float("inf"), found.gap


def bench_rivals(options: argparse.Namespace) -> None:
    """Print how the plan compares with the uniform baselines on random problems."""
    numbers = range(options.seed, options.seed + 10 * options.count)
    with get_context("forkserver").Pool(PROCESSES) as pool:
        rows = list(islice(filter(None, pool.imap(_problem, numbers)), options.count))
    for what, ratio, _, _ in rows:
        if ratio < 1:
            print(f"slower: {what}: {ratio:.5f}", flush=True)
    ratios, over_fsdp = ([row[column] for row in rows if row[column] != float("inf")] for column in (1, 2))
    only, gaps = len(rows) - len(ratios), [gap for *_, gap in rows]
    print(f"{len(rows)} problems with a plan that fits; in {only} of them no uniform baseline does")
    for name, values in (("the best baseline", ratios), ("FSDP", over_fsdp)):
        parts = quantiles(values, n=20)
        print(
            f"times as fast as {name}: least {min(values):.4f}, 5 % {parts[0]:.4f}, median {median(values):.4f}, "
            f"95 % {parts[-1]:.3f}, most {max(values):.3f}"
        )
    print(f"certified gap: median {median(gaps):.2%}, most {max(gaps):.2%}", flush=True)


BENCHES = {
    "list": lambda options: compare_all(FIXED),
    "families": lambda options: compare_all(OF_FAMILIES),
    "random": lambda options: compare_all(list(random_cases(options.seed, options.count))),
    "limits": bench_limits,
    "rivals": bench_rivals,
    "planning": lambda options: bench_gpt2(),
}


def main() -> None:
    """Run the benchmarks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the first random case")
    parser.add_argument("--count", type=int, default=100, help="of random cases")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHES):
        parser.error(f"unknown benchmark: got {', '.join(sorted(unknown))}, expected {', '.join(BENCHES)}")
    import torch

    command = f"{Path(__file__).name} {' '.join(sys.argv[1:])}"
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, {os.cpu_count()} CPU cores, {command}")
    for name in options.names or BENCHES:
        started = time.perf_counter()
        print(f"\n== {name}", flush=True)
        BENCHES[name](options)
        print(f"({time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
