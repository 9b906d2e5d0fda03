"""How often a model asks for what depends on data: where only data ends a loop, a trace would never end it.

The answers are the same each time, and a check that raises where the loop is to end is assumed to hold (`data_checks`).
"""

from __future__ import annotations

from collections import Counter

from profiler.trace.data_checks import asked_at

MOST_QUESTIONS = 5_000
"""Of a module in a forward and backward; routers ask once or a few times per expert."""


class AskedForeverError(BaseException):
    """The model asks again and again; no `except Exception` of its own is to end the loop."""


class Questions:
    """Counts those of a forward and backward; before the first one may ask as often as one likes."""

    def __init__(self) -> None:
        self._asked: Counter[str] | None = None
        """By module."""

    def begin(self) -> None:
        """Begin a forward."""
        self._asked = Counter()

    def count(self, module: str) -> None:
        """Count a question of the module at this path.  Raises AskedForeverError."""
        if self._asked is not None:
            self._asked[module] += 1
            if self._asked[module] > MOST_QUESTIONS:
                what = f"more than {MOST_QUESTIONS} questions of what depends on data"
                raise AskedForeverError(f"{what}, as in a loop that only data ends, the last at {asked_at()}")
