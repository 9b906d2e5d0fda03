"""Graphs that several workers of a test run need, of which one traces each: half of a second, and pickled 40 kB."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import programs

from profiler.model_graph import ModelGraph


def traced_by_any(key: str, trace: Callable[[], ModelGraph]) -> ModelGraph:
    """Return the graph of this key, which says all that it depends on, from a file of the run or, first, by a trace."""
    if programs.FOLDER not in os.environ:  # outside of a test run, as in benchmarks
        return trace()
    file = Path(os.environ[programs.FOLDER], f"graph-{sha256(key.encode()).hexdigest()}")
    if file.exists():
        found: ModelGraph = pickle.loads(file.read_bytes())
        return found
    graph = trace()
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
        written.write(pickle.dumps(graph))
    os.replace(written.name, file)  # whole, whoever else traces it now
    return graph
