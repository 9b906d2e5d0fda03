"""The files that other programs show: a step's memory and its timeline, predicted and real."""

from collections.abc import Iterator
from pathlib import Path

from profiler.errors import OsdpError

SUFFIXES = {"--memory-snapshot": ".pickle", "--timeline": ".json"}
"""Of each option's file."""


def check_viewer_paths(memory_snapshot: str | Path | None, timeline: str | Path | None) -> None:
    """Raise OsdpError, before anything takes time, if one of the files has another suffix or no folder."""
    for option, path in given(memory_snapshot, timeline):
        suffix = SUFFIXES[option]
        if path.suffix != suffix or path.is_dir():
            got = "a folder" if path.is_dir() else path.suffix or "no suffix"
            raise OsdpError(f"{option} cannot be {path}", got=got, expected=f"FILE{suffix}")
        if not path.parent.is_dir():
            raise OsdpError(f"{path} cannot be written", got="no such directory", advice=f"mkdir -p {path.parent}")


def given(memory_snapshot: str | Path | None, timeline: str | Path | None) -> Iterator[tuple[str, Path]]:
    """Yield the options that are given, with their files."""
    for option, path in zip(SUFFIXES, (memory_snapshot, timeline), strict=True):
        if path is not None:
            yield option, Path(path)


def measured_path(path: str | Path) -> Path:
    """Return the file of a real step beside that of a predicted one: `step.measured.json` of `step.json`."""
    return Path(path).with_suffix(f".measured{Path(path).suffix}")
