"""What the documents name is there: links, paths, modules, tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")])
CODE = "osdp|planner|profiler|runtime"
NOT_OURS = {"examples/llm_training/run.sh"}
"""In documents of the projects that OSDP grew out of."""
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
PATH = re.compile(
    rf"(?<![\w/.{{<-])(?:\./)?((?:{CODE}|configs|cuda|docs|examples|scripts|tests|unit|gloo|gpu)/[\w./*-]*)"
)
"""Tests are also named by their folder in `tests/`."""
TEST = re.compile(r"(?<![\w/])(?:[\w/]+/)?(test_\w+\.py)(?:::(\w+))?")
NAME_IN_FILE = re.compile(r"([\w/]+\.py): (\w+)(?:\.(\w+))?")
"""As in `planner/plan.py: Plan.choices`."""
MODULE = re.compile(rf"(?<![\w./-])((?:{CODE})(?:\.\w+)+)(?![\w/-])")


def targets(path: str) -> bool:
    """Whether a path that a document names, perhaps with `*`, is in the checkout or its tests."""
    path = path.rstrip("./")
    return any(next(folder.glob(path), None) for folder in (CHECKOUT, CHECKOUT / "tests"))


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", document.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_links(document: Path, text: str) -> Iterator[str]:
    """Yield the relative links that lead nowhere."""
    for link in LINK.findall(FENCE.sub("", text)):
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def missing_modules(text: str) -> Iterator[str]:
    """Yield the dotted names that are no module, and no name in one."""
    for name in MODULE.findall(text):
        parts = name.split(".")
        places = [(CHECKOUT.joinpath(*parts[:count]), parts[count:]) for count in range(len(parts), 0, -1)]
        for place, rest in places:
            file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
            if file.is_file():
                if rest and not re.search(rf"\b{rest[0]}\b", file.read_text()):
                    yield name
                break


def missing_tests(text: str) -> Iterator[str]:
    """Yield the tests that no file has."""
    for file, function in TEST.findall(text):
        found = next((CHECKOUT / "tests").rglob(file), None)
        if found is None or (function and f"def {function}(" not in found.read_text()):
            yield f"{file}::{function}"


def missing_names(text: str) -> Iterator[str]:
    """Yield `file.py: name` where the file does not define or use the name."""
    for file, *names in NAME_IN_FILE.findall(text):
        source = (CHECKOUT / file).read_text() if (CHECKOUT / file).is_file() else ""
        if not all(re.search(rf"\b{name}\b", source) for name in names if name):
            yield f"{file}: {'.'.join(names)}"


def missing(document: Path, text: str) -> list[str]:
    """Return everything that a document names and that is not there."""
    code = "\n".join([*re.findall(r"`([^`\n]+)`", FENCE.sub("", text)), *FENCE.findall(text)])
    paths = (path for path in PATH.findall(code) if path not in NOT_OURS and not targets(path))
    names = [*missing_modules(code), *missing_names(code), *missing_tests(text)]
    return [*missing_links(document, text), *paths, *names]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_documents_name_is_there(document: Path) -> None:
    assert missing(document, document.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "[here](docs/nowhere.md)",
        "[here](README.md#no-such-heading)",
        "`planner/strategy.py`",
        "`configs/clusters/none-*.yaml`",
        "```sh\npython scripts/bench_planner.py --help\n```",
        "`planner.strategy.Strategy`",
        "`profiler.errors.NoSuchError`",
        "`profiler/errors.py: NoSuchError`",
        "tested by `unit/test_nothing.py`",
        "`unit/test_documents.py::test_nothing`",
    ],
)
def test_what_is_missing_is_noticed(text: str) -> None:
    assert missing(CHECKOUT / "README.md", text)


def unfilled(text: str) -> list[str]:
    """Return the lines, outside of code, that are one word in capitals: what was to be replaced by something."""
    return re.findall(r"^[A-Z]{3,}$", FENCE.sub("", text), re.M)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(CHECKOUT)))
def test_nothing_is_left_to_fill_in(document: Path) -> None:
    assert unfilled(document.read_text()) == []


def test_what_is_left_to_fill_in_is_noticed() -> None:
    assert unfilled("# A page\n\nTABLE\n\n```\nHELLO\n```\n") == ["TABLE"]


def torn(text: str) -> list[str]:
    """Return the first lines of what looks like tables, outside of code, and has no head."""
    tables = re.findall(r"(?:^\|.*\n?)+", FENCE.sub("", text), re.M)
    return [lines[0] for lines in map(str.splitlines, tables) if not re.fullmatch(r"[|: -]+", "".join(lines[1:2]))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(CHECKOUT)))
def test_no_table_is_torn(document: Path) -> None:
    assert torn(document.read_text()) == []


def test_a_torn_table_is_noticed() -> None:
    assert torn("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n") == ["| 3 | 4 |"]


def test_what_is_there_is_found() -> None:
    text = (
        "[a](docs/planner.md#the-space) [b](https://example.org/none.md) `profiler/errors.py` "
        "`configs/clusters/*.yaml` `profiler.errors.OsdpError` `profiler/errors.py: OsdpError.render` `osdp.planning` "
        "`unit/test_documents.py::test_what_is_there_is_found`"
    )
    assert missing(CHECKOUT / "README.md", text) == []
