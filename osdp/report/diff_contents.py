"""What a report says of two plans beside each other: nothing here is drawn or written."""

from dataclasses import dataclass
from math import isclose

from osdp.cli.reports.verdict import summary
from osdp.report.contents import PlanContents, open_contents
from osdp.report.model_strip import PricesWanted
from planner.analysis.explain import OpenPlan
from planner.analysis.plan_diff import Comparison, compare


@dataclass(frozen=True)
class DiffContents:
    """Two plans and how they differ."""

    before: PlanContents
    after: PlanContents
    names: tuple[str, str]
    """Of their files."""
    found: Comparison
    """Of the figures in the files."""
    how: str
    """Version and command, one a line."""

    is_outdated: bool
    """Whether predictions that are made anew are others than those of the files."""


def diff_contents(before: OpenPlan, after: OpenPlan, names: tuple[str, str], how: str) -> DiffContents:
    """Return how two plans differ; the pictures are of predictions made anew, the figures are the files'."""
    old, new = (
        open_contents(view, summary(view.plan, view.space.graph, view.load.cluster), how, PricesWanted.NONE)
        for view in (before, after)
    )
    is_outdated = any(
        view.prediction.peak_memory_bytes != view.plan.predicted.peak_memory_bytes
        or not isclose(view.prediction.step_time_s, view.plan.predicted.step_time_s, rel_tol=1e-6)
        for view in (before, after)
    )
    return DiffContents(old, new, names, compare(before.plan, after.plan), how, is_outdated)
