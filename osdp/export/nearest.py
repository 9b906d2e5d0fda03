"""What PyTorch's own FSDP2 cannot do of a plan, and the nearest plan that it can run.

    planned                                   nearest
    odc, owner, hierarchical, any other       group_shard over the same group, or shard if the group is all ranks
    split(...)                                what most of the slices take
    selective recomputation of a block        recomputation of the whole block: operations of FSDP2's hooks inside a
    that is several units                     block would be counted among its own
    recomputation of a block whose input is   recomputation
    offloaded
    OSDP's ring reduce-scatter                the backend's

The nearest plan is priced by the cost functions that priced the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from osdp.plain_text import plain
from planner.analysis.explain import OpenPlan, open_plan
from planner.plan import Plan, Prediction, cluster_ref, read_choices
from planner.strategies.notation import format_choice
from planner.strategies.spec import Strategy
from profiler.byte_sizes import format_bytes
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from runtime.compile_plan import compile_plan
from runtime.schedule import Schedule

PLAIN_WRAPPING = "fully_sharded"
"""The wrapping (`StrategySpec.wrapping`) of strategies that are calls of `fully_shard`."""
SHOWN = 3
"""Places that a message names for each replacement."""

RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell")
"""Layers of `torch.nn` whose kernels are several operations."""


@dataclass(frozen=True)
class Replacement:
    """One thing that FSDP2 cannot do."""

    planned: str
    nearest: str
    places: tuple[str, ...]
    """Names of operators or blocks; empty for the whole plan."""

    def __str__(self) -> str:
        more = f" and {len(self.places) - SHOWN} more" if len(self.places) > SHOWN else ""
        where = f" ({', '.join(self.places[:SHOWN])}{more})" if self.places else ""
        return f"{self.planned} -> {self.nearest}{where}"


@dataclass(frozen=True)
class Expressible:
    """A plan that FSDP2 can run."""

    view: OpenPlan
    schedule: Schedule
    replaced: tuple[Replacement, ...]
    """What the plan was changed in; empty if FSDP2 runs it as it is."""
    planned: OpenPlan
    """The plan before it was changed."""


def expressible(view: OpenPlan, *, nearest: bool) -> Expressible:
    """Return a plan as FSDP2 can run it; raises OsdpError, naming what it cannot do, unless `nearest`."""
    plan, graph, cluster = view.plan, view.space.graph, view.load.cluster
    replaced: dict[tuple[str, str], list[str]] = {}
    choices = {}
    for operator, slices in zip(graph.operators, read_choices(plan, graph, cluster), strict=True):
        planned, taken = format_choice(slices), str(nearest_strategy(slices, cluster))
        choices[operator.name] = taken
        if planned != taken:
            replaced.setdefault((planned, taken), []).append(operator.name)
    found = [Replacement(*pair, tuple(places)) for pair, places in replaced.items()]
    changed = replace(plan, choices=choices)
    if cluster.ring:
        found.append(Replacement("OSDP's ring reduce-scatter", "the backend's", ()))
        cluster = replace(cluster, ring=())
        changed = replace(changed, cluster=cluster_ref(cluster))
    if offloaded := tuple(plan.offloaded_blocks):
        found.append(Replacement("recomputation of offloaded input", "recomputation", offloaded))
        again = {*plan.recomputed_blocks, *offloaded}
        whole = [block.name for block in graph.blocks if block.name in again]
        changed = replace(changed, recomputed_blocks=whole, offloaded_blocks=[])
    several = _selective_of_several_units(changed, graph, cluster)
    recurrent = tuple(name for name in _selective_of_recurrent_layers(changed, graph) if name not in several)
    for what, blocks in (("several units", several), ("recurrent layers", recurrent)):
        if not blocks:
            continue
        found.append(Replacement(f"selective recomputation of {what}", "recomputation of the block", blocks))
        selective = [name for name in changed.selectively_recomputed_blocks if name not in blocks]
        again = {*changed.recomputed_blocks, *blocks}
        whole = [block.name for block in graph.blocks if block.name in again]
        changed = replace(changed, recomputed_blocks=whole, selectively_recomputed_blocks=selective)
    if not found:
        return Expressible(view, compile_plan(plan, graph, cluster), (), view)
    if not nearest:
        raise refusal("plain FSDP2", found)
    near = reopened(changed, graph, cluster)
    return Expressible(near, compile_plan(changed, graph, cluster), tuple(found), view)


def refusal(who: str, found: Sequence[Replacement]) -> OsdpError:
    """Return the error that names what a library cannot do."""
    advice = "add --nearest to export the nearest plan, with its predicted cost"
    return OsdpError(f"{who} cannot do all that the plan says", got="; ".join(map(str, found)), advice=advice)


def reopened(changed: Plan, graph: ModelGraph, cluster: Cluster) -> OpenPlan:
    """Return a changed plan, priced."""
    near = open_plan(changed, graph, cluster)
    return replace(near, plan=replace(changed, predicted=near.prediction))


def remarks(who: str, view: OpenPlan, planned: OpenPlan, replaced: Sequence[Replacement]) -> list[str]:
    """Return lines for the user: what is predicted, and what was replaced at which cost."""
    predicted, before, usable_bytes = view.prediction, planned.prediction, planned.plan.usable_bytes
    lines = [f"Predicted, not measured: {_figures(predicted)}, {predicted.samples_per_s:.4g} samples/s."]
    if replaced:
        lines += ["", f"{who} cannot do all that the plan says, so this is the nearest to it:"]
        lines += [f"    {plain(str(one))}" for one in replaced]
        lines.append(f"The plan itself was predicted to take {_figures(before)}.")
        if predicted.peak_memory_bytes > usable_bytes:
            lines.append(f"The nearest does NOT fit the plan's limit of {format_bytes(usable_bytes)}.")
    return lines


def _figures(prediction: Prediction) -> str:
    peak = format_bytes(prediction.peak_memory_bytes)
    return f"{peak} at the peak of a device, {prediction.step_time_s:.4g} s a step"


def nearest_strategy(slices: Sequence[Strategy], cluster: Cluster) -> Strategy:
    """Return the strategy of FSDP2 that is nearest to those of an operator's slices."""
    ((most, _),) = Counter(slices).most_common(1)
    if most.spec.wrapping == PLAIN_WRAPPING:
        return most
    world = cluster.world_size
    is_grouped = most.spec.stride == 1 and not most.spec.has_owner and 1 < most.group < world
    return Strategy("group_shard" if is_grouped else "shard", most.group if is_grouped else world, most.offload)


def _selective_of_several_units(plan: Plan, graph: ModelGraph, cluster: Cluster) -> tuple[str, ...]:
    """Return the selectively recomputed blocks whose operators are gathered by hooks inside the block."""
    schedule = compile_plan(plan, graph, cluster)
    whole = {unit.modules[0] for unit in schedule.units if len(unit.modules) == 1}
    return () if schedule.by_ddp else tuple(name for name in schedule.recomputed if name in schedule.selective - whole)


def _selective_of_recurrent_layers(plan: Plan, graph: ModelGraph) -> tuple[str, ...]:
    """Return the selectively recomputed blocks with recurrent layers.

    Their kernels on CPUs change in place what products return, which PyTorch's selective checkpoints keep changed, and
    do not notice (seen on 2.13).
    """
    recurrent = {one.block for one in graph.operators if one.kind in RECURRENT}
    names = {block.name for index, block in enumerate(graph.blocks) if index in recurrent}
    return tuple(name for name in plan.selectively_recomputed_blocks if name in names)
