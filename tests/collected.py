"""A reporter that keeps what a training tells."""

from __future__ import annotations

from osdp.training.reporters import Event, Start, Step, Summary


class Collected:
    """Keeps the events."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.steps: list[Step] = []
        self.summaries: list[Summary] = []

    def report(self, event: Event) -> None:
        match event:
            case Start():
                self.starts.append(event)
            case Step():
                self.steps.append(event)
            case Summary():
                self.summaries.append(event)
