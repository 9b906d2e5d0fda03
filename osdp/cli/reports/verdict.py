"""What a person would say of a plan, in one sentence."""

from collections import Counter
from collections.abc import Collection, Iterator

from osdp.cli.reports.figures import format_count
from osdp.planning.request import Planned
from planner.plan import Plan
from planner.strategies.notation import parse_choice
from profiler.byte_sizes import GIB
from profiler.cluster.cluster import Cluster
from profiler.model_graph import ModelGraph


def verdict(planned: Planned) -> str:
    """Return e.g. `FSDP on all 48 blocks, 28 of them recomputed, micro-batch 2: 7.97 of 8 GiB, 7.31 samples/s, ...`."""
    return f"{summary(planned.plan, planned.graph, planned.cluster)}, {_gain(planned)}"


def summary(plan: Plan, graph: ModelGraph, cluster: Cluster) -> str:
    """Return the same without the comparison: what a plan says by itself."""
    inside: dict[int, set[str]] = {index: set() for index in range(len(graph.blocks))}
    outside: Counter[str] = Counter()
    for operator in graph.operators:
        choice = plan.choices[operator.name]
        if operator.block is None:
            outside[choice] += operator.numel
        else:
            inside[operator.block].add(choice)
    parts = []
    if inside:
        common, count = Counter(frozenset(choices) for choices in inside.values()).most_common(1)[0]
        several = "" if count == len(inside) else "several strategies, "
        which = f"all {len(inside)}" if count == len(inside) else f"{count} of {len(inside)}"
        parts.append(f"{several}{_names(common, cluster)} on {which} blocks")
        parts += _recomputation(plan, len(inside))
        if outside and (main := outside.most_common(1)[0][0]) not in common:
            parts.append(f"{_names({main}, cluster)} outside")
    else:
        parts.append(_names({outside.most_common(1)[0][0]}, cluster))
    parts.append(f"micro-batch {plan.micro_batch}")
    predicted = plan.predicted
    limit, speed = f"{plan.limit_bytes / GIB:.4g} GiB", f"{format_count(predicted.samples_per_s)} samples/s"
    return f"{', '.join(parts)}: {predicted.peak_memory_bytes / GIB:.2f} of {limit}, {speed}"


def _recomputation(plan: Plan, blocks: int) -> Iterator[str]:
    """Yield e.g. `20 of the 48 recomputed and 28 selectively`."""
    offloaded, selective = len(plan.offloaded_blocks), len(plan.selectively_recomputed_blocks)
    whole = len(plan.recomputed_blocks) + offloaded
    if whole and selective:
        yield f"{whole} of the {blocks} recomputed and {selective} selectively"
    elif whole or selective:
        how = " selectively" if selective else ""
        yield f"{'all' if blocks in (whole, selective) else whole or selective} of the {blocks} recomputed{how}"
    if offloaded:
        yield f"the inputs of {'all' if offloaded == blocks else offloaded} in host memory"


def _names(choices: Collection[str], cluster: Cluster) -> str:
    """Return the field's name of each choice that has one, else ours."""
    known = []
    for choice in sorted(choices):
        first, *others = parse_choice(choice, cluster)
        name = "" if others or first.offload else first.spec.baseline
        size = f" in groups of {first.group}" if ":" in choice else ""
        known.append(f"{name}{size}" if name else choice)
    return " and ".join(known)


def _gain(planned: Planned) -> str:
    best = planned.best_baseline
    if best is None:
        return "where no uniform plan fits"
    gain = planned.plan.predicted.samples_per_s / best.samples_per_s - 1.0
    return f"{gain:.1%} above the best uniform plan" if gain >= 0.0005 else "the best uniform plan"
