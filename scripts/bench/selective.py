"""What selective recomputation gains: `python scripts/bench/selective.py [--models ...] [--json FILE]`

The fastest plan (`--best`) of a model under a limit, without and with blocks that are recomputed selectively; none has
its input offloaded.  All figures are predicted, in samples/s; the share of the step that goes to running forwards again
is in brackets.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from _shared import GIB, machine
from allocator import Case

from osdp.planning.request import BEST, Planned, Request, plan_graph
from osdp.zoo import load_cluster, load_model
from profiler.affine import Affine
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model

CASES = (
    *(Case("gpt2-1.5b", "fp32", "titan-rtx-8", limit) for limit in (4, 6, 8, 12, 16)),
    *(Case("llama-7b", "bf16", "a100-2x8", limit) for limit in (16, 20, 24, 32, 40)),
    *(Case("llama-7b", "bf16", "h100-8", limit) for limit in (24, 32, 48, 80)),
    *(Case("llama-1b", "bf16", "h100-8", limit) for limit in (8, 12, 24)),
    *(Case("gpt2-medium", "bf16", "a100-2x8", limit) for limit in (4, 8)),
    *(Case("bert-large", "fp32", "titan-rtx-8", limit) for limit in (4, 8)),
)


def without_selective(graph: ModelGraph) -> ModelGraph:
    """Return a graph as if no block had been seen to run again selectively."""
    calls = tuple(replace(call, selective=None) for call in graph.calls)
    return replace(graph, calls=calls, blocks=tuple(replace(block, selective_rerun=None) for block in graph.blocks))


def without_offload(graph: ModelGraph) -> ModelGraph:
    """Return a graph of which no block has an input that can be offloaded."""
    return replace(graph, blocks=tuple(replace(block, offloadable_bytes=Affine()) for block in graph.blocks))


def plan(graph: ModelGraph, cluster: Cluster, case: Case) -> Planned | None:
    """Return the fastest plan, None if none fits."""
    request = Request(round(case.limit_gib * GIB), case.precision, style=BEST)
    try:
        return plan_graph(graph, cluster, request)
    except OsdpError:
        return None


def row(case: Case, graphs: dict[Any, ModelGraph]) -> dict[str, Any]:
    """Return the figures of one case."""
    cluster, key = load_cluster(case.cluster), (case.model, case.precision)
    if key not in graphs:
        traced = trace_model(load_model(case.model), case.precision, cluster.device.kind)
        graphs[key] = without_offload(traced)
    found = {
        "whole": plan(without_selective(graphs[key]), cluster, case),
        "selective": plan(graphs[key], cluster, case),
    }
    told: dict[str, Any] = {"model": case.model, "cluster": case.cluster, "limit_gib": case.limit_gib}
    for name, planned in found.items():
        if planned is not None:
            made = planned.plan
            told[name] = {
                "samples_per_s": made.predicted.samples_per_s,
                "gap": made.gap,
                "recompute_share": made.predicted.time_by_term["recompute_s"] / made.predicted.step_time_s,
                "recomputed": len(made.recomputed_blocks),
                "selectively": len(made.selectively_recomputed_blocks),
                "blocks": len(planned.graph.blocks),
            }
    return told


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[""], help="beginnings of names; default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(machine())
    print("model        cluster       limit      whole or not    with selective     gain  all / selectively / of  gap")
    rows, graphs = [], dict[Any, ModelGraph]()
    for case in CASES:
        if not case.model.startswith(tuple(options.models)):
            continue
        rows.append(row(case, graphs))
        one, two = rows[-1].get("whole"), rows[-1].get("selective")
        head = f"{case.model:12s} {case.cluster:12s} {case.limit_gib:3g} GiB"
        if not one or not two:
            print(f"{head}  {'does not fit' if not two else 'fits with selective alone'}", flush=True)
            continue
        speeds = (f"{told['samples_per_s']:9.4g} ({told['recompute_share']:5.1%})" for told in (one, two))
        gain = two["samples_per_s"] / one["samples_per_s"] - 1
        counts = f"{two['recomputed']:4d} / {two['selectively']:3d} / {two['blocks']:3d}"
        print(f"{head}  {'  '.join(speeds)}  {gain:+7.2%}  {counts:>22s}  {two['gap']:.2%}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
