"""Runs `osdp` in this process, as its command line does: exit status and what goes to the terminal."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from osdp.cli import main
from osdp.zoo import model_names
from planner.options.search_space import Space
from planner.problem import NO_PINS, Pins
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

TRACED: dict[tuple[object, ...], ModelGraph] = {}
"""Graphs of the zoo's models, by what tells them apart."""


def trace_once(source: ModelSource, *settings: Any) -> ModelGraph:
    """Stand in for `trace_model`, which gives the same graph of a model of the zoo each time."""
    if source.name not in model_names():
        return trace_model(source, *settings)
    key = (source.name, source.sequence_length, *settings)
    if key not in TRACED:
        TRACED[key] = trace_model(source, *settings)
    return TRACED[key]


SPACES: dict[int, Space] = {}
"""Options of those graphs, by identity: half of a search makes them, by cluster, optimizer and micro-batch."""


def shared_space(graph: ModelGraph, *, pins: Pins) -> Space:
    """Stand in for `Space`, of which several searches of one graph with the same pins may share one."""
    if pins != NO_PINS or all(graph is not one for one in TRACED.values()):
        return Space(graph, pins=pins)
    if id(graph) not in SPACES:
        SPACES[id(graph)] = Space(graph)
    return SPACES[id(graph)]


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
    monkeypatch.setattr("planner.search.search.Space", shared_space)
    for name in ("OSDP_TRACEBACK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return Cli(capsys, monkeypatch)
