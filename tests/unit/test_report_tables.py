"""Tables of reports at any width of the terminal: every figure is there, whole and on one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp.cli.terminal import NARROWEST, make_console, make_table, print_section

WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=12), min_size=1, max_size=6).map(" ".join)
FIGURES = st.text("0123456789.", min_size=1, max_size=14).map(lambda number: f"{number} us")


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    """Return the columns of a table, of which `>` and `=` begin those that are never broken, and its rows."""
    kinds = draw(st.lists(st.sampled_from((">", "=", "")), min_size=1, max_size=9))
    columns = [f"{kind}{number} {draw(WORDS)}" for number, kind in enumerate(kinds)]
    cells = {">": FIGURES, "=": WORDS, "": WORDS}
    rows = [[draw(cells[kind]) for kind in kinds] for _ in range(draw(st.integers(1, 3)))]
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
def test_no_figure_is_cut_or_left_out(drawn: tuple[list[str], list[list[str]]], width: int) -> None:
    columns, rows = drawn
    lines = printed(width, columns, rows)
    for place, column in enumerate(columns):
        if column[0] in "=>":
            for text in (column[1:], *(row[place] for row in rows)):
                assert any(text in line for line in lines), (text, lines)
        else:  # what may be broken is there letter by letter
            shown = "".join(lines)
            for row in rows:
                assert set(row[place]) <= set(shown) | {" "}


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
