"""Records which random numbers a program would have drawn, while it draws none.

A recording runs on the meta device, where random ops leave their generator alone. What a program does
to a generator by hand (`manual_seed`, `fork_rng`, `set_state`) must show all the same. So every draw
puts the generator into a state of its own, a *mark*: at the next draw

    the latest mark       means that the stream simply goes on,
    an earlier mark       that the program went back to the state that it had there,
    any other state       that the program seeded the generator or set its state.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_MARK = 0x05D9_0DE4_17A3_0000
"""Seed of the first mark; the next ones count up. Any number does that programs do not use as a seed."""


@dataclass(frozen=True)
class Draw:
    """One use of a generator, in the order of the program."""

    generator: torch.Generator
    """What is drawn from; on the CPU."""
    position: int
    """Number of earlier draws from this generator."""
    jump: Tensor | int | None = None
    """What the program did to the generator just before: set this state, or the state that it had at
    the draw of this position; None: nothing."""


class RandomLog:
    """Makes the draws of a recording."""

    def __init__(self) -> None:
        self._originals: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._positions: dict[int, int] = {}
        self._marks: dict[tuple[int, bytes], int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the generators within; afterwards they are as if nothing had happened."""
        self._remember(torch.default_generator)
        self._mark(torch.default_generator)
        try:
            yield
        finally:
            for generator, state in self._originals.values():
                generator.set_state(state)

    def draw(self, generator: torch.Generator) -> Draw:
        """Return the use of a generator that a random op makes now."""
        self._remember(generator)
        now = self.look(generator)
        self._positions[id(generator)] += 1
        self._mark(generator)
        return now

    def look(self, generator: torch.Generator) -> Draw:
        """Return where a generator stands, without using it."""
        state = generator.get_state()
        position = self._positions[id(generator)]
        known = self._marks.get((id(generator), _bytes(state)))
        return Draw(generator, position, None if known == position else state if known is None else known)

    def _remember(self, generator: torch.Generator) -> None:
        # Held, so that no other generator gets the same id.
        self._originals.setdefault(id(generator), (generator, generator.get_state()))
        self._positions.setdefault(id(generator), 0)

    def _mark(self, generator: torch.Generator) -> None:
        generator.manual_seed(_FIRST_MARK + len(self._marks))
        self._marks[id(generator), _bytes(generator.get_state())] = self._positions[id(generator)]


class RandomReplay:
    """Brings the generators where the program had them, draw by draw."""

    def __init__(self, draws: Iterable[Draw]) -> None:
        self._wanted = {(id(draw.generator), draw.jump) for draw in draws if isinstance(draw.jump, int)}
        self._states: dict[tuple[int, int], Tensor] = {}

    def arrive(self, draw: Draw) -> None:
        """Do what the program did to the generator just before a draw."""
        generator, jump = draw.generator, draw.jump
        if (id(generator), draw.position) in self._wanted:
            self._states[id(generator), draw.position] = generator.get_state()
        if isinstance(jump, int):
            generator.set_state(self._states[id(generator), jump])
        elif jump is not None:
            generator.set_state(jump)


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()
