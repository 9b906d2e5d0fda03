"""Memory that CUDA's caching allocator needs beyond tensors: `python scripts/bench/allocator.py`, a table in Markdown.

Plans are searched for a limit, which they fill; a dry run says what the fullest rank allocates and frees, and a model
of the allocator (`runtime.observe.caching_allocator`) replays it, with its default settings and with
`expandable_segments:True`.  Nothing is run on a GPU.  Beyond what is allocated at the peak, in MiB:

    cached   what the allocator has reserved at most where nothing limits it
    least    the smallest limit above which the steps run, cached memory being given back
    retries  times in a step that this happens at that limit

`with the headroom`: the same, planned with the default headroom: retries in a step within the limit, or `no` if the
steps do not run; and samples per second against the plan without headroom, as predicted.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from _shared import GIB, MIB

from osdp.planning.allocator_headroom import default_headroom
from osdp.planning.clusters import allocatable_bytes, workspaces_bytes
from osdp.planning.memory_options import NO_HEADROOM, Headroom
from osdp.planning.request import BEST, Request, plan_graph
from osdp.planning.verify import rehearse
from osdp.zoo import load_cluster, load_model
from planner.analysis.explain import open_plan
from planner.pins import parse_pin
from planner.plan import Plan
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model
from runtime.observe.allocation_trace import AllocationTrace
from runtime.observe.allocator_replay import UNLIMITED_BYTES, least_limit_bytes, replay
from runtime.observe.dry_run import DryRun


@dataclass(frozen=True)
class Case:
    """A plan to be searched."""

    model: str
    precision: str
    cluster: str
    limit_gib: float
    pins: tuple[str, ...] = ()


CASES = (
    Case("gpt2-mini", "fp32", "titan-rtx-8", 1),
    Case("gpt2-mini", "bf16", "a100-2x8", 2.5, ("*=shard",)),
    Case("gpt2", "fp32", "titan-rtx-8", 2),
    *(Case(name, "fp32", "titan-rtx-8", 8) for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-1.5b")),
    *(Case(name, "fp32", "titan-rtx-8", 8) for name in ("bert-large", "llama-1b", "uneven")),
    *(Case("gpt2", "fp32", "titan-rtx-8", 8, (f"*={how}",)) for how in ("shard", "shard_grad", "group_shard:4")),
    *(Case("gpt2", "fp32", "titan-rtx-8", 8, (f"*={how}",)) for how in ("replicate", "owner")),
    *(Case("gpt2-medium", "bf16", "a100-2x8", 4, (f"*={how}",)) for how in ("shard", "secondary_shard:8", "owner")),
    *(
        Case("gpt2-medium", "bf16", "a100-2x8", 12, (f"*={how}", "blocks.*=recompute"))
        for how in ("shard", "shard_grad", "group_shard:8", "replicate", "hierarchical")
    ),
    Case("gpt2-medium", "bf16", "rtx4090-2", 24),
    Case("llama-1b", "bf16", "rtx4090-2", 24),
    *(Case(name, "bf16", "a100-2x8", 40) for name in ("gpt2-1.5b", "bert-large", "llama-1b", "llama-7b")),
    Case("llama-1b", "bf16", "a100-2x8", 40, ("*=shard", "blocks.*=recompute")),
    Case("llama-7b", "bf16", "a100-2x8", 40, ("*=shard", "blocks.*=recompute")),
    *(Case(name, "bf16", "h100-8", 79) for name in ("gpt2-1.5b", "llama-1b", "llama-7b", "uneven")),
    Case("llama-7b", "bf16", "h100-8", 79, ("blocks.*=recompute",)),
    Case("llama-7b", "bf16", "h100-4x8", 79, ("*=group_shard:8",)),
)

HELD_OUT = (
    Case("gpt2-large", "bf16", "a100-80g-8", 5.3),
    Case("bert-large", "fp32", "rtx4090-2", 11),
    Case("llama-1b", "fp32", "titan-rtx-8", 16),
    Case("gpt2-medium", "fp32", "h100-8", 6.1, ("*=shard_grad", "blocks.*=recompute")),
    Case("llama-1b", "bf16", "h100-4x8", 13, ("*=hierarchical",)),
    Case("gpt2-1.5b", "fp32", "titan-rtx-8", 23),
)
"""Plans that the default headroom was not derived from."""

OFFLOADED = (
    Case("gpt2-medium", "bf16", "h100-8", 3.2, ("*=shard+offload", "blocks.*=recompute")),
    Case("gpt2-medium", "bf16", "a100-2x8", 2.5, ("*=secondary_shard:8+offload", "blocks.*=recompute")),
    Case("gpt2-medium", "fp32", "titan-rtx-8", 2, ("*=group_shard:4+offload", "blocks.*=recompute")),
    Case("gpt2", "fp32", "titan-rtx-8", 4, ("*=replicate+offload",)),
)
"""Plans in small limits, which their parameters do not rest in."""


@cache
def traced(model: str, precision: str) -> ModelGraph:
    """Return the graph of a model of the zoo."""
    return trace_model(load_model(model), precision, "cuda")


@dataclass(frozen=True)
class Needs:
    """What the allocator needs beyond what is allocated."""

    cached_bytes: int
    least_bytes: int
    retries: int


def needs(trace: AllocationTrace, workspaces: Sequence[int], *, expandable: bool) -> Needs:
    """Return what the allocator needs."""
    how: Any = {"expandable": expandable, "workspaces_bytes": workspaces}
    tensors = replay(trace, UNLIMITED_BYTES, expandable=True, workspaces_bytes=workspaces).allocated_bytes
    free, least_bytes = replay(trace, UNLIMITED_BYTES, **how), least_limit_bytes(trace, **how)
    return Needs(free.reserved_bytes - tensors, least_bytes - tensors, replay(trace, least_bytes, **how).retries)


def rehearsed(case: Case, headroom: Headroom) -> tuple[Plan, DryRun]:
    """Return the plan of a case, and what a rank does in its steps."""
    cluster, graph = load_cluster(case.cluster), traced(case.model, case.precision)
    pins = tuple(map(parse_pin, case.pins))
    request = Request(round(case.limit_gib * GIB), case.precision, headroom=headroom, pins=pins, style=BEST)
    plan = plan_graph(graph, cluster, request).plan
    return plan, rehearse(open_plan(plan, graph, cluster), load_model(case.model), 1.0)[1]


def measure(case: Case) -> tuple[float, list[Needs], list[bool]]:
    """Print a row; return the limit, what the allocator needs by default and expandable, and whether it then has it."""
    cluster = load_cluster(case.cluster)
    full, dry = rehearsed(case, NO_HEADROOM)
    workspaces, tensors = workspaces_bytes(cluster), dry.peak.total_bytes
    both = [needs(dry.trace, workspaces, expandable=expandable) for expandable in (False, True)]
    plan, roomy = rehearsed(case, default_headroom(cluster))
    room = allocatable_bytes(cluster, plan.limit_bytes)
    runs = [
        replay(roomy.trace, room, expandable=expandable, workspaces_bytes=workspaces) for expandable in (False, True)
    ]
    cells = [case.model, case.precision, case.cluster, f"{case.limit_gib:g}", ", ".join(case.pins)]
    cells += [f"{full.predicted.peak_memory_bytes / full.limit_bytes:.2%}", f"{tensors / MIB:,.0f}"]
    for found in both:
        cells += [f"{size / MIB:,.0f} ({size / tensors:.1%})" for size in (found.cached_bytes, found.least_bytes)]
        cells.append(str(found.retries))
    cells += [f"{run.retries} x" if run.runs else "no" for run in runs]
    cells.append(f"{plan.predicted.samples_per_s / full.predicted.samples_per_s - 1:+.2%}")
    print(f"| {' | '.join(cells)} |", flush=True)
    return plan.limit_bytes, both, [run.runs for run in runs]


HEAD = (
    *("model", "", "cluster", "limit, GiB", "pins", "filled", "tensors, MiB"),
    *("default: cached", "least", "retries", "expandable: cached", "least", "retries"),
    *("with the headroom: default", "expandable", "samples/s"),
)


def main() -> None:
    """Replay the plans that the options name, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only plans of this model")
    parser.add_argument("--held-out", action="store_true", help="other plans, which check the default headroom")
    parser.add_argument("--offloaded", action="store_true", help="plans in small limits that offload")
    options = parser.parse_args()
    cases = HELD_OUT if options.held_out else OFFLOADED if options.offloaded else CASES
    started = time.perf_counter()
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    rows = [measure(case) for case in cases if options.model in (None, case.model)]
    print()
    for index, name in enumerate(("default", "expandable")):
        least = sorted(both[index].least_bytes / limit for limit, both, _ in rows)
        ran = sum(runs[index] for *_, runs in rows)
        share = f"{least[len(least) // 2]:.1%} of the limit in the median, at most {least[-1]:.1%}"
        print(f"{name}: needs {share}; {ran} of {len(rows)} plans run with the headroom")
    print("\n| share of the limit | and a constant, MiB |\n|---|---|")
    for share in (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015):
        constant = max(both[1].least_bytes - share * limit for limit, both, _ in rows)
        print(f"| {share:.2%} | {constant / MIB:,.0f} |")
    print(f"\n{len(rows)} plans, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
