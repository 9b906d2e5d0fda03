"""Whether figures are within bounds, in words that a report can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from validation.check import Finding


def outside(what: str, value: float, low: float, high: float) -> list[str]:
    """Return a complaint about a value that is not within bounds, or is no number; none if it is."""
    return [] if low <= value <= high else [f"{what} is {value:.4g}, not within {low:.4g} and {high:.4g}"]


def judged(told: str, complaints: Sequence[str], figures: Mapping[str, Any]) -> Finding:
    """Return a finding that fails if there are complaints."""
    first = f"{len(complaints)} out of bounds; {told}" if complaints else told
    return Finding(not complaints, "\n".join([first, *complaints]), figures)
