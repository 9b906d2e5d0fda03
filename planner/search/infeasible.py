"""Why no plan fits: what the smallest plan holds at its peak, and which single changes make a plan fit.

The smallest plan is the one of least peak memory that the integer program and the priced search find.  It is searched
again under each single change (a smaller micro-batch, more ranks, ...), so that the advice contains only changes that
the cost functions confirm.  The phase, the operator and the categories are those of the smallest plan's peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cost.peak_memory import MemoryPeak
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.pins import Pin, on_cluster, resolve
from planner.pricing import PricedPlan
from planner.problem import Task
from planner.search.least_memory import is_ruled_out, smallest_plan
from profiler.byte_sizes import MIB, format_bytes, whole_mib
from profiler.errors import OsdpError
from profiler.path_labels import path_label

MOST_DOUBLINGS = 4
"""How often the number of ranks is doubled to see whether that is enough."""
SMALLEST_OPTIMIZER = "sgd"
"""The optimizer with the least state."""
LARGEST_NODE = 16
"""Most ranks per node that are suggested: a DGX-2 has sixteen."""
SHOWN_CATEGORIES = 4
"""Categories of the peak that the message names."""


@dataclass(frozen=True)
class Remedy:
    """One change with which a plan fits, by the cost functions."""

    change: str
    """E.g. `--nodes 2`."""
    needed_bytes: int
    """Peak of the smallest plan with the change."""


@dataclass(frozen=True)
class Refusal:
    """Why no plan fits, and what would."""

    limit_bytes: int
    """What a plan may use."""
    peak: MemoryPeak
    """Of the smallest plan that was found."""
    load: Workload
    """The smallest plan's."""
    operator: str
    """Operator that it peaks at; empty in the optimizer step."""
    largest: tuple[str, ...]
    """The model's largest operators."""
    remedies: tuple[Remedy, ...]
    headroom_bytes: int = 0
    """Part of the user's limit that is left unused in addition."""
    advised_bytes: int | None = None
    """The smallest limit that works with the headroom; None: without a headroom."""

    @property
    def needed_bytes(self) -> int:
        """The smallest limit that works, in whole MiB, without the headroom."""
        return whole_mib(self.peak.total_bytes)


class NothingFits(OsdpError):  # noqa: N818, it is what happened, as PeerLost is
    """No plan fits the memory limit."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        limit_bytes, needed_bytes = refusal.limit_bytes, refusal.needed_bytes
        free = f", of which {format_bytes(refusal.headroom_bytes)} are headroom" if refusal.headroom_bytes else ""
        where = f"in {refusal.peak.phase} of {refusal.operator}" if refusal.operator else "in the optimizer step"
        parts = sorted(refusal.peak.categories.items(), key=lambda item: -item[1])[:SHOWN_CATEGORIES]
        shares = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts if size)
        super().__init__(
            "no plan fits the memory limit",
            got=f"{format_bytes(limit_bytes + refusal.headroom_bytes)} per device{free}",
            expected=f"at least {needed_bytes // MIB:,} MiB for the smallest plan found (micro-batch "
            f"{refusal.load.micro_batch}), which peaks {where}: {shares}",
            advice="; or ".join(_advice(refusal)) + f"; the largest operators are {' and '.join(refusal.largest)}",
        )

    def __reduce__(self) -> tuple[type[NothingFits], tuple[Refusal]]:
        """Make it picklable, for ranks to exchange: by default pickle passes the message to `__init__`."""
        return NothingFits, (self.refusal,)


def _advice(refusal: Refusal) -> Iterator[str]:
    """Yield the changes that help, each confirmed by the cost functions."""
    device, needed_bytes = refusal.load.cluster.device, refusal.advised_bytes or refusal.needed_bytes
    more = f"a device with more memory than the {format_bytes(device.memory_bytes.value)} of {device.name}"
    yield f"--mem {needed_bytes // MIB}MB" if needed_bytes <= device.memory_bytes.value else more
    yield from (f"{each.change} (then {format_bytes(each.needed_bytes)} is enough)" for each in refusal.remedies)
    if not refusal.remedies:
        yield "a smaller model or shorter sequences (--seq), which were not tried"


def refusal_of(smallest: PricedPlan, space: Space, task: Task, *, remedies: bool = True) -> Refusal:
    """Return why no plan of a task fits, given the plan that needs least memory, and, if asked for, what would."""
    operator = smallest.space.operator_at(smallest.peak)
    largest = sorted(space.graph.operators, key=lambda operator: -operator.numel)[:2]
    changes = _changes(task, smallest.load) if remedies else ()
    attempts = (_first_enough(space, change, task) for change in changes)
    enough = tuple(remedy for remedy in attempts if remedy)
    name = path_label(operator.name) if operator else ""
    names = tuple(path_label(operator.name) for operator in largest)
    return Refusal(task.limit_bytes, smallest.peak, smallest.load, name, names, enough)


def _first_enough(space: Space, attempts: Iterable[tuple[str, Workload]], task: Task) -> Remedy | None:
    """Return the first of several attempts at one change after which a plan fits, if any."""
    for change, load in attempts:
        is_alike = load.cluster == task.cluster or not task.pins.strategies
        there = space if is_alike else Space(task.graph, pins=on_cluster(task.pins, load.cluster))
        if is_ruled_out(there, load, task.limit_bytes):
            continue
        if found := _remedy(change, there, load, task.limit_bytes):
            return found
    return None


def _remedy(change: str, space: Space, load: Workload, limit_bytes: int) -> Remedy | None:
    """Return a change as a remedy if a plan fits in the space that it leads to."""
    needed_bytes = whole_mib(smallest_plan(space, load, limit_bytes).peak.total_bytes)
    return Remedy(change, needed_bytes) if needed_bytes <= limit_bytes else None


def _changes(task: Task, load: Workload) -> Iterator[Iterable[tuple[str, Workload]]]:
    """Yield the single changes that may help, each as attempts from the smallest to the largest."""
    batch = load.micro_batch
    if task.micro_batch is not None:
        smaller = [size for size in range(batch - 1, 0, -1) if batch % size == 0]
        repeats = {size: load.accumulation * (batch // size if task.global_batch else 1) for size in smaller}
        yield [(f"--batch {size}", replace(load, micro_batch=size, accumulation=repeats[size])) for size in smaller]
    if load.accumulation > 1:
        yield [(f"--global-batch {load.cluster.world_size * batch}", replace(load, accumulation=1))]
    yield _with_more_ranks(task, load)
    if load.optimizer_name != SMALLEST_OPTIMIZER:
        yield [(f"--optimizer {SMALLEST_OPTIMIZER}", replace(load, optimizer_name=SMALLEST_OPTIMIZER))]


def _with_more_ranks(task: Task, load: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the workload on doubled numbers of nodes, or of ranks per node if the cluster has no link between nodes."""
    cluster = load.cluster
    for factor in (2**doublings for doublings in range(1, MOST_DOUBLINGS + 1)):
        if load.accumulation % factor and task.global_batch is not None:
            return  # The global batch cannot be split over so many ranks.
        if cluster.inter is not None:
            larger, change = replace(cluster, nodes=cluster.nodes * factor), f"--nodes {cluster.nodes * factor}"
        else:
            ranks = cluster.gpus_per_node * factor
            if ranks > LARGEST_NODE:
                return
            larger, change = replace(cluster, gpus_per_node=ranks), f"--gpus-per-node {ranks}"
        repeats = load.accumulation // factor if task.global_batch is not None else load.accumulation
        try:
            on_cluster(task.pins, larger)
        except OsdpError:
            return  # A pinned strategy does not exist there.
        yield change, replace(load, cluster=larger, accumulation=repeats)


def blame(task: Task, load: Workload, pins: Sequence[Pin]) -> list[Remedy]:
    """Return each pin without which some plan fits; the removal of all of them if no single removal is enough."""

    def without(change: str, rest: Sequence[Pin]) -> Remedy | None:
        free = Space(task.graph, pins=resolve(rest, task.graph, task.cluster))
        return _remedy(change, free, load, task.limit_bytes)

    each = [without(f"without --pin '{pin}'", [*pins[:k], *pins[k + 1 :]]) for k, pin in enumerate(pins)]
    found = each if any(each) or len(pins) < 2 else [without("without any pin", [])]
    return [remedy for remedy in found if remedy]
