"""What a run tells while it goes on; `osdp.cli.reports.train` prints it, TensorBoard's files keep it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planner.plan import Plan


@dataclass(frozen=True)
class Start:
    """A run is about to begin."""

    plan: Plan
    """What is run."""
    fsdp_type: str
    planned_s: float
    """Seconds that planning took; 0 where the plan was read from a file."""
    fits: bool
    """Whether the prediction is within the limit."""
    device: str
    """Where the ranks compute."""
    task: str
    """What is learned."""
    steps: int
    first_step: int
    """Steps that are done already."""
    resumed: Path | None
    """Checkpoint that the run continues from."""


@dataclass(frozen=True)
class Step:
    """One optimizer step is done."""

    number: int
    """From 1."""
    loss: float
    """Mean over all ranks and micro-batches."""
    gradient_norm: float | None
    """Before clipping; None where gradients are not clipped."""
    learning_rate: float
    samples: int
    """Of all ranks in the step."""
    tokens: int
    """Likewise."""
    step_s: float
    """Wall-clock time of the step on rank 0, median since the last report."""

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.samples / self.step_s


@dataclass(frozen=True)
class Memory:
    """Peak memory of the fullest rank."""

    peak_bytes: int
    """Live tensors (CUDA: what torch's allocator handed out)."""
    reserved_bytes: int
    """CUDA: what torch's allocator took from the device; 0 on CPU."""
    how: str
    """How it was measured."""


@dataclass(frozen=True)
class Accuracy:
    """How much of what was held out of training came out right."""

    what: str
    """What is counted, in the plural."""
    right: int
    total: int


@dataclass(frozen=True)
class Summary:
    """The run is over."""

    plan: Plan
    steps: int
    """Steps of this run."""
    timed_steps: int
    """Steps that the median is of: not the first ones, nor the one whose memory was tracked."""
    step_s: float
    """Median wall-clock time of a step; 0 where none was timed."""
    samples_per_s: float
    tokens_per_s: float
    memory: Memory | None
    """None where no step was run."""
    accuracies: tuple[Accuracy, ...]
    """Empty where the task has no test."""
    checkpoint: Path | None
    """Last checkpoint."""


class Reporter(Protocol):
    """Is told of events, on rank 0 only."""

    def planning(self, what: str, fraction: float) -> None:
        """Take note of how far planning is."""

    def started(self, start: Start) -> None:
        """Take note of what is about to begin."""

    def stepped(self, step: Step) -> None:
        """Take note of a step: the first, every `log_every`th and the last."""

    def saved(self, path: Path) -> None:
        """Take note of a checkpoint."""

    def finished(self, summary: Summary) -> None:
        """Take note of the end."""


class Silent:
    """Reporter of the other ranks."""

    def planning(self, what: str, fraction: float) -> None:
        """Say nothing."""

    def started(self, start: Start) -> None:
        """Say nothing."""

    def stepped(self, step: Step) -> None:
        """Say nothing."""

    def saved(self, path: Path) -> None:
        """Say nothing."""

    def finished(self, summary: Summary) -> None:
        """Say nothing."""


class Several:
    """Passes events on to several reporters."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def planning(self, what: str, fraction: float) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.planning(what, fraction)

    def started(self, start: Start) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.started(start)

    def stepped(self, step: Step) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.stepped(step)

    def saved(self, path: Path) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.saved(path)

    def finished(self, summary: Summary) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.finished(summary)
