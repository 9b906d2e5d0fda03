"""The bottlenecks of a plan, and the speed-up of more of each resource: the search repeated on a larger machine.

For each change of limit or cluster the search runs again.  With s the samples per second of the plan, u the bound on
every plan of the unchanged task, and s' the samples per second after a change,

    speed-up        s' / s                                               `Answer.ratio`
    a bottleneck    s' > u and s' > (1 + MATERIAL) s                     `WhatIf.binds`

s' > u proves that no plan is as fast without the change, within this cost model; a smaller gain may come
from the search, which is not exhaustive.
"""

from collections.abc import Iterable, Iterator
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


def what_if(task: Task, found: Found, progress: Progress = lambda what, fraction: None) -> WhatIf:
    """Return the bottlenecks of the plan found for a task, and the effect of more of each resource."""
    changes, answers = list(_changes(task)), []
    for index, (resource, change, then) in enumerate(changes):
        progress(f"with {change}", index / len(changes))
        answers.append(Answer(resource, change, *_answer(then, task, found)))
    return WhatIf(found.samples_per_s, found.bound_samples_per_s, tuple(answers))


def _answer(then: Task | str, task: Task, now: Found) -> tuple[float | None, float | None, float | None, str]:
    """Return speed, speed-up and gap after a change, or why there is no plan."""
    if isinstance(then, str):
        return None, None, None, then
    try:
        after = search(then)
    except NothingFits:
        return None, None, None, "no plan fits after this change"
    # More of a resource never makes a plan slower, so neither the best plan.
    alike = then.cluster.world_size == task.cluster.world_size
    speed = max(after.samples_per_s, now.samples_per_s) if alike else after.samples_per_s
    return speed, speed / now.samples_per_s, 1.0 - speed / max(after.bound_samples_per_s, speed), ""


def _changes(task: Task) -> Iterator[tuple[str, str, Task | str]]:
    """Yield the changes to evaluate: the resource, the change in words, and the task after it or why there is none."""
    cluster, device = task.cluster, task.cluster.device
    more_bytes = task.limit_bytes + GIB
    beyond = " (more than the device has)" if more_bytes > device.memory_bytes.value else ""
    yield "memory", f"one more GiB of memory{beyond}", replace(task, limit_bytes=more_bytes)
    if cluster.gpus_per_node > 1:
        intra = _collectives_faster(replace(cluster, intra=_twice(cluster.intra)), across_nodes=False)
        yield "link in a node", "twice the bandwidth in a node", replace(task, cluster=intra)
    if cluster.inter is not None and cluster.nodes > 1:
        inter = _collectives_faster(replace(cluster, inter=_twice(cluster.inter)), across_nodes=True)
        yield "link between nodes", "twice the bandwidth between nodes", replace(task, cluster=inter)
    yield NODES, "one more node", _one_more_node(task)
    rates = {precision: _doubled(figure) for precision, figure in device.matmul_flops_per_s.items()}
    faster = _calls_faster(replace(cluster, device=replace(device, matmul_flops_per_s=rates)))
    what = "measured operators twice as fast" if faster.measured and faster.measured.calls else ""
    yield "compute", what or "twice the rate of matrix products", replace(task, cluster=faster)


def _collectives_faster(cluster: Cluster, across_nodes: bool) -> Cluster:
    """Return the cluster with measured collectives inside or across nodes at half their time beyond the latency."""
    if cluster.measured is None:
        return cluster

    def faster(one: CollectiveTimes) -> CollectiveTimes:
        if (ranks_per_node(cluster, one.ranks, one.stride) < one.ranks) != across_nodes:
            return one
        first_s, halved = one.pieces[0].latency_s, [replace(fit, s_per_byte=fit.s_per_byte / 2) for fit in one.pieces]
        return replace(one, pieces=tuple(replace(fit, latency_s=(fit.latency_s + first_s) / 2) for fit in halved))

    collectives = tuple(faster(one) for one in cluster.measured.collectives)
    return replace(cluster, measured=replace(cluster.measured, collectives=collectives))


def _calls_faster(cluster: Cluster) -> Cluster:
    """Return the cluster with measured calls at half their time."""
    if cluster.measured is None:
        return cluster

    def half(seconds: Iterable[float]) -> tuple[float, ...]:
        return tuple(each / 2 for each in seconds)

    every = cluster.measured.calls
    calls = tuple(replace(one, forward_s=half(one.forward_s), backward_s=half(one.backward_s)) for one in every)
    return replace(cluster, measured=replace(cluster.measured, calls=calls))


def _one_more_node(task: Task) -> Task | str:
    """Return the task on one more node, or why there is none."""
    cluster = task.cluster
    if cluster.inter is None:
        return f"{cluster.name} has no inter-node link"
    larger = cluster.with_ranks(cluster.nodes + 1, cluster.gpus_per_node)
    if task.global_batch is not None and task.global_batch % larger.world_size:
        return f"a global batch of {task.global_batch} cannot be split over {larger.world_size} ranks"
    try:
        return replace(task, cluster=larger, pins=on_cluster(task.pins, larger))
    except OsdpError as error:
        return f"a pinned strategy does not exist there: {error.what}, {error.got}"


def _twice(link: Link) -> Link:
    return replace(link, bytes_per_s=_doubled(link.bytes_per_s))


def _doubled(figure: Figure) -> Figure:
    return Figure(2 * figure.value, "assumed: twice the present figure, for the what-if analysis")
