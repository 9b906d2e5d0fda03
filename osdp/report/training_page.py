"""Writes the page of a training run, again and again while it goes on: a run that is killed has one.

It is written when the run begins, at the first step that is reported, with every checkpoint and at the end; at other
steps only while that has taken less than a hundredth of the run's time.  Only rank 0 writes, and the others wait for it
in their next collective.

A run that continues another takes over the steps of the page that is there, up to where it continues: the page's
figures hold them.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from osdp import __version__
from osdp.report.contents import Report, explained_report
from osdp.report.model_strip import PricesWanted
from osdp.report.render import steps_in, write_report
from osdp.report.tracked_parts import with_tracked
from osdp.report.training_contents import TrainingContents, without_ranks
from osdp.training.reporters import Counted, Event, Saved, Skipped, Start, Step, Summary
from planner.analysis.explain import OpenPlan
from planner.plan import Plan
from profiler.errors import OsdpError

MOST_SHARE = 0.01
"""Of the run's time that pages may take, those apart that are written in any case."""
MOST_STEPS = 4000
"""Steps that a page has; of more, every other one is dropped."""


class TrainingPage:
    """Takes note of events and writes the page; a page that cannot be written is warned of, and the run goes on."""

    def __init__(self, path: Path, opened: Callable[[Plan], OpenPlan], command: str) -> None:
        self.path, self._opened = path, opened
        self._how = f"Made by osdp {__version__}.\n{command}"
        self._began_s, self._spent_s = time.monotonic(), 0.0
        self._contents: TrainingContents | None = None

    def report(self, event: Event) -> None:
        """Take note of an event; the first one is a `Start`."""
        if isinstance(event, Start):
            self._view = self._opened(event.plan)
            report = explained_report(self._view, self._how, prices=PricesWanted.SAMPLED)
            name = event.plan.model.name
            earlier = steps_in(self.path, name, event.first_step) if event.first_step else ()
            self._contents = TrainingContents(event, report, self._how, earlier)
            self._began_s = time.monotonic()
            self._write()
            return
        contents, is_due = self._contents, True
        assert contents is not None, "a run begins with a Start"
        match event:
            case Step():
                is_due = contents.last is None or contents.last.number == contents.start.first_step or self._may_spend
                steps = contents.steps if len(contents.steps) < MOST_STEPS else contents.steps[::2]
                contents = replace(contents, steps=(*steps[:-1], *map(without_ranks, steps[-1:]), event))
            case Skipped():
                is_due, contents = False, replace(contents, skipped=contents.skipped + 1)
            case Counted():
                is_due, contents = False, replace(contents, report=self._with_counted(contents.report, event))
            case Saved():
                contents = replace(contents, saved=str(event.path))
            case Summary():
                contents = replace(contents, summary=event)
        self._contents = contents
        if is_due:
            self._write()

    def _with_counted(self, report: Report, counted: Counted) -> Report:
        """Put what was measured into the curve of the plan's memory."""
        (one,) = report.plans
        memory = with_tracked(one.memory, self._view, counted.parts, "measured in a step of rank 0")
        return replace(report, plans=(replace(one, memory=memory),))

    @property
    def _may_spend(self) -> bool:
        return self._spent_s < MOST_SHARE * (time.monotonic() - self._began_s)

    def _write(self) -> None:
        started_s = time.monotonic()
        assert self._contents is not None
        try:
            write_report(self.path, self._contents)
        except OsdpError as error:
            warnings.warn(f"the report is not written: {error.what} ({error.got})", stacklevel=2)
        self._spent_s += time.monotonic() - started_s
