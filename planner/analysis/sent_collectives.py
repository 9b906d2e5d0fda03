"""What a plan sends, and what each collective is priced as."""

from collections import Counter
from dataclasses import dataclass

from planner.analysis.explain import OpenPlan
from planner.collectives import Operation, algorithm_of, collective_s
from planner.cost.ddp import buckets
from planner.model.fsdp_units import join, stage_units, unit_parameters
from planner.pricing import runs_by_ddp
from planner.strategies.unit_collectives import as_reduced, unit_collectives


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind in groups of one size that are priced alike."""

    operation: Operation
    ranks: int
    stride: int
    priced_as: str
    count: int
    """In one step of one micro-batch."""
    largest_bytes: int
    largest_s: float
    """Seconds of the largest."""


def sent_collectives(view: OpenPlan) -> list[Sent]:
    """Return the collectives of a plan, those of the largest tensors first."""
    found: Counter[tuple[Operation, int, int, int]] = Counter()
    shared: dict[tuple[str, Operation, int, int], tuple[int, int]] = {}
    """Bytes of all units of a strategy together, and how often a step sends that."""
    model, graph, cluster = view.space.model, view.space.graph, view.load.cluster
    if runs_by_ddp(view.plan, graph, cluster):
        found.update(("all_reduce", cluster.world_size, 1, bucket.size_bytes) for bucket in buckets(graph))
    else:
        units = [
            unit
            for stage, choice in zip(model.stages, view.decided.choices, strict=True)
            for unit in stage_units(model, stage, ((one,) for one in choice.strategies))
        ]
        for operator, strategy in zip(model.spanning, view.decided.spanning, strict=True):
            units += join(graph, (operator,), ((strategy,),))
        for unit in units:
            parameters = unit_parameters(unit, graph)
            accumulates = view.load.accumulation > 1
            reduced = as_reduced(parameters, unit.strategy, cluster.world_size, accumulates=accumulates)
            sent = unit_collectives(reduced, unit.strategy, view.load.precision, cluster, trains=graph.trains)
            found.update((one.operation, one.ranks, one.stride, one.size_bytes) for one in sent if not one.shared)
            for one, count in Counter(one for one in sent if one.shared).items():
                kind = unit.strategy.name, one.operation, one.ranks, one.stride
                shared[kind] = shared.get(kind, (0, 0))[0] + one.size_bytes, count
    for (_, operation, ranks, stride), (size, count) in shared.items():
        found[operation, ranks, stride, size] += count
    alike: dict[tuple[Operation, int, int, str], list[tuple[int, int]]] = {}
    for (operation, ranks, stride, size), count in found.items():
        name = algorithm_of(operation, size, cluster, ranks, stride)
        alike.setdefault((operation, ranks, stride, name), []).append((size, count))
    kinds = []
    for (operation, ranks, stride, name), sizes in alike.items():
        most = max(size for size, _ in sizes)
        seconds = collective_s(operation, most, cluster, ranks, stride)
        kinds.append(Sent(operation, ranks, stride, name, sum(count for _, count in sizes), most, seconds))
    return sorted(kinds, key=lambda one: (-one.largest_bytes, one.operation, one.ranks, one.priced_as))
