"""Runs `osdp` in this process, as its command line does: exit status and what goes to the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from graph_files import traced_by_any

from osdp.cli import main
from osdp.planning.zoo_graphs import zoo_graph
from osdp.zoo import model_names
from planner.options.search_space import Space
from planner.problem import NO_PINS, Pins, Task
from planner.search.infeasible import NothingFits
from planner.search.search import Effort, Found, search
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

GRAPHS: dict[tuple[object, ...], ModelGraph] = {}
"""Graphs of the zoo's models, by what tells them apart: equal ones are one object here."""


def is_known(graph: ModelGraph) -> bool:
    """Return whether a graph is one of `GRAPHS`, not only equal to it."""
    return any(graph is one for one in GRAPHS.values())


def read_once(name: str, *settings: Any) -> ModelGraph | None:
    """Stand in for `zoo_graph`, which makes a graph anew each time that it reads it."""
    read = zoo_graph(name, *settings)
    if read is None:
        return None
    known = GRAPHS.setdefault((name, "read", *settings), read)
    return known if known == read else read


def trace_once(source: ModelSource, *settings: Any, world_size: int | None = None) -> ModelGraph:
    """Stand in for `trace_model`, which gives the same graph of a model of the zoo each time."""
    if source.name not in model_names():
        return trace_model(source, *settings, **({} if world_size is None else {"world_size": world_size}))
    key = (source.name, source.sequence_length, *settings)  # it runs no collectives
    if key not in GRAPHS:
        GRAPHS[key] = traced_by_any(f"zoo {key}", lambda: trace_model(source, *settings))
    return GRAPHS[key]


SPACES: dict[int, Space] = {}
"""Options of those graphs, by identity: half of a search makes them, by cluster, optimizer and micro-batch."""


def shared_space(graph: ModelGraph, *, pins: Pins) -> Space:
    """Stand in for `Space`, of which several searches of one graph with the same pins may share one."""
    if pins != NO_PINS or not is_known(graph):
        return Space(graph, pins=pins)
    if id(graph) not in SPACES:
        SPACES[id(graph)] = Space(graph)
    return SPACES[id(graph)]


FOUND: dict[tuple[object, ...], Found | NothingFits] = {}
"""What searches of those graphs have found, by all that a search depends on."""
SEARCHERS = (
    "osdp.planning.plan_questions",
    "osdp.planning.request",
    "planner.analysis.frontier",
    "planner.analysis.what_if",
)


def search_once(
    task: Task,
    progress: Callable[[str, float], None] = lambda what, fraction: None,
    space: Space | None = None,
    material_gain: float | None = None,
    effort: Effort | None = None,
) -> Found:
    """Stand in for `search`, which finds the same for the same question each time that it has the time it takes."""
    effort = effort or Effort()
    if not is_known(task.graph) or effort.seconds < float("inf"):
        return search(task, progress, space, material_gain, effort)
    others = [getattr(task, one.name) for one in fields(task) if one.name != "graph"]
    key = id(task.graph), str(others), material_gain, effort
    if key not in FOUND:
        try:
            FOUND[key] = search(task, progress, space, material_gain, effort)
        except NothingFits as refused:
            FOUND[key] = refused
    found = FOUND[key]
    if isinstance(found, NothingFits):
        raise found.with_traceback(None)
    progress("done", 1.0)
    return found


class Outcome(NamedTuple):
    """What one command did."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Cli:
    """Runs commands; `COLUMNS` is the width of their terminal."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, *arguments: str | Path) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["osdp", *map(str, arguments)])
        self.capsys.readouterr()
        outcome = Outcome(main(), *self.capsys.readouterr())
        assert "OSDP_TRACEBACK" in os.environ or "Traceback" not in outcome.out + outcome.err, outcome
        return outcome

    def done(self, *arguments: str | Path) -> str:
        """Run a command that must end with 0 and say nothing on the side, and return what it prints."""
        outcome = self(*arguments)
        assert (outcome.status, outcome.err) == (0, ""), outcome
        return outcome.out

    def json(self, *arguments: str | Path) -> dict[str, Any]:
        """Do the same with `--json`, and return the object that is printed."""
        told: dict[str, Any] = json.loads(self.done(*arguments, "--json"))
        return told

    def refused(self, *arguments: str | Path) -> str:
        """Run a command that must end with 2 and a message, and return the message."""
        outcome = self(*arguments)
        assert (outcome.status, outcome.out) == (2, ""), outcome
        assert outcome.err.startswith("osdp: error: "), outcome
        return outcome.err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Commands in an empty folder, on no rank of a training run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("profiler.trace.trace.trace_model", trace_once)
    monkeypatch.setattr("osdp.planning.named_model.zoo_graph", read_once)
    for module in ("planner.search.search", "osdp.planning.request"):
        monkeypatch.setattr(f"{module}.Space", shared_space)
    for module in SEARCHERS:
        monkeypatch.setattr(f"{module}.search", search_once)
    for name in ("OSDP_TRACEBACK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return Cli(capsys, monkeypatch)
