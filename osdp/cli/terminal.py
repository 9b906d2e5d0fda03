"""The terminal: where reports go, and the progress bar."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import IO, TYPE_CHECKING, Any, TextIO

from osdp.plain_text import plain

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text

    from planner.problem import Progress

STARTED_S = time.perf_counter()
"""When the command line was loaded; what "since start" counts from."""
PLAIN_WIDTH = 100
"""Columns where stdout is no terminal."""
NARROWEST, WIDEST = 60, 1000
"""Columns of a report, whatever the environment variable COLUMNS says."""
WORD, GAP = 8, 2
"""Columns that text which may be broken has at least in a table, and those between two of a table's columns."""
_TRAILING_BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)
_is_quiet = False


def set_quiet(quiet: bool) -> None:
    """Have notes and the progress bar left out from now on, or shown; warnings and errors are shown in any case."""
    global _is_quiet
    _is_quiet = quiet


def say(text: str, file: TextIO | None = None) -> None:
    """Print a message on stderr, where it is no part of the report."""
    print(f"osdp: {plain(text)}", file=file or sys.stderr)


def note(text: str) -> None:
    """Likewise, what is neither a warning nor an error."""
    if not _is_quiet:
        say(f"note: {text}")


class _WithoutTrailingBlanks:
    """A file that leaves out the blanks at the ends of lines: tables fill their last column with them."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write whole lines; rich writes nothing else."""
        self._file.write(_TRAILING_BLANKS.sub("", text))
        return len(text)


def make_console() -> Console:
    """Return the console for reports, on stdout; what it prints is taken literally, see `osdp.plain_text`.

    Styles are for terminals, without colours if the environment variable NO_COLOR is set.
    """
    from rich.console import Console

    class ReportConsole(Console):
        def on_broken_pipe(self) -> None:
            """Leave it to `osdp.cli.exits`; rich would end the process."""
            raise BrokenPipeError

        def render_str(self, text: str, **style: Any) -> Text:
            """Every text comes by here, be it a line or in a table."""
            return super().render_str(plain(text), **style)

    file: Any = sys.stdout if sys.stdout.isatty() else _WithoutTrailingBlanks(sys.stdout)
    return ReportConsole(file=file, width=columns(), markup=False, highlight=False, emoji=False)


def columns() -> int:
    """Return the width of reports: what COLUMNS says, or the terminal. Zero and what is no number say nothing."""
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns))


def show(as_json: bool, to_object: Callable[..., Any], to_report: Callable[..., None], *found: Any) -> None:
    """Print what was found, as one JSON object or as a report."""
    if as_json:
        print_json(to_object(*found))
    else:
        to_report(make_console(), *found)


def print_json(found: dict[str, Any]) -> None:
    """Print plain data as one JSON object."""
    print(json.dumps(found, indent=2, allow_nan=False))


def make_table(*columns: str) -> Table:
    """Return an empty table; `>` before a column's name is for numbers, `=` for text that is never broken."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: JustifyMethod = "right" if column[:1] == ">" else "left"
        table.add_column(column.lstrip(">="), justify=justify, overflow="fold", no_wrap=column[:1] in (">", "="))
    return table


def print_section(console: Console, title: str, *content: Table | str) -> None:
    """Print a headline, what is under it, and an empty line."""
    console.print(title, style="bold")
    for item in content:
        if isinstance(item, str):
            console.print(item)
        else:
            print_table(console, item)
    console.print()


def print_table(console: Console, table: Table) -> None:
    """Print a table; one whose figures have no room is wider than the console: none of them is cut or left out."""
    if (needed := _columns_needed(console, table)) > console.width:
        table.width = needed
    console.print(table, crop=False)


def _columns_needed(console: Console, table: Table) -> int:
    """Return how wide a table is at least: columns of numbers whole, and a word of each of the others."""
    from rich.measure import Measurement

    needed, options = GAP * (len(table.columns) - 1), console.options.update(max_width=WIDEST)
    for column in table.columns:
        cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        needed += max(cell.maximum if column.no_wrap else min(cell.minimum, WORD) for cell in cells)
    return needed


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show progress on stderr if that is a terminal; meanwhile what others print to stdout goes there too.

    A user's model may print as it is built, and stdout is for the report.
    """
    with redirect_stdout(sys.stderr):
        if _is_quiet or not sys.stderr.isatty():
            yield lambda what, fraction: None
            return
        from rich import progress
        from rich.console import Console

        parts = progress.TextColumn("{task.description}", markup=False), progress.BarColumn()
        console = Console(stderr=True, width=columns())
        with progress.Progress(*parts, progress.TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("starting", total=1.0)
            yield lambda what, fraction: bar.update(task, description=plain(what), completed=fraction)
