"""Scalars for TensorBoard: loss, learning rate, gradient norm, samples per second, peak memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp.training.reporters import Silent, Start, Step, Summary

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Board(Silent):
    """Writes what a run tells to TensorBoard's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None
        self._last_step = 0

    def started(self, start: Start) -> None:
        """Open the files; what an interrupted run wrote after its last checkpoint is hidden."""
        from torch.utils.tensorboard import SummaryWriter  # imports tensorboard, which takes a second

        make: Callable[..., Any] = SummaryWriter
        self._writer = make(str(self.folder), purge_step=start.first_step + 1 if start.first_step else None)

    def stepped(self, step: Step) -> None:
        """Write a step's scalars."""
        self._last_step = step.number
        self._write("loss", step.loss)
        self._write("learning_rate", step.learning_rate)
        self._write("samples_per_s", step.samples_per_s)
        if step.gradient_norm is not None:
            self._write("gradient_norm", step.gradient_norm)

    def finished(self, summary: Summary) -> None:
        """Write the memory and close the files."""
        if summary.memory is not None:
            self._write("peak_memory_bytes", summary.memory.peak_bytes)
            self._write("predicted_peak_memory_bytes", summary.plan.predicted.peak_memory_bytes)
        for accuracy in summary.accuracies:
            self._write(f"accuracy/{accuracy.what.replace(' ', '_')}", accuracy.right / accuracy.total)
        if self._writer is not None:
            self._writer.close()

    def _write(self, name: str, value: float) -> None:
        assert self._writer is not None, "`started` comes first"
        self._writer.add_scalar(name, value, self._last_step)
