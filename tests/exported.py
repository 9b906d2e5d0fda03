"""Random plans that plain FSDP2 can run, and what `osdp export` makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from torch import nn

from osdp.export.formats import exported
from osdp.export.nearest import PLAIN_WRAPPING, expressible
from planner.analysis.explain import open_plan
from planner.plan import Plan
from planner.strategies.registry import known_strategies
from profiler.cluster.cluster import Cluster
from profiler.model_graph import ModelGraph

ACCUMULATION = (1, 2)


def drawn_choices(number: int, graph: ModelGraph, cluster: Cluster) -> Mapping[str, str]:
    """Return strategies of FSDP2 for every operator: in some plans one for all, in others a few of their own."""
    draw = Random(f"export {number}")
    offers = [one for one in known_strategies(cluster) if one.spec.wrapping == PLAIN_WRAPPING]
    names = [str(one) for one in offers if not one.offload or draw.random() < 0.1]
    default, often = draw.choice(names), draw.choice([0.0, 0.1, 0.5])
    return {one.name: draw.choice(names) if draw.random() < often else default for one in graph.operators}


def drawn_recomputation(number: int, graph: ModelGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return blocks that are recomputed, whole and selectively."""
    draw = Random(f"recomputed {number}")
    drawn = {block.name: draw.random() for block in graph.blocks}
    whole = tuple(name for name, share in drawn.items() if share < 0.3)
    return whole, tuple(name for name, share in drawn.items() if 0.3 <= share < 0.6)


def as_expressible(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Plan:
    """Return a drawn plan with blocks of several units recomputed whole, which FSDP2 cannot do selectively."""
    return replace(expressible(open_plan(plan, graph, cluster), nearest=True).view.plan, predicted=plan.predicted)


def source_of(plan: Plan, graph: ModelGraph, cluster: Cluster) -> str:
    """Return the module that a plan is exported to, as it is."""
    return exported(open_plan(plan, graph, cluster), "fsdp2", nearest=False).text


def parallelize_of(source: str) -> Callable[[nn.Module, Any], nn.Module]:
    """Return the function that an exported module defines."""
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(source, "exported.py", "exec"), names)
    return names["parallelize"]
