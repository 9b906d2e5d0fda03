"""Local search on a decoded plan.

The integer program counts options and ignores which stages are neighbours.  Two moves make up for that:
swap the options of two stages of one class, and give one stage another option.  A move is tried if it
shortens the step (only its neighbours' overlap changes) and kept if the plan still fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from planner.cost.peak_memory import peak_memory
from planner.search.lagrangian_bound import ChainBound, MemoryEvent, events_near
from planner.search.search_space import CandidateSet

MAX_PASSES = 6
"""Passes over all moves; on the models of the zoo the third already finds none."""
HIGHEST_PRICE = 64.0
"""Top of the price range, in steps' time for the whole limit."""
PRICE_STEPS = 18
"""Halvings of the price range."""
REACH = 50
"""How far apart two stages may be to be swapped: more pairs cost time and never helped."""


class LocalSearch:
    """Improves one plan of a candidate set."""

    def __init__(self, candidates: CandidateSet, limit_bytes: float, chain: ChainBound | None = None) -> None:
        self.candidates, self.limit_bytes = candidates, limit_bytes
        self.chain = chain or ChainBound(candidates)

    def around_s(self, picks: list[int], stages: Iterable[int]) -> float:
        """Return the seconds of the given stages and of their neighbours."""
        last = len(picks) - 1
        seen = {i for p in stages for i in (p - 1, p, p + 1) if 0 <= i <= last}
        return sum(self.chain.stage_s(picks, i) for i in seen)

    def moves(self, picks: list[int]) -> Iterator[dict[int, int]]:
        """Yield moves as {stage: new option}, for `picks` as they are when the move is asked for."""
        classes = self.candidates.stage_classes
        for i, stage_class in enumerate(classes):
            for option in range(len(self.candidates.options[stage_class])):
                if picks[i] != option:
                    yield {i: option}
            for j in range(i + 1, min(len(classes), i + 1 + REACH)):
                if classes[j] == stage_class and picks[i] != picks[j]:
                    yield {i: picks[j], j: picks[i]}

    def improve(self, picks: tuple[int, ...]) -> tuple[int, ...]:
        """Return picks at least as fast that still fit."""
        current = list(picks)
        self._watch_peak(current)
        for _ in range(MAX_PASSES):
            improved = False
            for move in self.moves(current):
                if self._held(move) - self._held({i: current[i] for i in move}) > self.room_bytes:
                    continue
                before_s = self.around_s(current, move)
                changed = [move.get(i, pick) for i, pick in enumerate(current)]
                if self.around_s(changed, move) < before_s * (1 - 1e-9) and self.fits(changed):
                    current[:], improved = changed, True
                    self._watch_peak(current)
            if not improved:
                break
        return tuple(current)

    def _watch_peak(self, picks: list[int]) -> None:
        """Record the peak and the memory left there: a move that needs more cannot fit."""
        peak = peak_memory(self.candidates.picked(picks), self.candidates.load)
        self.held: list[list[float]] = []
        self.room_bytes = 0.0
        if peak.phase == "forward":
            return  # Rarely the peak, and not an event that can be priced.
        events = [event for event in events_near(self.candidates, peak.stage) if event.stage == peak.stage]
        rows = [self.chain.memory(event) for event in events]
        held = [sum(row[pick] for row, pick in zip(memory, picks, strict=True)) for memory in rows]
        top = int(np.argmax(held))
        self.held = [row.tolist() for row in rows[top]]
        self.room_bytes = self.limit_bytes - self.candidates.load.fixed_bytes - held[top]

    def _held(self, move: Mapping[int, int]) -> float:
        return sum(self.held[i][pick] for i, pick in move.items()) if self.held else 0.0

    def cheapest_fitting(self, event: MemoryEvent) -> tuple[int, ...] | None:
        """Return the sequence that fits at the lowest price of memory at one event, by bisection.

        Where no two stages are alike this is close to the best plan; where many are, they all change
        at the same price and the integer program does better.
        """
        memory, chain = self.chain.memory(event), self.chain
        low, high = 0.0, HIGHEST_PRICE * chain.free_s / self.limit_bytes
        best = None
        for _ in range(PRICE_STEPS):
            price = (low + high) / 2
            picks = chain.sequence(memory, price)
            if self.fits(picks):
                best, high = picks, price
            else:
                low = price
        return best

    def fits(self, picks: Sequence[int]) -> bool:
        """Return whether a plan is within the limit."""
        return peak_memory(self.candidates.picked(picks), self.candidates.load).total_bytes <= self.limit_bytes
