"""What `--mem` and `--headroom` take.

--mem 8GB                  one limit
--mem 6GB,8GB,12GB         several
--mem 6GB:24GB:2GB         a range: start, stop (included, if a step ends there), step
--mem 6GB:12GB:2GB,24GB    both
--headroom 512MB           memory that a plan leaves free under the limit
--headroom 5%              likewise, a share of the limit; by default `osdp.planning.allocator_headroom`
"""

import re
from dataclasses import dataclass
from math import ceil

from osdp.planning.clusters import reserve_use
from profiler.byte_sizes import MIB, format_bytes, parse_bytes, whole_mib
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError

MOST_LIMITS = 100
"""Longer lists are rejected as typos."""
_FORMS = "amounts such as 6GB,8GB,12GB, or a range start:stop:step such as 6GB:24GB:2GB"
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")


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
            raise OsdpError("too many memory limits", got=repr(text), expected=f"at most {MOST_LIMITS}")
    return Limits(tuple(sorted(limits)), several="," in text or ":" in text)


def _range(text: str) -> range:
    """Return the limits of a range, its stop included."""
    ends = text.split(":")
    if len(ends) != 3:
        raise OsdpError("this is not a range of memory limits", got=repr(text), expected=_FORMS)
    start, stop, step = (parse_bytes(end) for end in ends)
    if stop < start:
        what = "the range of memory limits ends below its start"
        raise OsdpError(what, got=repr(text), expected=f"{ends[1]}:{ends[0]}:{ends[2]}")
    limits = range(start, stop + 1, step)
    if len(limits) > MOST_LIMITS:
        got = f"{len(limits)} in {text!r}"
        raise OsdpError("too many memory limits", got=got, expected=f"at most {MOST_LIMITS}", advice="a larger step")
    return limits


@dataclass(frozen=True)
class Headroom:
    """An amount of memory, or a share of the limit."""

    size_bytes: int = 0
    share: float = 0.0
    """From 0 to less than 1."""

    def of(self, limit_bytes: int) -> int:
        """Return the bytes that are to stay free of a limit."""
        return self.size_bytes + ceil(self.share * limit_bytes)

    def over(self, usable_bytes: int) -> int:
        """Return the smallest whole MiB of limit that leaves so many bytes to use beside the headroom."""
        limit_bytes = whole_mib((usable_bytes + self.size_bytes) / (1 - self.share))
        return limit_bytes if limit_bytes - self.of(limit_bytes) >= usable_bytes else limit_bytes + MIB


NO_HEADROOM = Headroom()


def parse_headroom(text: str) -> Headroom:
    """Return what `512MB` or `5%` means; raises OsdpError, also for 100 % and more."""
    if text.strip() == "0":
        return NO_HEADROOM
    percent = _PERCENT.fullmatch(text.strip())
    if percent is None:
        try:
            return Headroom(size_bytes=parse_bytes(text))
        except OsdpError as error:
            expected = f"a share of the limit such as 5%, or {error.expected}"
            raise OsdpError("this is not a headroom", got=error.got, expected=expected) from None
    share = float(percent.group(1)) / 100
    if share >= 1:
        raise OsdpError("the headroom must be less than the memory limit", got=text, expected="less than 100%")
    return Headroom(share=share)


def check_headroom(headroom: Headroom, limit_bytes: int, cluster: Cluster) -> None:
    """Raise OsdpError if a headroom leaves nothing of a limit for tensors."""
    free_bytes, reserve_bytes = headroom.of(limit_bytes), cluster.reserve_bytes
    if free_bytes >= limit_bytes - reserve_bytes > 0:  # below the reserve nothing fits, which the search says
        got = f"{format_bytes(free_bytes)} of {format_bytes(limit_bytes)}"
        reserved = f"{format_bytes(reserve_bytes)} are reserved for {reserve_use(cluster.device)}"
        expected = f"less than {format_bytes(max(0.0, limit_bytes - reserve_bytes))}: {reserved}"
        advice = "a smaller --headroom or a larger --mem"
        raise OsdpError("the headroom leaves no memory for tensors", got=got, expected=expected, advice=advice)
