"""Folders that something is going to be written into."""

from __future__ import annotations

import os
from pathlib import Path

from profiler.errors import OsdpError


def make_folder(path: Path) -> Path:
    """Make a folder unless it is there; raises OsdpError if nothing can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OsdpError(
            f"the folder {path} cannot be made", got=error.strerror or str(error), advice="another folder"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise OsdpError(f"nothing can be written into {path}", got="no permission", advice="another folder")
    return path
