"""Plans for libraries that shard a whole model in one way: one strategy, and all blocks recomputed alike or none.

The nearest such plan takes the strategy that most parameters have, after each operator has taken the nearest that the
library offers, and what most blocks do.  If that does not fit the plan's limit, all blocks are recomputed, then all is
sharded, then both.  Each is priced by the cost functions that priced the plan.
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
    Recompute.OFFLOADED: "recomputation of offloaded input",
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
    plan, graph, cluster = view.plan, view.space.graph, view.load.cluster
    numel: Counter[Strategy] = Counter()
    for operator, taken in zip(graph.operators, read_choices(plan, graph, cluster), strict=True):
        numel[_offered(nearest_strategy(taken, cluster), library, cluster.world_size)] += operator.numel
    most, recompute = numel.most_common(1)[0][0], _recompute(plan, graph, library)
    replaced = _replaced(view, most, recompute)
    if not replaced:
        return Uniform(view, most, recompute, tuple(remarks(library.name, view, view, ())))
    if not nearest:
        raise refusal(library.name, replaced)
    sharded = Strategy("shard", cluster.world_size, most.offload)
    pairs = [(one, again) for one in (most, sharded) for again in (recompute, Recompute.EVERYTHING)]
    found = [(_priced(view, *pair), *pair) for pair in dict.fromkeys(pairs)]
    fits = [one for one in found if one[0].prediction.peak_memory_bytes <= plan.usable_bytes]
    near, strategy, again = (fits or [min(found, key=lambda one: one[0].prediction.peak_memory_bytes)])[0]
    lines = remarks(library.name, near, view, _replaced(view, strategy, again))
    return Uniform(near, strategy, again, tuple(lines))


def _replaced(view: OpenPlan, strategy: Strategy, recompute: Recompute) -> list[Replacement]:
    """Return what of a plan is otherwise than one strategy and one recomputation."""
    plan, graph, cluster = view.plan, view.space.graph, view.load.cluster
    found = [Replacement("OSDP's ring reduce-scatter", "the backend's", ())] if cluster.ring else []
    planned: dict[str, list[str]] = {}
    for operator, taken in zip(graph.operators, read_choices(plan, graph, cluster), strict=True):
        planned.setdefault(format_choice(taken), []).append(operator.name)
    found += [Replacement(was, str(strategy), tuple(n)) for was, n in planned.items() if was != str(strategy)]
    blocks: dict[Recompute, list[str]] = {}
    for block in graph.blocks:
        blocks.setdefault(plan.recomputations.get(block.name, Recompute.NOTHING), []).append(block.name)
    return found + [
        Replacement(RECOMPUTED[was], RECOMPUTED[recompute], tuple(names))
        for was, names in blocks.items()
        if was != recompute
    ]


def _priced(view: OpenPlan, strategy: Strategy, recompute: Recompute) -> OpenPlan:
    """Return the plan with one strategy and one recomputation, priced."""
    plan, graph, cluster = view.plan, view.space.graph, replace(view.load.cluster, ring=())
    names = [block.name for block in graph.blocks]
    changed = replace(
        plan,
        cluster=cluster_ref(cluster) if view.load.cluster.ring else plan.cluster,
        choices=dict.fromkeys(plan.choices, str(strategy)),
        recomputed_blocks=names if recompute is Recompute.EVERYTHING else [],
        selectively_recomputed_blocks=names if recompute is Recompute.SELECTIVE else [],
        offloaded_blocks=[],
    )
    return reopened(changed, graph, cluster)


def _offered(strategy: Strategy, library: Library, ranks: int) -> Strategy:
    """Return the nearest strategy that a library offers; a copy on every rank is never offloaded."""
    is_offered = strategy.name in library.strategies and not (strategy.offload and strategy.name == "replicate")
    return strategy if is_offered else Strategy("shard", ranks, strategy.offload)


def _recompute(plan: Plan, graph: ModelGraph, library: Library) -> Recompute:
    """Return what most blocks do; of two that as many do, what needs less memory."""
    blocks = Counter(plan.recomputations.get(block.name, Recompute.NOTHING) for block in graph.blocks)
    most = max(blocks, key=lambda one: (blocks[one], one), default=Recompute.NOTHING)
    return most if most in library.recomputes else Recompute.EVERYTHING
