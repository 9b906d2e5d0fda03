"""What keeps a run's figures: TensorBoard, Weights & Biases, MLflow.

All get the same scalars (`scalars`), and the plan as text; whether they write to files or to a server is their own
setting (`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from osdp.training.reporters import Event, Reporter, Start, Step, Summary
from planner.plan import Plan
from profiler.errors import OsdpError

MOST_RANKS = 64
"""Ranks whose waiting is kept one by one."""
Describe = Callable[[Start], str]
"""Returns the plan, and what it is predicted to do, as text."""


def scalars(event: Event, plan: Plan) -> dict[str, float]:
    """Return the figures of an event by name; memory beside what was predicted and the limit, at every step."""
    match event:
        case Step():
            found: dict[str, float | None] = {name: getattr(event, name) for name in ("loss", "learning_rate")}
            found |= {"samples_per_s": event.samples_per_s, "gradient_norm": event.gradient_norm}
            found |= _waits(event.waits_s)
            memory_bytes = event.peak_bytes or None
        case Summary():
            found = {
                f"accuracy/{one.what.replace(' ', '_')}": one.right / one.total for one in event.accuracies if one.total
            }
            memory_bytes = None if event.memory is None else event.memory.peak_bytes
        case _:
            return {}
    if memory_bytes is not None:
        found["memory/peak_bytes"] = memory_bytes
        found["memory/predicted_bytes"] = plan.predicted.tensors_bytes
        found["memory/limit_bytes"] = plan.limit_bytes
    return {name: value for name, value in found.items() if value is not None}


def _waits(waits_s: Sequence[float]) -> dict[str, float]:
    """Return how long ranks wait in a step: all in the mean, the longest, and each if they are few."""
    if not waits_s:
        return {}
    found = {"waiting_s/mean": sum(waits_s) / len(waits_s), "waiting_s/longest": max(waits_s)}
    each = {f"waiting_s/rank_{rank}": wait_s for rank, wait_s in enumerate(waits_s)}
    return found | (each if len(each) <= MOST_RANKS else {})


class Tracker:
    """Hands the figures of events on; subclasses say to whom."""

    def report(self, event: Event) -> None:
        """Take note of an event; the first one opens the run and the last one closes it."""
        if isinstance(event, Start):
            self._plan, self._last_step = event.plan, event.first_step
            self.begin(event)
            return
        if isinstance(event, Step):
            self._last_step = event.number
        if found := scalars(event, self._plan):
            self.write(found, self._last_step)
        if isinstance(event, Summary):
            self.end()

    def begin(self, start: Start) -> None:
        """Open the run."""
        raise NotImplementedError

    def write(self, values: dict[str, float], step: int) -> None:
        """Keep figures of a step."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the run."""
        raise NotImplementedError


class Board(Tracker):
    """Writes TensorBoard's files."""

    def __init__(self, folder: Path, describe: Describe) -> None:
        self.folder, self._describe = folder, describe

    def begin(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports tensorboard, which takes a second

        make: Callable[..., Any] = SummaryWriter
        # What an interrupted run wrote after its last checkpoint is hidden.
        self._writer = make(str(self.folder), purge_step=start.first_step + 1 if start.first_step else None)
        text = "\n".join(f"    {line}" for line in self._describe(start).splitlines())  # as code, in Markdown
        self._writer.add_text("plan", text, start.first_step)

    def write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Logs to a run of wandb's, in the project of `WANDB_PROJECT`, or `osdp`."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe

    def begin(self, start: Start) -> None:
        import wandb

        config = asdict(start.config) | {"predicted_samples_per_s": start.plan.predicted.samples_per_s}
        self._run = wandb.init(project=os.environ.get("WANDB_PROJECT", "osdp"), config=config, resume="allow")
        self._run.summary["plan"] = self._describe(start)

    def write(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def end(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """Logs to a run of mlflow's, in the experiment of `MLFLOW_EXPERIMENT_NAME`, or the default one."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe

    def begin(self, start: Start) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.start_run(run_name=start.plan.model.name)
        mlflow.log_params({name: value for name, value in asdict(start.config).items() if value is not None})
        mlflow.log_text(self._describe(start), "plan.txt")

    def write(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def end(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Describe], Reporter]] = {"wandb": WeightsAndBiases, "mlflow": MLflow}
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}


def check_installed(tracker: str) -> None:
    """Raise OsdpError if a tracker's package cannot be imported."""
    if importlib.util.find_spec(tracker) is None:
        advice = f".venv/bin/pip install {PACKAGES[tracker]}, or no --tracker"
        raise OsdpError(f"{tracker} is not installed", got=f"--tracker {tracker}", advice=advice)
