"""Commands of one test process plan a question once: where they do not, nothing fails, and all take longer."""

from __future__ import annotations

from typing import Any

import command_line
import pytest
from command_line import Cli

ASKED = ("plan", "--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--batch", "2", "--mem", "611MB")


def test_a_question_that_is_asked_again_is_not_searched_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    searched, search = [], command_line.search

    def count(task: Any, *others: Any) -> Any:
        searched.append(task.limit_bytes)
        return search(task, *others)

    monkeypatch.setattr(command_line, "search", count)
    monkeypatch.setattr(command_line, "FOUND", {})
    first = cli.json(*ASKED)
    once = len(searched)
    assert once > 0
    again = cli.json(*ASKED)
    assert len(searched) == once
    assert again["predicted"] == first["predicted"]
    cli.json(*ASKED[:-1], "612MB")
    assert len(searched) > once


def test_searches_of_a_model_share_its_options(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    made, space = [], command_line.Space

    def count(graph: Any, **pins: Any) -> Any:
        made.append(graph.name)
        return space(graph, **pins)

    monkeypatch.setattr(command_line, "Space", count)
    monkeypatch.setattr(command_line, "FOUND", {})
    monkeypatch.setattr(command_line, "SPACES", {})
    for limit in ("611MB", "612MB"):
        cli.json(*ASKED[:-1], limit)
    assert made == ["gpt2-tiny"]
