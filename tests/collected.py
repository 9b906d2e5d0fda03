"""A reporter that keeps what a training tells."""

from __future__ import annotations

from osdp.training.reporters import Silent, Start, Step, Summary


class Collected(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.steps: list[Step] = []
        self.summaries: list[Summary] = []

    def started(self, start: Start) -> None:
        self.starts.append(start)

    def stepped(self, step: Step) -> None:
        self.steps.append(step)

    def finished(self, summary: Summary) -> None:
        self.summaries.append(summary)
