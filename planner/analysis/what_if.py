"""The bottlenecks of a plan, and the speed-up of more of each resource: the search repeated on a larger machine.

For each change of limit or cluster the search runs again.  With s the samples per second of the plan, u the bound on
every plan of the unchanged task, and s' the samples per second after a change,

    speed-up        s' / s                                               `Answer.ratio`
    a bottleneck    s' > u and s' > (1 + MATERIAL) s                     `WhatIf.binds`

s' > u proves that no plan is as fast without the change, within this cost model; a smaller gain may come
from the search, which is not exhaustive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.collectives import ranks_per_node
from planner.pins import on_cluster
from planner.problem import Progress, Task
from planner.search.infeasible import NothingFits
from planner.search.search import Found, search
from profiler.byte_sizes import GIB
from profiler.cluster.cluster import Cluster, Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CollectiveTimes
from profiler.errors import OsdpError

NODES = "nodes"
"""The resource that is never called a bottleneck: more ranks always give more samples per second."""
MATERIAL = 0.005
"""Smaller relative gains are not called a bottleneck."""


@dataclass(frozen=True)
class Answer:
    """The effect of one change."""

    resource: str
    """`memory`, `link in a node`, `link between nodes`, `nodes` or `compute`."""
    change: str
    """The change, in words."""
    samples_per_s: float | None
    """Of the plan found after the change; None if there is none."""
    ratio: float | None
    """Speed-up over the unchanged task."""
    gap: float | None
    """Certified gap of the plan found after the change."""
    why_not: str = ""
    """Why there is no plan after the change."""


@dataclass(frozen=True)
class WhatIf:
    """The effect of more of each resource on a plan."""

    samples_per_s: float
    """Of the unchanged task."""
    bound_samples_per_s: float
    """No plan of the unchanged task is faster."""
    answers: tuple[Answer, ...]

    @property
    def binds(self) -> tuple[str, ...]:
        """Resources of which more provably helps, the most helpful first; nodes are left out."""
        floor = max(self.bound_samples_per_s, self.samples_per_s * (1 + MATERIAL))
        found = {answer.resource: answer.samples_per_s or 0.0 for answer in self.answers if answer.resource != NODES}
        return tuple(name for name in sorted(found, key=lambda name: -found[name]) if found[name] > floor)


@dataclass(frozen=True)
class _Change:
    """A change and the task after it, or why there is none."""

    resource: str
    change: str
    task: Task | None
    why_not: str = ""


def what_if(task: Task, found: Found, progress: Progress = lambda what, fraction: None) -> WhatIf:
    """Return the bottlenecks of the plan found for a task, and the effect of more of each resource."""
    changes = list(_changes(task))
    answers = []
    for index, change in enumerate(changes):
        progress(f"with {change.change}", index / len(changes))
        answers.append(_answer(change, task, found))
    return WhatIf(found.samples_per_s, found.bound_samples_per_s, tuple(answers))


def _answer(change: _Change, task: Task, now: Found) -> Answer:
    """Search again after a change."""
    if change.task is None:
        return Answer(change.resource, change.change, None, None, None, change.why_not)
    alike = change.task.cluster.world_size == task.cluster.world_size
    try:
        then = search(change.task)
    except NothingFits:
        return Answer(change.resource, change.change, None, None, None, "no plan fits after this change")
    # More of a resource never makes a plan slower, so neither the best plan.
    speed = max(then.samples_per_s, now.samples_per_s) if alike else then.samples_per_s
    gap = 1.0 - speed / max(then.bound_samples_per_s, speed)
    return Answer(change.resource, change.change, speed, speed / now.samples_per_s, gap)


def _changes(task: Task) -> Iterator[_Change]:
    """Yield the changes to evaluate."""
    cluster, device = task.cluster, task.cluster.device
    more_bytes = task.limit_bytes + GIB
    beyond = " (more than the device has)" if more_bytes > device.memory_bytes.value else ""
    yield _Change("memory", f"one more GiB of memory{beyond}", replace(task, limit_bytes=more_bytes))
    if cluster.gpus_per_node > 1:
        intra = _collectives_faster(replace(cluster, intra=_twice(cluster.intra)), across_nodes=False)
        yield _Change("link in a node", "twice the bandwidth in a node", replace(task, cluster=intra))
    if cluster.inter is not None and cluster.nodes > 1:
        inter = _collectives_faster(replace(cluster, inter=_twice(cluster.inter)), across_nodes=True)
        yield _Change("link between nodes", "twice the bandwidth between nodes", replace(task, cluster=inter))
    yield _one_more_node(task)
    rates = {precision: _doubled(figure) for precision, figure in device.matmul_flops_per_s.items()}
    faster = _calls_faster(replace(cluster, device=replace(device, matmul_flops_per_s=rates)))
    what = "measured operators twice as fast" if faster.measured and faster.measured.calls else ""
    yield _Change("compute", what or "twice the rate of matrix products", replace(task, cluster=faster))


def _collectives_faster(cluster: Cluster, across_nodes: bool) -> Cluster:
    """Return the cluster with measured collectives inside or across nodes at half their time beyond the latency."""
    if cluster.measured is None:
        return cluster

    def faster(one: CollectiveTimes) -> CollectiveTimes:
        if (ranks_per_node(cluster, one.ranks, one.stride) < one.ranks) != across_nodes:
            return one
        first_s = one.pieces[0].latency_s
        lines = (
            replace(fit, latency_s=(fit.latency_s + first_s) / 2, s_per_byte=fit.s_per_byte / 2) for fit in one.pieces
        )
        return replace(one, pieces=tuple(lines))

    collectives = tuple(faster(one) for one in cluster.measured.collectives)
    return replace(cluster, measured=replace(cluster.measured, collectives=collectives))


def _calls_faster(cluster: Cluster) -> Cluster:
    """Return the cluster with measured calls at half their time."""
    if cluster.measured is None:
        return cluster

    calls = tuple(
        replace(one, forward_s=tuple(s / 2 for s in one.forward_s), backward_s=tuple(s / 2 for s in one.backward_s))
        for one in cluster.measured.calls
    )
    return replace(cluster, measured=replace(cluster.measured, calls=calls))


def _one_more_node(task: Task) -> _Change:
    cluster, change = task.cluster, (NODES, "one more node")
    if cluster.inter is None:
        return _Change(*change, None, f"{cluster.name} has no inter-node link")
    larger = cluster.with_ranks(cluster.nodes + 1, cluster.gpus_per_node)
    if task.global_batch is not None and task.global_batch % larger.world_size:
        why_not = f"a global batch of {task.global_batch} cannot be split over {larger.world_size} ranks"
        return _Change(*change, None, why_not)
    try:
        pins = on_cluster(task.pins, larger)
    except OsdpError as error:
        return _Change(*change, None, f"a pinned strategy does not exist there: {error.what}, {error.got}")
    return _Change(*change, replace(task, cluster=larger, pins=pins))


def _twice(link: Link) -> Link:
    return replace(link, bytes_per_s=_doubled(link.bytes_per_s))


def _doubled(figure: Figure) -> Figure:
    return Figure(2 * figure.value, "assumed: twice the present figure, for the what-if analysis")
