"""Frontier and what-if analyses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from osdp.planning.imbalance_option import read_imbalance
from osdp.planning.named_model import NamedModel
from osdp.planning.request import Planned, Request, explain_refusal, find_plan, pins_of, task_of, trace, written
from planner.analysis.dealing import Dealing, compare_dealing
from planner.analysis.explain import OpenPlan
from planner.analysis.frontier import frontier
from planner.analysis.what_if import WhatIf, what_if
from planner.cost.stragglers import BALANCED
from planner.options.search_space import Space
from planner.problem import Progress, Task
from planner.search.infeasible import NothingFits
from planner.search.search import Found, search
from profiler.cluster.cluster import Cluster
from profiler.model_source import ModelSource


@dataclass(frozen=True)
class FrontierRow:
    """What one of several limits allows."""

    request: Request
    planned: Planned | None
    """None if nothing fits."""
    refusal: NothingFits | None
    taken_from_bytes: int | None
    """The user's smaller limit whose plan was faster than what was found here, if one was."""


def plan_frontier(
    source: ModelSource | NamedModel,
    cluster: Cluster,
    request: Request,
    limits_bytes: Sequence[int],
    progress: Progress,
) -> tuple[FrontierRow, ...]:
    """Trace a model once and return the fastest plan within each limit, by growing limit.

    The limit in `request` is left out of account.  Raises OsdpError as `plan_model` does, but for limits
    that nothing fits.
    """
    requests = [replace(request, limit_bytes=limit_bytes) for limit_bytes in sorted(set(limits_bytes))]
    traced = trace(source, cluster, requests[-1], progress)
    graph = traced.graph
    tasks = [task_of(wanted, graph, cluster) for wanted in requests]
    found = frontier(tasks[0], [task.limit_bytes for task in tasks], progress)
    points = {point.limit_bytes: point for point in found}
    asked = {wanted.usable_bytes: wanted.limit_bytes for wanted in requests}
    rows = []
    for wanted, task in zip(requests, tasks, strict=True):
        point = points[task.limit_bytes]
        planned = (
            Planned(written(point.found, wanted), graph, point.found, wanted, traced.trace_s, point.found.search_s)
            if point.found
            else None
        )
        refusal = explain_refusal(point.refusal, task, wanted) if point.refusal else None
        taken_from_bytes = None if point.taken_from_bytes is None else asked[point.taken_from_bytes]
        rows.append(FrontierRow(wanted, planned, refusal, taken_from_bytes))
    return tuple(rows)


def what_if_planned(planned: Planned, progress: Progress) -> WhatIf:
    """Return what binds a plan that was just found, and what more would buy."""
    return what_if(task_of(planned.request, planned.graph, planned.cluster), planned.found, progress)


def dealing_planned(planned: Planned, progress: Progress) -> Dealing | None:
    """Return what dealing samples by their cost would buy beside a plan that was just found; None if nobody waits."""
    if planned.plan.waits.per_micro_batch == 1:
        return None
    task = task_of(planned.request, planned.graph, planned.cluster)

    def find(then: Task, space: Space) -> Found:
        return find_plan(then, planned.request, lambda what, fraction: None, space)

    return compare_dealing(task, planned.found, find, progress)


def what_if_open(view: OpenPlan, progress: Progress) -> WhatIf:
    """Return what binds a plan from a file, and what more would buy: what was asked then is searched again.

    Raises OsdpError if nothing fits any more.
    """
    plan, graph, cluster = view.plan, view.space.graph, view.load.cluster
    asked, pins = plan.asked, pins_of(plan, graph, cluster)
    imbalance = read_imbalance(asked.imbalance) if asked.imbalance else BALANCED
    batches = asked.global_batch, asked.micro_batch
    task = Task(graph, cluster, plan.usable_bytes, plan.optimizer, *batches, pins=pins, imbalance=imbalance)
    return what_if(task, search(task, progress), progress)
