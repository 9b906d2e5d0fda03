"""The frontier: the most samples per second that each of several memory limits allows.

With s(L) the speed of the plan found under limit L and u(L) a bound on every plan under L, both grow
with L, because a plan that fits under a limit fits under every larger one.  So

    s(L) = max(found(L), s(the next smaller limit))       a plan is taken over     `_taken_over`
    u(L) = min(own bound(L), u(the next larger limit))                              `_bounded_from_above`
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.options.search_space import Space
from planner.pricing import make_plan
from planner.problem import Progress, Task
from planner.search.infeasible import NothingFits
from planner.search.search import Found, search


@dataclass(frozen=True)
class FrontierPoint:
    """The result for one limit."""

    limit_bytes: int
    """The limit that was searched under."""
    found: Found | None
    """The best plan; None if none fits."""
    refusal: NothingFits | None = None
    """Why no plan fits; None if one does."""
    taken_from_bytes: int | None = None
    """The smaller limit whose plan is faster than the plan found under this one, if there is one."""


def frontier(
    task: Task, limits_bytes: Iterable[int], progress: Progress = lambda what, fraction: None
) -> tuple[FrontierPoint, ...]:
    """Return the best plan under each limit, in ascending order; the limit of `task` is ignored."""
    space = Space(task.graph, pins=task.pins)
    limits = sorted(set(limits_bytes))
    points: list[FrontierPoint] = []
    for index, limit_bytes in enumerate(limits):
        here = replace(task, limit_bytes=limit_bytes)

        def report(what: str, fraction: float, index: int = index) -> None:
            progress(f"limit {index + 1} of {len(limits)}: {what}", (index + fraction) / len(limits))

        try:
            point = FrontierPoint(limit_bytes, search(here, report, space=space))
        except NothingFits as refusal:
            point = FrontierPoint(limit_bytes, None, refusal)
        points.append(_taken_over(point, points[-1]) if points else point)
    return _bounded_from_above(points)


def _taken_over(point: FrontierPoint, before: FrontierPoint) -> FrontierPoint:
    """Return the point, with the plan of the smaller limit before it if that is faster here too."""
    own, other = point.found, before.found
    if own is None or other is None or other.samples_per_s <= own.samples_per_s:
        return point
    # Under a larger limit DistributedDataParallel may run a plan that FSDP2 units ran.
    plan = make_plan(other.options, other.spanning, other.space, other.load, limit_bytes=point.limit_bytes, gap=0.0)
    speed = plan.predicted.samples_per_s
    if speed <= own.samples_per_s or plan.predicted.peak_memory_bytes > point.limit_bytes:
        return point
    bound = max(own.bound_samples_per_s, speed)
    found = replace(own, load=other.load, options=other.options, spanning=other.spanning, space=other.space)
    found = replace(found, samples_per_s=speed, bound_samples_per_s=bound)
    return replace(point, found=found, taken_from_bytes=before.taken_from_bytes or before.limit_bytes)


def _bounded_from_above(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return the points, none with a bound above that of a larger limit."""
    bound, bounded = float("inf"), []
    for point in reversed(points):
        if (found := point.found) is not None:
            bound = max(min(bound, found.bound_samples_per_s), found.samples_per_s)
            point = replace(point, found=replace(found, bound_samples_per_s=bound))
        bounded.append(point)
    return tuple(reversed(bounded))
