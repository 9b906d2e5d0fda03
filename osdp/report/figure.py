"""What the pictures share: plotly's figures as plain data, their colours, and the text of what is pointed at.

Colours of text, grid and background are the page's, which follow the reader's light or dark scheme (`page.js`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a600", "#8c6bb1", "#8a8a8a")
"""Those of Okabe and Ito, which people who are colour-blind tell apart, and three more."""

IN_COLOUR_OF_TEXT = "text"
"""What `meta` of a trace says whose lines and bars the page's script colours as its text."""
HATCHED = {"fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.75}
"""How bars are hatched: white on their own colour."""


@dataclass(frozen=True)
class Figure:
    """A figure for plotly.js."""

    traces: list[dict[str, Any]]
    layout: dict[str, Any]

    @property
    def plain(self) -> dict[str, Any]:
        """The figure under plotly's names."""
        return {"data": self.traces, "layout": self.layout}


def hover_text(lines: Iterable[str]) -> str:
    """Return lines as plotly shows them; names of the model are text, whatever they look like."""
    return "<br>".join(escape(line, quote=False) for line in lines if line)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, in the order in which they come first."""
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(dict.fromkeys(names))}
