"""Plans for libraries that shard a whole model in one way: one strategy, and all blocks recomputed alike or none.

The nearest such plan takes the strategy that most parameters have, after each operator has taken the nearest that the
library offers, and what most blocks do; it is priced by the cost functions that priced the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from osdp.export.nearest import Replacement, nearest_strategy, refusal, remarks, reopened
from planner.analysis.explain import OpenPlan
from planner.plan import Plan, cluster_ref, read_choices
from planner.strategies.notation import format_choice
from planner.strategies.spec import Strategy
from profiler.model_graph import ModelGraph, Recompute

RECOMPUTED = {
    Recompute.NOTHING: "no recomputation",
    Recompute.SELECTIVE: "selective recomputation",
    Recompute.EVERYTHING: "recomputation",
}


@dataclass(frozen=True)
class Library:
    """What a library can do."""

    name: str
    strategies: frozenset[str]
    """Names of strategies that it can give a whole model; `shard` is among them, and it can offload that."""
    recomputes: frozenset[Recompute] = frozenset({Recompute.NOTHING, Recompute.EVERYTHING})


@dataclass(frozen=True)
class Uniform:
    """A plan with one strategy for the whole model."""

    view: OpenPlan
    strategy: Strategy
    recompute: Recompute
    """Of every block."""
    remarks: tuple[str, ...]
    """Lines for the user."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.view.load.cluster.world_size

    @property
    def block_classes(self) -> list[str]:
        """Names of the classes of blocks, in execution order."""
        return list(dict.fromkeys(block.kind for block in self.view.space.graph.blocks))


def uniform(view: OpenPlan, library: Library, *, nearest: bool) -> Uniform:
    """Return a plan as a library can run it; raises OsdpError, naming what it cannot do, unless `nearest`."""
    plan, graph, cluster = view.plan, view.space.graph, replace(view.load.cluster, ring=())
    slices = read_choices(plan, graph, view.load.cluster)
    numel: Counter[Strategy] = Counter()
    for operator, taken in zip(graph.operators, slices, strict=True):
        numel[_offered(nearest_strategy(taken, cluster), library, cluster.world_size)] += operator.numel
    strategy = numel.most_common(1)[0][0]
    recompute = _recompute(plan, graph, library)
    replaced = [] if not view.load.cluster.ring else [Replacement("OSDP's ring reduce-scatter", "the backend's", ())]
    planned: dict[str, list[str]] = {}
    for operator, taken in zip(graph.operators, slices, strict=True):
        planned.setdefault(format_choice(taken), []).append(operator.name)
    replaced += [Replacement(was, str(strategy), tuple(n)) for was, n in planned.items() if was != str(strategy)]
    blocks: dict[Recompute, list[str]] = {}
    for block in graph.blocks:
        blocks.setdefault(plan.recomputations.get(block.name, Recompute.NOTHING), []).append(block.name)
    replaced += [
        Replacement(RECOMPUTED[was], RECOMPUTED[recompute], tuple(names))
        for was, names in blocks.items()
        if was != recompute
    ]
    if replaced and not nearest:
        raise refusal(library.name, replaced)
    names = [block.name for block in graph.blocks]
    changed = replace(
        plan,
        cluster=cluster_ref(cluster) if view.load.cluster.ring else plan.cluster,
        choices=dict.fromkeys(plan.choices, str(strategy)),
        recomputed_blocks=names if recompute is Recompute.EVERYTHING else [],
        selectively_recomputed_blocks=names if recompute is Recompute.SELECTIVE else [],
    )
    near = reopened(changed, graph, cluster) if replaced else view
    return Uniform(near, strategy, recompute, tuple(remarks(library.name, near, view, replaced)))


def _offered(strategy: Strategy, library: Library, ranks: int) -> Strategy:
    """Return the nearest strategy that a library offers; a copy on every rank is never offloaded."""
    is_offered = strategy.name in library.strategies and not (strategy.offload and strategy.name == "replicate")
    return strategy if is_offered else Strategy("shard", ranks, strategy.offload)


def _recompute(plan: Plan, graph: ModelGraph, library: Library) -> Recompute:
    """Return what most blocks do; of two that as many do, what needs less memory."""
    blocks = Counter(plan.recomputations.get(block.name, Recompute.NOTHING) for block in graph.blocks)
    most = max(blocks, key=lambda one: (blocks[one], one), default=Recompute.NOTHING)
    return most if most in library.recomputes else Recompute.EVERYTHING
