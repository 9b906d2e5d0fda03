"""What offloading activations to the host could gain at most: `python scripts/bench/activation_offload.py`

The fastest plan (`--best`) of a model under a limit, as it is and with blocks that are kept whole, but whose
activations take no memory: as many as a rank's share of the host's link carries away while a forward runs, a third of
the step.  They are spread evenly over the model.  Nothing that offloading costs is counted: what is on its way in both
directions, the host's memory, gathers that pass through the same link.  All figures are predicted, a table in Markdown.
"""

import argparse
from dataclasses import replace
from typing import Any

from _shared import machine
from allocator import Case
from selective import CASES, plan

from osdp.planning.request import Planned
from osdp.zoo import load_cluster, load_model
from planner.plan import Plan
from profiler.cluster.cluster import Host
from profiler.model_graph import Affine, CallMemories, ModelGraph
from profiler.trace.trace import trace_model

MORE = (
    *(Case("gpt2-1.5b", "bf16", "h100-8", limit) for limit in (6, 8, 12)),
    *(Case("gpt2-1.5b", "bf16", "h200-1", limit) for limit in (32, 48, 64)),
    *(Case("gpt2-1.5b", "bf16", "a100-2x8", limit) for limit in (6, 8, 12)),
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
        nothing: dict[str, Any] = {"rerun": None, "selective_rerun": None}
        blocks[index] = replace(block, block_class=others + block.block_class, **nothing)
    return replace(graph, calls=tuple(calls), blocks=tuple(blocks))


def hidden_blocks(graph: ModelGraph, made: Plan, host: Host) -> int:
    """Return how many blocks' activations the link carries away during a plan's forward."""
    forward_s = made.predicted.step_time_s / made.accumulation / 3
    block = graph.blocks[len(graph.blocks) // 2]
    calls = graph.calls[block.first_call : block.last_call]
    saved_bytes = sum(call.saved_bytes(made.micro_batch) for call in calls)
    return min(len(graph.blocks), int(forward_s * host.link_bytes_per_s.value / saved_bytes))


def told(planned: Planned) -> str:
    """Return a plan's samples per second, and the share of its step that runs forwards again."""
    predicted = planned.plan.predicted
    return f"{predicted.samples_per_s:.4g} ({predicted.time_by_term['recompute_s'] / predicted.step_time_s:.1%})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clusters", nargs="*", help="default: all")
    options = parser.parse_args()
    print(machine())
    print("| model | cluster | limit | samples/s | blocks that cost nothing | samples/s at most | gain at most |")
    print("|---|---|---|---|---|---|---|")
    graphs = dict[tuple[str, str], ModelGraph]()
    for case in (*CASES, *MORE):
        cluster, key = load_cluster(case.cluster), (case.model, case.precision)
        if cluster.host is None or (options.clusters and case.cluster not in options.clusters):
            continue
        if key not in graphs:
            graphs[key] = trace_model(load_model(case.model), case.precision, cluster.device.kind)
        graph = graphs[key]
        found = best = plan(graph, cluster, case)
        count = -1
        for _ in range(ROUNDS):
            if found is None or best is None or count == (count := hidden_blocks(graph, best.plan, cluster.host)):
                break
            best = plan(with_free_blocks(graph, count), cluster, case)
        if found is None or best is None:  # with blocks that must be kept, less may fit
            print(f"| {case.model} | {case.cluster} | {case.limit_gib:g} GiB | {found and told(found)} | | none | |")
            continue
        gain = best.plan.predicted.samples_per_s / found.plan.predicted.samples_per_s - 1
        blocks = f"{count} of {len(graph.blocks)}"
        name = f"{case.model}, {case.precision} | {case.cluster} | {case.limit_gib:g} GiB"
        print(f"| {name} | {told(found)} | {blocks} | {told(best)} | {gain:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
