"""A number with its source, as all figures of a cluster are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from."""

    value: float
    """SI value; the field that holds the figure gives the unit."""
    source: str
    """`datasheet: ...`, `paper: ...`, `measured: ...`, `derived: ...` or `assumed: ...`."""

    def __post_init__(self) -> None:
        if not 0 <= self.value < float("inf"):
            raise ValueError(f"must be finite and not negative, got {self.value}")
        origins = ("datasheet", "paper", "measured", "derived", "assumed")
        origin, _, detail = self.source.partition(": ")
        if origin not in origins or not detail:
            raise ValueError(f"source must start with one of {', '.join(origins)} and a colon, got {self.source!r}")
