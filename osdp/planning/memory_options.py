"""Memory limits, as `--mem` says them: one, several, or a range.

8GB                  one
6GB,8GB,12GB         several
6GB:24GB:2GB         a range: start, stop (included, if a step ends there), step
6GB:12GB:2GB,24GB    both
"""

from __future__ import annotations

from dataclasses import dataclass

from profiler.byte_sizes import parse_bytes
from profiler.errors import OsdpError

MOST_LIMITS = 100
"""More is taken for a slip of the pen."""
_FORMS = "amounts such as 6GB,8GB,12GB, or a range start:stop:step such as 6GB:24GB:2GB"


@dataclass(frozen=True)
class Limits:
    """One limit, or several."""

    limits_bytes: tuple[int, ...]
    """Growing, each once."""
    several: bool
    """Whether a list or a range was given, even of one."""


def parse_limits(text: str) -> Limits:
    """Return the limits that `text` means.  Raises OsdpError."""
    limits: set[int] = set()
    for part in text.split(","):
        if not part.strip():
            raise OsdpError("these are not memory limits", got=repr(text), expected=_FORMS)
        limits |= set(_range(part) if ":" in part else [parse_bytes(part)])
        if len(limits) > MOST_LIMITS:
            raise OsdpError("these are too many memory limits", got=repr(text), expected=f"at most {MOST_LIMITS}")
    return Limits(tuple(sorted(limits)), several="," in text or ":" in text)


def _range(text: str) -> range:
    """Return the limits of a range, its stop included."""
    ends = text.split(":")
    if len(ends) != 3:
        raise OsdpError("this is not a range of memory limits", got=repr(text), expected=_FORMS)
    start, stop, step = (parse_bytes(end) for end in ends)
    if stop < start:
        raise OsdpError("a range of memory limits grows", got=repr(text), expected=f"{ends[1]}:{ends[0]}:{ends[2]}")
    limits = range(start, stop + 1, step)
    if len(limits) > MOST_LIMITS:
        raise OsdpError(
            "these are too many memory limits",
            got=f"{len(limits)} in {text!r}",
            expected=f"at most {MOST_LIMITS}",
            advice="a larger step",
        )
    return limits
