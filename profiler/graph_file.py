"""A traced model as text, and back.

A graph is a tree of dataclasses and tuples, many of which are the same objects: alike layers share what they cost.
Each object is a row of a JSON document, `[type, value...]`, after the rows of what it consists of; a value is plain
(text, number, true, false, null), or `[n]`, which stands for row n.  The last row is the graph.

    {"schema": "osdp.model_graph/3", "fields": {"Affine": ["fixed", "per_sample"], ...},
     "rows": [["Affine", 0.0, 8.0], ["tuple", 768, 64], ...]}

Reading makes dataclasses of `profiler.model_graph` and `profiler.affine` and nothing else, so that a file cannot run
code.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from profiler import affine, model_graph
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph

_TYPES = {
    name: one
    for module in (affine, model_graph)
    for name, one in vars(module).items()
    if isinstance(one, type) and is_dataclass(one) and one.__module__ == module.__name__
}
_FIELDS = {name: [field.name for field in fields(one)] for name, one in _TYPES.items()}
_TUPLE = "tuple"


def graph_to_text(graph: ModelGraph) -> str:
    """Return a graph as JSON."""
    rows: list[list[Any]] = []
    known: dict[int, list[int]] = {}

    def written(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if id(value) not in known:
            if isinstance(value, tuple):
                row = [_TUPLE, *map(written, value)]
            else:
                name = type(value).__name__
                row = [name, *(written(getattr(value, field)) for field in _FIELDS[name])]
            known[id(value)] = [len(rows)]
            rows.append(row)
        return known[id(value)]

    written(graph)
    return json.dumps({"schema": ModelGraph.SCHEMA, "fields": _FIELDS, "rows": rows}, separators=(",", ":"))


def graph_from_text(text: str) -> ModelGraph:
    """Return the graph that `graph_to_text` wrote; raises OsdpError for any other text."""
    try:
        document = json.loads(text)
        if document["schema"] != ModelGraph.SCHEMA or document["fields"] != _FIELDS:
            raise ValueError("it was written by another version")
        graph = _read(document["rows"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"[:200]
        raise OsdpError("this is not a traced model", got=got, expected=f"text of {ModelGraph.SCHEMA}") from None
    if not isinstance(graph, ModelGraph):
        raise OsdpError("this is not a traced model", got=type(graph).__name__, expected="a graph in its last row")
    return graph


def _read(rows: list[list[Any]]) -> Any:
    made: list[Any] = []
    for name, *values in rows:
        parts = [made[value[0]] if isinstance(value, list) else value for value in values]
        made.append(tuple(parts) if name == _TUPLE else _TYPES[name](**dict(zip(_FIELDS[name], parts, strict=True))))
    return made[-1]
