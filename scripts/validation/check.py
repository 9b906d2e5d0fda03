"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where checks run."""

    device: str
    """`cuda`, or `cpu` for a dry run: gloo ranks, small models, and kernels on CPU threads."""
    is_long: bool
    """Whether to draw more and repeat more often."""
    scratch: Path
    """An empty folder."""

    @property
    def is_dry(self) -> bool:
        """Whether there is no GPU, so that speeds mean nothing."""
        return self.device == "cpu"


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    passed: bool | None
    """None: it could not run here, and `told` says why."""
    told: str
    """In a line."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, as JSON has it; units are in the names."""
    seconds: float = 0.0
    """From the start of its process to its end."""


def skipped(why: str) -> Finding:
    """Return the finding of a check that cannot run here."""
    return Finding(None, why)


@dataclass(frozen=True)
class Check:
    """One check, which runs in a process of its own."""

    number: int
    title: str
    passes_when: str
    run: Callable[[Place], Finding]
    timeout_s: float = 120.0
    gpus: int = 1
    """The fewest that it needs; dry runs need none."""
    times_nothing: bool = False
    """Whether it may run beside others that do not, on a machine with room for several."""
