"""Graphs that several workers of a test run need, of which one traces each: half of a second, and pickled 40 kB."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from hashlib import sha256

from run_files import replace_whole, run_file

from profiler.model_graph import ModelGraph


def traced_by_any(key: str, trace: Callable[[], ModelGraph]) -> ModelGraph:
    """Return the graph of this key, which says all that it depends on, from a file of the run or, first, by a trace."""
    file = run_file(f"graph-{sha256(key.encode()).hexdigest()}")
    if file is None:
        return trace()
    if file.exists():
        found: ModelGraph = pickle.loads(file.read_bytes())
        return found
    graph = trace()
    replace_whole(file, pickle.dumps(graph))
    return graph
