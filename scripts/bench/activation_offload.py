"""What offloading inputs of recomputed blocks gains: `python scripts/bench/activation_offload.py [--clusters NAME ...]`

The fastest plan (`--best`) of a model under a limit, without and with blocks whose input is on the host until they run
again; and what could be gained beyond, if the activations of whole blocks went there: as many blocks as a rank's share
of the host's link carries away during a forward, a third of the step, are kept and take no memory, at no cost.  They
are spread evenly over the model.  On clusters whose gathers take the host's link none is offered.  All figures are
predicted, a table in Markdown.
"""

import argparse
from dataclasses import replace
from typing import Any

from _shared import machine
from allocator import Case
from selective import CASES, plan, without_offload

from osdp.planning.request import Planned
from osdp.zoo import load_cluster, load_model
from planner.plan import Plan
from profiler.affine import Affine
from profiler.cluster.cluster import Cluster, Host
from profiler.model_graph import CallMemories, ModelGraph
from profiler.trace.trace import trace_model

MORE = (
    *(Case("llama-7b", "bf16", "a100-80g-8", limit) for limit in (16, 20, 24, 32)),
    *(Case("gpt2-1.5b", "bf16", "h100-8", limit) for limit in (6, 8, 12)),
    *(Case("gpt2-1.5b", "bf16", "a100-80g-8", limit) for limit in (6, 8, 12)),
    *(Case("gpt2-1.5b", "bf16", "h200-1", limit) for limit in (32, 48, 64)),
    *(Case("gpt2-medium", "bf16", "a100-80g-8", limit) for limit in (4, 8)),
)
ROUNDS = 3
"""A faster plan has a shorter forward, which hides less: if they go on to alternate, an odd number ends with more."""


def with_free_blocks(graph: ModelGraph, count: int) -> ModelGraph:
    """Return a graph of which so many blocks are kept and save nothing from forward to backward."""
    calls, blocks = list(graph.calls), list(graph.blocks)

    def emptied(memory: Any) -> Any:
        assert isinstance(memory, CallMemories)
        return replace(memory, saved_bytes=Affine(), held_bytes=Affine(), recomputed=None, selective=None)

    for turn in range(count):
        index = turn * len(blocks) // count
        block = blocks[index]
        for number in range(block.first_call, block.last_call):
            call = emptied(calls[number])
            apart = call.apart and emptied(call.apart)
            calls[number] = replace(call, retaken_bytes=Affine(), shared_bytes=Affine(), apart=apart)
        others = 1 + max(one.block_class for one in graph.blocks)  # equal numbers are for equal blocks
        nothing: dict[str, Any] = {"rerun": None, "selective_rerun": None, "offloadable_bytes": Affine()}
        blocks[index] = replace(block, block_class=others + block.block_class, **nothing)
    return replace(graph, calls=tuple(calls), blocks=tuple(blocks))


def hidden_blocks(graph: ModelGraph, made: Plan, host: Host) -> int:
    """Return how many blocks' activations the link carries away during a plan's forward, beside what it carries."""
    forward_s = made.predicted.step_time_s / made.accumulation / 3
    block = graph.blocks[len(graph.blocks) // 2]
    calls = graph.calls[block.first_call : block.last_call]
    saved_bytes = sum(call.saved_bytes(made.micro_batch) for call in calls)
    return min(len(graph.blocks), int(forward_s * host.link_bytes_per_s.value / saved_bytes))


def at_most(graph: ModelGraph, cluster: Cluster, case: Case, found: Planned) -> Planned | None:
    """Return the fastest plan if blocks that the link can carry away take no memory."""
    assert cluster.host is not None
    best: Planned | None = found
    count = -1
    for _ in range(ROUNDS):
        if best is None or count == (count := hidden_blocks(graph, best.plan, cluster.host)):
            break
        best = plan(with_free_blocks(graph, count), cluster, case)
    return best


def speed(planned: Planned) -> float:
    """Return samples per second."""
    return planned.plan.predicted.samples_per_s


def told(planned: Planned) -> str:
    """Return a plan's samples per second, and the share of its step that runs forwards again."""
    predicted = planned.plan.predicted
    return f"{speed(planned):.4g} ({predicted.time_by_term['recompute_s'] / predicted.step_time_s:.1%})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clusters", nargs="*", help="default: all")
    options = parser.parse_args()
    print(machine())
    print("| model | cluster | limit | without | with | gain | inputs offloaded | certified gap | beyond, at most |")
    print("|---|---|---|---|---|---|---|---|---|")
    graphs = dict[tuple[str, str], ModelGraph]()
    for case in (*CASES, *MORE):
        cluster, key = load_cluster(case.cluster), (case.model, case.precision)
        is_offered = cluster.host is not None and cluster.leaves_host_link
        if not is_offered or (options.clusters and case.cluster not in options.clusters):
            continue
        if key not in graphs:
            graphs[key] = trace_model(load_model(case.model), case.precision, cluster.device.kind)
        graph, name = graphs[key], f"{case.model}, {case.precision} | {case.cluster} | {case.limit_gib:g} GiB"
        without, found = plan(without_offload(graph), cluster, case), plan(graph, cluster, case)
        if found is None:
            print(f"| {name} | none fits | | | | | |", flush=True)
            continue
        gain = f"{max(0.0, speed(found) / speed(without) - 1):+.1%}" if without else ""  # both are within their gaps
        offloaded = f"{len(found.plan.offloaded_blocks)} of {len(graph.blocks)}"
        best = at_most(graph, cluster, case, found)  # with blocks that must be kept, less may fit
        beyond = f"{max(0.0, speed(best) / speed(found) - 1):+.1%}" if best else "none"
        before = told(without) if without else "none fits"
        row = name, before, told(found), gain, offloaded, f"{found.plan.gap:.2%}", beyond
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
