"""Headroom: memory that a plan leaves free under the user's limit, as `--headroom` says it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from profiler.byte_sizes import MIB, format_bytes, parse_bytes, whole_mib
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")


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
            raise OsdpError(
                "this is not a headroom",
                got=error.got,
                expected=f"a share of the limit such as 5%, or {error.expected}",
            ) from None
    share = float(percent.group(1)) / 100
    if share >= 1:
        raise OsdpError("a headroom is less than the whole limit", got=text, expected="less than 100%")
    return Headroom(share=share)


def check_headroom(headroom: Headroom, limit_bytes: int, cluster: Cluster) -> None:
    """Raise OsdpError if a headroom leaves nothing of a limit to plan with."""
    free_bytes, reserve_bytes = headroom.of(limit_bytes), cluster.reserve_bytes
    if free_bytes and free_bytes >= limit_bytes - reserve_bytes:
        raise OsdpError(
            "the headroom leaves nothing of the memory limit",
            got=f"{format_bytes(free_bytes)} of {format_bytes(limit_bytes)}",
            expected=f"less than {format_bytes(max(0.0, limit_bytes - reserve_bytes))}: {format_bytes(reserve_bytes)} "
            "are kept for what is not PyTorch's",
            advice="a smaller --headroom or a larger --mem",
        )
