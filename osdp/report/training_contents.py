"""What the page of a training run says, gathered from its events: nothing here is drawn or written."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from osdp.cli.reports.figures import format_count, format_seconds
from osdp.report.contents import Fact, Report
from osdp.training.reporters import Start, Step, Summary
from profiler.byte_sizes import format_bytes


@dataclass(frozen=True)
class TrainingContents:
    """A run, as far as it is."""

    start: Start
    report: Report
    """Of its plan."""
    how: str
    steps: tuple[Step, ...]
    """Those that were reported, in their order; also of the run that this one continues.

    All but the newest have of the waits only the longest: with many ranks and steps they would be many.
    """
    skipped: int = 0
    """Steps that were left out until now."""
    saved: str = ""
    """The newest checkpoint of this run."""
    summary: Summary | None = None
    """None until the run is over."""

    @property
    def is_over(self) -> bool:
        return self.summary is not None

    @property
    def last(self) -> Step | None:
        """The newest step that was reported."""
        return self.steps[-1] if self.steps else None

    @property
    def samples_per_s(self) -> float:
        """Of the median step of the run, or until it is over, of those since the last report but one; 0: not known."""
        if self.summary is not None and self.summary.timed_steps:
            return self.summary.samples_per_s
        return self.last.samples_per_s if self.last else 0.0

    @property
    def step_s(self) -> float:
        """The same as seconds per step."""
        if self.summary is not None and self.summary.timed_steps:
            return self.summary.step_s
        return self.last.step_s if self.last else 0.0

    @property
    def peak_bytes(self) -> int:
        """Measured peak of the fullest rank; 0: not known."""
        if self.summary is not None and self.summary.memory is not None:
            return self.summary.memory.peak_bytes
        return self.last.peak_bytes if self.last else 0

    @property
    def waits_s(self) -> tuple[float, ...]:
        """How long each rank waits in a step; empty: not known."""
        if self.summary is not None and self.summary.waits_s:
            return self.summary.waits_s
        is_of_this_run = self.last is not None and self.last.number > self.start.first_step
        return self.last.waits_s if self.last and is_of_this_run else ()

    @property
    def steps_to_keep(self) -> tuple[Step, ...]:
        """What a run that continues this one needs."""
        return tuple(map(without_ranks, self.steps))

    @property
    def state(self) -> str:
        """How far the run is, in words."""
        steps = self.start.config.steps
        if self.is_over:
            return "The run is over"
        return f"Written after step {self.last.number} of {steps}" if self.last else "Written before the first step"

    @property
    def facts(self) -> tuple[Fact, ...]:
        return tuple(self._facts())

    def _facts(self) -> Iterator[Fact]:
        start, last, predicted = self.start, self.last, self.start.plan.predicted
        saved = f"newest checkpoint: {self.saved}" if self.saved else "no checkpoint was written"
        yield Fact("steps", f"{last.number if last else start.first_step} of {start.config.steps}", saved)
        if last is not None:
            yield Fact("loss", f"{last.loss:.4g}", f"mean of all ranks in step {last.number}")
            ratio = self.samples_per_s / predicted.samples_per_s
            note = f"{ratio:.2f} x the predicted {format_count(predicted.samples_per_s)} on {start.plan.cluster.name}"
            yield Fact("measured samples/s", format_count(self.samples_per_s), note)
        if self.peak_bytes:
            note = f"predicted {format_bytes(predicted.tensors_bytes)}, and {format_bytes(predicted.reserve_bytes)}"
            limit = f"reserved, of {format_bytes(start.plan.limit_bytes)}"
            yield Fact("measured peak memory", format_bytes(self.peak_bytes), f"{note} {limit}")
        if self.waits_s:
            longest_s, slowest = max(self.waits_s), self.waits_s.index(min(self.waits_s))
            note = f"{longest_s / self.step_s:.1%} of a step: rank {self.waits_s.index(longest_s)} for rank {slowest}"
            yield Fact("longest wait", format_seconds(longest_s), note)
        if start.restarts:
            cost = self.summary.restarts if self.summary else None
            note = str(cost).partition(": ")[2] if cost else "of the ranks"
            yield Fact("restarts", str(start.restarts), note)
        if self.skipped:
            yield Fact("skipped steps", str(self.skipped), "their gradients were not finite")
        for accuracy in self.summary.accuracies if self.summary else ():
            share = f"{accuracy.right / accuracy.total:.1%}"
            yield Fact("held-out accuracy", share, f"{accuracy.right} of {accuracy.total} {accuracy.what} right")


def without_ranks(step: Step) -> Step:
    """Return a step with the longest of its waits alone."""
    return replace(step, waits_s=(max(step.waits_s),)) if step.waits_s else step
