"""Plans of small made-up models for reports, and what a page says, read without a browser."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

from synthetic import cluster, transformer

from osdp.planning.request import BEST, Planned, Request, plan_graph
from osdp.report.contents import make_report
from osdp.report.render import render
from profiler.byte_sizes import MIB
from profiler.model_graph import ModelGraph

HOW = "Made by a test.\nosdp plan --model transformer"
HOSTILE = "<script>alert(1)</script>"


def planned_within(limit_mib: int, graph: ModelGraph | None = None, micro_batch: int | None = None) -> Planned:
    """Return the fastest plan of a model on four ranks, by default of one with three blocks."""
    return _planned_within(limit_mib, graph or _three_blocks(), micro_batch)


@cache
def _three_blocks() -> ModelGraph:
    return transformer(3, 256, selective=0.5)


@cache
def _planned_within(limit_mib: int, graph: ModelGraph, micro_batch: int | None) -> Planned:
    return plan_graph(graph, cluster(1, 4), Request(limit_mib * MIB, micro_batch=micro_batch, style=BEST))


def hostile(graph: ModelGraph) -> ModelGraph:
    """Return a model whose operators, blocks and own name are HTML."""
    operators = tuple(
        replace(
            one, name=f"{one.name}{HOSTILE}", kind=HOSTILE, modules=tuple(f"{name}{HOSTILE}" for name in one.modules)
        )
        for one in graph.operators
    )
    blocks = tuple(replace(one, name=f"{one.name}{HOSTILE}", kind=HOSTILE) for one in graph.blocks)
    return replace(graph, name=HOSTILE, operators=operators, blocks=blocks, notes=(HOSTILE,))


@dataclass
class Page(HTMLParser):
    """A page's elements, tables and script of figures."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    """The texts of the cells of every row of every table."""
    facts: list[str] = field(default_factory=list)
    """The terms and descriptions of lists, in order."""
    scripts: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    text: str = ""
    """All text that is shown."""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag in ("dt", "dd"):
            self.facts.append("")
        elif tag in ("script", "style"):
            {"script": self.scripts, "style": self.styles}[tag].append("")
        if tag not in ("meta", "link", "input", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self._open[-1:] == ["style"]:
            self.styles[-1] += data
        else:
            self.text += data
            if self._open[-1:] in (["dt"], ["dd"]):
                self.facts[-1] += data
            if "td" in self._open or "th" in self._open:
                self.rows[-1][-1] += data

    @property
    def figures(self) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[0])))

    def values(self, tag: str, attribute: str) -> list[str | None]:
        """Return an attribute of all elements with that tag."""
        return [
            attributes[attribute] for found, attributes in self.elements if found == tag and attribute in attributes
        ]


def read_page(text: str) -> Page:
    """Return what a page has; every element is closed where it should be."""
    page = Page()
    page.feed(text)
    page.close()
    return page


def page_of(found: Sequence[Planned]) -> Page:
    """Return the report of plans."""
    return read_page(render(make_report(found, HOW)))
