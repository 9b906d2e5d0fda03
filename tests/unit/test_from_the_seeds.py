"""docs/from-the-seeds.md: every row has a test that is there, and every file that it names is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-the-seeds.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "its document" not in line]


def cells(row: str) -> list[str]:
    """Return the cells of a row; `\\|` is no border."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: cells(row)[0][:40])
def test_every_row_has_its_test(row: str) -> None:
    _, here, tests = cells(row)
    named = re.findall(r"`([^`]+)`", tests)
    assert named
    for one in named:
        file, _, function = one.partition("::")
        path = ROOT / "tests" / file
        assert path.is_file(), one
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert any(name.startswith("test_") for name in functions)
        assert not function or function in functions, one
    for quoted in re.findall(r"`([^`]+)`", here):
        for word in quoted.split():
            if re.fullmatch(r"(scripts|examples|configs|docs)/[\w/.-]+", word):
                assert (ROOT / word).exists(), word


def test_all_four_are_there_and_the_readme_leads_to_them() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert headings == ["OSDP, 2022", "ODC", "Tiny-FSDP", "The FSDP tutorial"]
    assert len(ROWS) > 40
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    readme = (ROOT / "README.md").read_text()
    assert all(f"docs/from-the-seeds.md#{anchor})" in readme for anchor in anchors)


def test_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
