"""Random numbers of Python and numpy in a trace: the same in every pass, or all at one end of their range.

A forward that decides by them which layers run would else differ from pass to pass.  With all draws low, and all high,
it shows what it may leave out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

BELOW_ONE = 1 - 2.0**-24
"""The largest number of `torch.rand`."""
_RANGES = ((random, "uniform"), (np.random, "uniform"))
_UNITS = ((random, "random"), (np.random, "rand"), (np.random, "random"), (np.random, "random_sample"))


class PythonDraws:
    """What a pass drew."""

    def __init__(self) -> None:
        self.drew = False


@contextmanager
def python_draws(end: float | None) -> Iterator[PythonDraws]:
    """Seed the generators of Python and numpy, and put them back at the end.

    `end`: where in their range numbers are, from 0 to 1; None: as the generators draw them.
    """
    draws, before = PythonDraws(), (random.getstate(), np.random.get_state())
    random.seed(0)
    np.random.seed(0)
    seeded = random.getstate(), np.random.get_state()
    try:
        with ExitStack() as patches:
            if end is not None:
                for module, name in (*_RANGES, *_UNITS):
                    made = _at(end, getattr(module, name), draws, is_range=(module, name) in _RANGES)
                    patches.enter_context(patch.object(module, name, made))
            yield draws
        draws.drew |= random.getstate() != seeded[0] or _position(np.random.get_state()) != _position(seeded[1])
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _position(state: Any) -> tuple[Any, ...]:
    return (state[1].tobytes(), *state[2:])


def _at(end: float, draw: Callable[..., Any], draws: PythonDraws, *, is_range: bool) -> Callable[..., Any]:
    """Return a function that draws, and returns what is at `end` of the range, in the form of what was drawn."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        draws.drew, found = True, draw(*args, **kwargs)
        low, high = (*args, 0.0, 1.0)[:2] if is_range and len(args) > 1 else (0.0, 1.0)
        low, high = kwargs.get("low", low), kwargs.get("high", high)
        return found * 0 + low + end * (high - low)

    return drawn
