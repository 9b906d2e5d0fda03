"""Random plans: any strategy for any operator, splits where they can be, blocks recomputed at random."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st
from parity import Case, blocks_of, cluster_of, graph_of, offloadable_of

from planner.strategies.notation import format_choice
from planner.strategies.registry import known_strategies
from profiler.model_graph import Recompute


@st.composite
def mixtures(draw: st.DrawFn, family: str, precision: str = "fp32") -> Case:
    """Draw a plan for 2 x 2 ranks."""
    graph = graph_of(family, precision)
    one = st.sampled_from(known_strategies(cluster_of(2, 2)))
    choices = {}
    for operator in graph.operators:
        can_split = operator.kind == "Linear" and len(operator.modules) == 1
        slices = draw(st.lists(one, min_size=1, max_size=4 if can_split else 1))
        choices[operator.name] = format_choice(slices)
    assume(len(set(choices.values())) > 1)  # else it is no mixture, and drawn first
    again = {block: draw(st.sampled_from(Recompute)) for block in blocks_of(family)}
    for operator in graph.operators:
        if operator.block is not None and choices[operator.name].startswith("split"):
            again[graph.blocks[operator.block].name] = draw(st.sampled_from([Recompute.NOTHING, Recompute.EVERYTHING]))
    for block in again.keys() - offloadable_of(family):
        again[block] = min(again[block], Recompute.EVERYTHING)
    recomputed, selective, offloaded = (
        tuple(block for block, how in again.items() if how is wanted)
        for wanted in (Recompute.EVERYTHING, Recompute.SELECTIVE, Recompute.OFFLOADED)
    )
    accumulation = draw(st.integers(1, 3))
    return Case(family, choices, "shard", recomputed, precision, accumulation, selective=selective, offloaded=offloaded)
