"""Whether pictures can be drawn: by matplotlib, which is optional."""

from __future__ import annotations

from profiler.errors import OsdpError


def check_drawing(what: str, otherwise: str = "") -> None:
    """Raise OsdpError, for `what`, if matplotlib is not installed; `otherwise` says what to do without."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        advice = "pip install 'osdp[plot]' or matplotlib" + (f"; or {otherwise}" if otherwise else "")
        raise OsdpError(f"{what} needs matplotlib, which is not installed", advice=advice) from None
