"""How much a test draws: enough for every change, or with `sh scripts/test.sh --thorough` all there is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

VARIABLE = "OSDP_TEST_THOROUGH"
"""Environment variable that tests/conftest.py sets for the option."""
THOROUGH = VARIABLE in os.environ
FEW_STEPS, MANY_STEPS = 2, 3
STEPS = MANY_STEPS if THOROUGH else FEW_STEPS
"""Of a training that is compared with one process: the second step follows an update, and has moments."""
DRAW = "OSDP_TEST_DRAW"
"""Environment variable that tests/conftest.py sets to the one draw that `--draw` asks for."""


def be_thorough() -> None:
    """Draw all there is, in this process and those that it starts, before tests are imported."""
    global THOROUGH, STEPS
    os.environ[VARIABLE], THOROUGH, STEPS = "1", True, MANY_STEPS


def some(items: Sequence[Item], share: int, first: int = 0) -> list[Item]:
    """Return every item if thorough, else every `share`-th from `first` on; where they have turns, all have one."""
    return list(items if THOROUGH else items[first % share :: share])


def draws(count: int, thorough: int | None = None) -> int:
    """Return how many examples to draw where `count` are enough for every change; thorough, ten times that."""
    return (thorough or 10 * count) if THOROUGH else count


def drawn_numbers(first: int, count: int, thorough: int | None = None) -> list[int]:
    """Return the numbers of the draws to make: the one that is asked for, or so many where they are enough.

    Beyond those of every change, thorough draws cost a second each; there are by default 90 times as many.
    """
    if DRAW in os.environ:
        number = int(os.environ[DRAW])
        return [number] if first <= number < first + 100_000 else []
    return list(range(first, first + ((thorough or 90 * count) if THOROUGH else count)))
