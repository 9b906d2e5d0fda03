"""Random numbers of Python and numpy in a trace: the same in every pass, other ones, or all at one end of their range.

A forward that decides by them which layers run would else differ from pass to pass.  With other seeds, and with all
draws low and all high, it shows what it may leave out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

LOWEST, HIGHEST = 2.0**-24, 1 - 2.0**-24
"""The ends of a range from 0 to 1; 0 itself is what loops wait not to draw."""
MOST_FORCED = 1000
"""So many draws of a forward are at an end; then others follow, as a loop may wait for one."""
_FUNCTIONS = [(random, name) for name in ("random", "uniform")]
_FUNCTIONS += [(np.random, name) for name in ("rand", "random", "random_sample", "uniform")]


@dataclass(frozen=True)
class Draws:
    """How a forward draws."""

    seed: int = 0
    at: float | None = None
    """Where in their range single numbers are, from 0 to 1; None: as the generators draw them."""


SAME = Draws()
OTHERS = (Draws(at=LOWEST), Draws(at=HIGHEST), *map(Draws, range(1, 7)))
"""What shows whether draws decide anything: six other seeds miss a choice of one in two layers once in 64 times."""


class Drawn:
    """What a forward drew."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def python_draws(draws: Draws) -> Iterator[Drawn]:
    """Seed the generators of Python and numpy, and put them back at the end."""
    drawn, before = Drawn(), (random.getstate(), np.random.get_state())
    random.seed(draws.seed)
    np.random.seed(draws.seed)
    seeded = random.getstate(), np.random.get_state()
    try:
        with ExitStack() as patches:
            for module, name in _FUNCTIONS if draws.at is not None else ():
                made = _at(draws.at or 0.0, getattr(module, name), drawn, is_range=name == "uniform")
                patches.enter_context(patch.object(module, name, made))
            yield drawn
        drawn.count += random.getstate() != seeded[0] or _position(np.random.get_state()) != _position(seeded[1])
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _position(state: Any) -> tuple[Any, ...]:
    return (state[1].tobytes(), *state[2:])


def _at(end: float, draw: Callable[..., Any], drawn: Drawn, *, is_range: bool) -> Callable[..., Any]:
    """Return a function that draws, and returns what is at `end` of the range, in the form of what was drawn."""

    def made(*args: Any, **kwargs: Any) -> Any:
        found = draw(*args, **kwargs)
        drawn.count += 1
        if drawn.count > MOST_FORCED:
            return found
        low, high = 0.0, 1.0
        if is_range:
            given = {**dict(zip(("low", "high"), args, strict=False)), **kwargs}
            low, high = given.get("low", given.get("a", low)), given.get("high", given.get("b", high))
        return found * 0 + low + end * (high - low)

    return made
