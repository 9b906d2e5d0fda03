"""Whether pictures can be drawn: by matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path

from profiler.errors import OsdpError, install_advice

FORMATS = (".png", ".svg", ".pdf")


def check_drawing(what: str, otherwise: str = "") -> None:
    """Raise OsdpError, for `what`, if matplotlib is not installed; `otherwise` says what to do without."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        advice = install_advice("plot") + (f"; or {otherwise}" if otherwise else "")
        raise OsdpError(f"{what} needs matplotlib, which is not installed", advice=advice) from None


def check_picture(path: Path, what: str, otherwise: str) -> None:
    """Raise OsdpError if no picture can be drawn into `path`; the others are as in `check_drawing`."""
    check_drawing(what, otherwise)
    if path.suffix not in FORMATS:
        raise OsdpError(
            f"{path} is no picture that can be drawn", got=path.suffix or "no suffix", expected=", ".join(FORMATS)
        )
    if not path.parent.is_dir():
        raise OsdpError(f"{path} cannot be written", got="no such directory", advice=f"mkdir -p {path.parent}")
