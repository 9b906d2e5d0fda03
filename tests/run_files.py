"""Files of a test run, which all of its processes find: what takes long to make is made by the first that asks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import programs


def run_file(name: str) -> Path | None:
    """Return the file of a name; None outside of a test run, as in benchmarks."""
    folder = os.environ.get(programs.FOLDER)
    return None if folder is None else Path(folder, name)


def replace_whole(file: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, whoever else writes it now."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
        written.write(content)
    os.replace(written.name, file)
