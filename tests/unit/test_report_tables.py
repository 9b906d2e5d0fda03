"""Tables of reports at any width of the terminal: every figure is there, whole and on one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from osdp.cli import terminal
from osdp.cli.terminal import NARROWEST, make_console, make_table, print_section

LETTERS = "abcdefghijklmnopqrstuvwxyz"
Drawn = tuple[list[str], list[list[str]]]


def words(letters: str) -> st.SearchStrategy[str]:
    """Draw a few words of these letters."""
    return st.lists(st.text(letters, min_size=1, max_size=12), min_size=1, max_size=6).map(" ".join)


FIGURES = st.text("0123456789.", min_size=1, max_size=14).map(lambda number: f"{number} us")


@st.composite
def tables(draw: st.DrawFn) -> Drawn:
    """Return the columns of a table, of which `>` and `=` begin those that are never broken, and its rows.

    Text that may be broken has two letters of its own in every column.
    """
    kinds = draw(st.lists(st.sampled_from((">", "=", "")), min_size=1, max_size=9))
    own = [LETTERS[2 * place : 2 * place + 2] for place in range(len(kinds))]
    columns = [f"{kind}{place} {draw(words('XYZ'))}" for place, kind in enumerate(kinds)]
    rows = [
        [draw(FIGURES if kind == ">" else words(letters)) for kind, letters in zip(kinds, own, strict=True)]
        for _ in range(draw(st.integers(1, 3)))
    ]
    return columns, rows


def printed(width: int, columns: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table on a terminal of that width."""
    table = make_table(*columns)
    for row in rows:
        table.add_row(*row)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(width))
        console = make_console()
    with console.capture() as captured:
        print_section(console, "title", table)
    return captured.get().splitlines()[1:]


@given(tables(), st.integers(NARROWEST, 160))
@example((["=path", ">time"], [["a" * 70, "1.0 us"]]), 60)  # wider than the terminal by itself
def test_no_figure_is_cut_or_left_out(drawn: Drawn, width: int) -> None:
    columns, rows = drawn
    lines = printed(width, columns, rows)
    for place, column in enumerate(columns):
        cells = [row[place] for row in rows]
        if column[0] in "=>":
            for text in (column[1:], *cells):
                assert any(text in line for line in lines), (text, lines)
        else:  # all letters are there, in their order
            own = LETTERS[2 * place : 2 * place + 2]
            shown = "".join(letter for line in lines for letter in line if letter in own)
            assert shown == "".join(cells).replace(" ", "")


def test_collectives_keep_their_last_column_at_80_columns() -> None:
    columns = ["=collective", ">latency", ">bandwidth", ">64 KiB", ">1 MiB", ">16 MiB", "fit"]
    row = ["ring reduce-scatter, 2 ranks", "999.9 us", "12.3 GB/s", "123.4 us", "123.4 us", "123.4 ms", "12%, 3"]
    heading, _, *lines = printed(80, columns, [row])
    assert heading.split()[-1] == "fit"
    assert all(cell in lines[0] for cell in row[:-1])
    assert "12%, 3" in " ".join(line.split("ms")[-1].strip() for line in lines)


def test_a_table_that_has_room_is_as_wide_as_the_terminal_at_most() -> None:
    rows = [["a long description of a model, in many words, more than there is room for in one line", "1.0 us"]]
    assert max(map(len, printed(60, ["description", ">time"], rows))) <= 60


@pytest.mark.parametrize("width", [69, 70, 71])
def test_a_table_of_just_the_width_is_printed_as_it_is(width: int) -> None:
    """60 letters, a gap of 2 and 8 letters: no line is wider than the table."""
    lines = printed(width, ["=name", ">time"], [["n" * 60, "12345 us"]])
    assert max(map(len, lines)) == 70


def test_every_report_prints_its_tables_so() -> None:
    reports = Path(terminal.__file__).parent / "reports"
    direct = [
        file.name for file in reports.glob("*.py") if re.search(r"console\.print\(\w*table\w*\)", file.read_text())
    ]
    assert direct == []
