"""Events of a run, for what reports them: `osdp.cli.reports.train` prints them, `osdp.training.trackers` keeps them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from osdp.training.config import TrainConfig
from osdp.training.progress import Restarts
from planner.plan import Plan
from runtime.observe.part_peaks import PartPeak


@dataclass(frozen=True)
class Start:
    """A run is about to begin."""

    plan: Plan
    config: TrainConfig
    planned_s: float
    """Seconds that planning took; 0 where the plan was read from a file."""
    device: str
    """`cpu` or `cuda`."""
    first_step: int
    """Steps that are done already."""
    resumed: Path | None
    """Checkpoint that the run continues from."""
    restarts: int = 0
    """How often the ranks were started before."""

    @property
    def fits(self) -> bool:
        """Whether the prediction is within the limit."""
        return self.plan.predicted.peak_memory_bytes <= self.plan.usable_bytes


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
    """Of all ranks in the step; so `tokens`."""
    tokens: int
    step_s: float
    """Wall-clock time of the step on rank 0, median since the last report."""
    peak_bytes: int = 0
    """Peak memory of the fullest rank so far, as `Memory.peak_bytes`; 0 while it is not known."""
    left_s: float = 0.0
    """Until the last step is done, if all that are left take as long as these."""
    waits_s: tuple[float, ...] = ()
    """How long each rank waits in that step, in their order; empty for one rank. See `osdp.training.waiting`."""

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.samples / self.step_s


@dataclass(frozen=True)
class Saved:
    """A checkpoint is whole."""

    path: Path


@dataclass(frozen=True)
class Memory:
    """Peak memory of the fullest rank."""

    peak_bytes: int
    """Live tensors (CUDA: what torch's allocator handed out)."""
    reserved_bytes: int
    """CUDA: what torch's allocator took from the device; 0 on CPU."""
    how: str


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
    skipped: int = 0
    """Steps that were left out, as their gradients were not finite."""
    restarts: Restarts | None = None
    """What restarts have cost; None if there was none."""
    waits_s: tuple[float, ...] = ()
    """As in `Step`, of the median step; empty also where none was timed."""


@dataclass(frozen=True)
class Skipped:
    """A step was left out, as its gradients were not finite."""

    number: int
    """From 1."""


@dataclass(frozen=True)
class Counted:
    """Rank 0 has counted the bytes of a step."""

    parts: tuple[PartPeak, ...]
    """What lived at most while each part of the model ran, in the order of the step."""


Event = Start | Step | Skipped | Saved | Counted | Summary
Report = Callable[[Event], None]


class Reporter(Protocol):
    """Takes note of events, on rank 0 only."""

    def report(self, event: Event) -> None:
        """Take note of an event; of steps those come that `log_every` chooses, the first and the last."""
