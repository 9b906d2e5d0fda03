"""The formats that plans are exported to, by name."""

from collections.abc import Callable

from osdp.export.fsdp2 import fsdp2_code
from osdp.export.nearest import expressible
from planner.analysis.explain import OpenPlan
from profiler.errors import OsdpError


def _fsdp2(view: OpenPlan, *, nearest: bool) -> str:
    return fsdp2_code(expressible(view, nearest=nearest))


FORMATS: dict[str, Callable[..., str]] = {"fsdp2": _fsdp2}
"""Each takes a plan and whether it may take the nearest to what it cannot do, and returns text."""


def check_format(name: str) -> None:
    """Raise OsdpError if there is no such format."""
    if name not in FORMATS:
        raise OsdpError("there is no such export format", got=name, expected=", ".join(FORMATS))


def exported(view: OpenPlan, name: str, *, nearest: bool) -> str:
    """Return a plan in a format. Raises OsdpError for what the format cannot do, unless `nearest`."""
    check_format(name)
    return FORMATS[name](view, nearest=nearest)
