"""A lower bound on the step time of every plan of a candidate set that fits: it makes the gap certified.

Give every byte above the limit at some moment of the step a price lambda >= 0.  Then

    L(lambda) = min over all sequences of options of  time + lambda * (memory at the moment - limit)

is at most the time of any plan that fits (weak Lagrangian duality; Everett 1963).  The time is a
sum over stages of terms that depend on one neighbour on each side (`planner.cost.step_time`), and the memory at
a fixed moment is a sum over stages, so dynamic programming over the chain finds the minimum exactly,
over all orders of options:

    W_i(state) = min over options k and faces u' with that state of
                     base_s(k, u') + lambda bytes(k) + V_(i+1)(u', downward face of k)
    V_i(u, d)  = min over states with upward face u of  W_i(state) + more_s(state, d)

in the words of `planner.solve.overlap_states`.  Above a moment that sees the last reduction there is a second table, of
the stages that end in quiet ones (`planner.solve.stage_bytes`): k is either the last to reduce, with V above it, or
quiet, with the second table above it.  L is concave; `ChainBound.bound` maximises it over lambda, and over moments
takes the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_memory import Sees
from planner.options.candidate_set import CandidateSet
from planner.options.event_bytes import OPTIMIZER, EventBytes
from planner.solve.overlap_states import INNER, UPWARD, OverlapStates, edges_s, faces_of
from planner.solve.stage_bytes import StageBytes, payments

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
StageContext = tuple[int | None, int, int | None]
"""Classes of a stage and of its neighbours: above, its own, below; None: the end of the chain."""

TOLERANCE = 1e-5
"""Relative loss of the bound that is accepted for stopping within a run of equal stages."""
JOINT_PRICES = (-1.0, -0.6, -0.3, 0.0, 0.4, 1.2), (-0.15, 0.0, 0.15)
"""Steps by which prices at several moments are changed together, in one good price, and then again."""
NEAR = 0.6, 1.0, 1.7
"""Multiples of a price that is good at one moment, of which one is good at another."""
FAR_ABOVE = 2
"""In place of how many stages another is above that of a moment, where all further ones are alike."""
WIDTHS = 1.0, 1 / 3, 1 / 9
"""Powers of two that grids of prices reach to both sides of the best so far, each three times finer than the last."""


@dataclass(frozen=True)
class MemoryEvent:
    """A moment at which memory is priced: in the backward of a stage, or the optimizer step (None)."""

    stage: int | None
    sees: Sees | None = None
    """What the moment sees, the highest of the stage that does."""


class ChainBound:
    """The dynamic program for one candidate set."""

    def __init__(self, candidates: CandidateSet) -> None:
        self.candidates, self.load = candidates, candidates.load
        self.faces = [faces_of(columns.terms) for columns in candidates.columns]
        self._duals: dict[tuple[float, MemoryEvent], tuple[float, float]] = {}
        faces, load, columns = self.faces, self.load, candidates.columns  # not `self`: chains are large, and many

        @cache
        def table(above: int | None, stage_class: int, below: int | None) -> Array:
            """Return the edge terms of a class between two others (None: the end of the chain)."""
            upward = np.zeros((1, 3)) if above is None else faces[above].upward
            downward = np.zeros(1) if below is None else faces[below].downward
            return edges_s(faces[stage_class], upward, downward, load)

        @cache
        def held(stage_class: int, relation: int, sees: Sees | None, in_forward: bool) -> Array:
            return of_class(stage_class).at(relation, sees, in_forward)

        @cache
        def free(stage_class: int, relation: int, sees: Sees | None, in_forward: bool) -> StageBytes:
            return StageBytes(held(stage_class, relation, sees, in_forward))

        @cache
        def above(stage_class: int) -> StageBytes:
            options = columns[stage_class]
            return StageBytes.above(held(stage_class, FAR_ABOVE, None, False), options.reduces, options.reduce_input)

        of_class = cache(lambda stage_class: EventBytes(columns[stage_class], load))
        self.table, self._held, self._free, self._above = table, held, free, above

    @cached_property
    def on_owners(self) -> tuple[ChainBound, ...]:
        """The programs for the same options on ranks that own something."""
        return tuple(map(ChainBound, self.candidates.on_owners))

    @property
    def on_ranks(self) -> tuple[ChainBound, ...]:
        """The program itself, and those of owners: no plan is faster or smaller than any of them says."""
        return self, *self.on_owners

    @cached_property
    def contexts(self) -> list[StageContext]:
        """Of every stage."""
        ends: tuple[Any, ...] = (None, *self.candidates.stage_classes, None)
        return [(above, own, below) for below, own, above in zip(ends[:-2], ends[1:-1], ends[2:], strict=True)]

    @cached_property
    def states(self) -> list[OverlapStates]:
        """Of every stage; stages between equal neighbours share them."""
        of_context = {
            context: OverlapStates.of_stage(self.faces[context[1]], self.alone_s(context), self.table(*context))
            for context in dict.fromkeys(self.contexts)
        }
        return [of_context[context] for context in self.contexts]

    def alone_s(self, context: StageContext) -> Array:
        """Return the seconds of each option of a stage that depend on no neighbour, at the ends of the chain too."""
        (above, stage_class, below), repeats = context, self.load.accumulation
        faces = self.faces[stage_class]
        alone: Array = faces.windows[:, INNER]
        if above is None:
            alone = alone + repeats * faces.turn_s
        if below is None:
            ends = faces.windows[:, UPWARD]
            alone = alone + repeats * (ends[:, 0] + ends[:, 1]) + ends[:, 2]
        return alone

    def memory(self, event: MemoryEvent) -> list[Array]:
        """Return, for each stage, the bytes of each option at a moment, without the input of a reduction that lives on
        past a stage that reduces nothing."""
        return [self._held(*place) for place in self._places(event)]

    def near_memory(self, event: MemoryEvent) -> list[tuple[int, Array]]:
        """Return the stages near that of a moment in the backward, and what `memory` says of them."""
        assert event.stage is not None
        near = range(max(0, event.stage - FAR_ABOVE + 1), event.stage + FAR_ABOVE)
        classes = self.candidates.stage_classes
        return [(i, self._held(classes[i], i - event.stage, event.sees, False)) for i in near if i < len(classes)]

    def far_memory(self, relation: int) -> list[Array]:
        """Return what `memory` says of each stage at moments in the backward of stages far below or above it."""
        return [self._held(stage_class, relation, None, False) for stage_class in self.candidates.stage_classes]

    def stage_bytes(self, event: MemoryEvent) -> list[StageBytes]:
        """Return, for each stage, the bytes of each option at a moment."""
        rows = [self._free(*place) for place in self._places(event)]
        if event.stage is not None and event.sees is not None and event.sees[1].above:
            for index in range(event.stage + 1, len(rows)):
                rows[index] = self._above(self.candidates.stage_classes[index])
                if rows[index].quiet is None:
                    break
        return rows

    def _places(self, event: MemoryEvent) -> Iterator[tuple[int, int, Sees | None, bool]]:
        """Yield, for each stage, what its bytes at a moment depend on: its class, where it is, what the moment sees."""
        in_forward = event.sees is not None and event.sees[0]
        for index, stage_class in enumerate(self.candidates.stage_classes):
            # For stages further away only the side counts.
            relation = OPTIMIZER if event.stage is None else max(-FAR_ABOVE, min(FAR_ABOVE, index - event.stage))
            yield stage_class, relation, event.sees if abs(relation) < FAR_ABOVE else None, in_forward

    def least(self, memory: Sequence[StageBytes], prices: Array) -> Array:
        """Return min over sequences of time + price * memory, for each price, shape of `prices`.

        Within a run of equal stages each adds the same to every V(u, d), except near the ends of the run.  So once V
        has grown by nearly the same everywhere, the rest of the run is extrapolated with the least growth: if
        V_i >= V_(i+1) + c everywhere then V_(i-n) >= V_i + n c, as minima and sums preserve the order.  The result is a
        lower bound, and off by at most `TOLERANCE`.
        """
        return self._least_paid(payments([memory], prices[:, None]))

    def _least_paid(self, paid: Sequence[StageBytes]) -> Array:
        """Return `least`, given what each stage's options pay for memory, shape (prices, options)."""
        value: Array | None = None
        quiet: Array | None = None
        """V where the stages above end in quiet ones."""
        index, alike = len(self.candidates.stage_classes) - 1, self._alike_below(paid)
        while index >= 0:
            before, states, row = (value, quiet), self.states[index], paid[index]
            ends: Array | None = None
            if row.last is not None:
                ends = states.least_below(value, row.last)
                if row.quiet is not None and (quiet is not None or value is None):
                    ends = np.minimum(ends, states.least_below(quiet, row.quiet))
            # At the stage of the moment those above have ended in quiet ones.
            value = states.least_below(value if quiet is None or row.last is not None else quiet, row.free)
            quiet = ends
            index -= 1
            rest = alike[index + 1]
            if rest and (growth := growth_of((value, quiet), before)) is not None:
                least, most = growth.min(axis=1), growth.max(axis=1)
                if (rest * (most - least) <= TOLERANCE * value.min(axis=(1, 2))).all():
                    value = value + (rest * least)[:, None, None]
                    quiet = None if quiet is None else quiet + (rest * least)[:, None, None]
                    index -= rest
        assert value is not None, "a model has at least one stage"
        total: Array = value[:, :, 0].min(axis=1) + self.candidates.owned_s
        return total

    def _alike_below(self, memory: Sequence[StageBytes]) -> list[int]:
        """Return, for each stage, how many stages directly below it add the same to V as it does."""
        rules = [(context, id(rows)) for context, rows in zip(self.contexts, memory, strict=True)]
        found: list[int] = []
        for index, rule in enumerate(rules):
            found.append(found[-1] + 1 if index and rule == rules[index - 1] else 0)
        return found

    def sequence(self, memory: Sequence[Array], price: float) -> tuple[int, ...]:
        """Return, for each stage, the option of a sequence that attains `least` at one price."""
        value: Array | None = None
        costs, least = dict[int, Array](), dict[int, Array]()
        for index in reversed(range(len(self.states))):
            states, paid_s = self.states[index], price * memory[index][None]
            costs[index] = states.base_s + paid_s[0, :, None]
            if value is not None:
                costs[index] += value[0][:, states.downward_of].T
            of_state = states.least_by_state(value, paid_s)
            value, least[index] = states.least_by_face(of_state), of_state[0]
        picks, seen, below = list[int](), None, 0  # the upward face that the pick below is priced with, and its face
        for index, states in enumerate(self.states):
            ends = least[index] + states.more_s[:, below]
            state = int(np.argmin(ends if seen is None else np.where(states.upward == seen, ends, np.inf)))
            cost = np.where(states.of == state, costs[index], np.inf)
            pick, seen = map(int, np.unravel_index(np.argmin(cost), cost.shape))
            picks.append(pick)
            below = int(states.downward_of[pick])
        return tuple(picks)

    def least_bytes(self, event: MemoryEvent) -> float:
        """Return a lower bound on what any plan holds at a moment, reserve included."""
        rows = self.memory(event)
        least = {id(row): float(row.min()) for row in {id(row): row for row in rows}.values()}
        return sum(least[id(row)] for row in rows) + self.candidates.fixed_bytes

    def joint_prices(self, memory: Sequence[Sequence[StageBytes]], price: float, room_bytes: float) -> list[float]:
        """Return prices of a byte at several moments that together give a good bound, the first near `price`.

        Only the last of them may be one that sees the last reduction.
        """
        best = np.array([price] + [0.0] * (len(memory) - 1))
        for grid in JOINT_PRICES:
            tried = [np.unique(at + price * np.array(grid)) for at in best]
            prices = np.array([each for each in product(*tried) if min(each) >= 0])
            seconds = self._least_paid(payments(memory, prices))
            best = prices[np.argmax(seconds - room_bytes * prices.sum(axis=1))]
        return [float(at) for at in best]

    def dual(self, limit_bytes: float, event: MemoryEvent) -> tuple[float, float]:
        """Return the best bound at one moment and its price, of prices of any size, each twice the one before."""
        key = limit_bytes, event
        if key not in self._duals:
            prices = self.free_s / max(limit_bytes - self.candidates.fixed_bytes, 1.0) * 2.0 ** np.arange(-7.0, 6.0)
            # The dual is concave in the price: where the lowest gains nothing over none, no higher one does.
            gains = self._dual(limit_bytes, event, prices[:1])[0] > self.free_s
            self._duals[key] = self._dual(limit_bytes, event, prices) if gains else (self.free_s, 0.0)
        return self._duals[key]

    def near(self, limit_bytes: float, event: MemoryEvent, price: float) -> tuple[float, float]:
        """Return the best bound at one moment and its price, of a few prices about a given one."""
        found = self._dual(limit_bytes, event, price * np.array(NEAR))
        # Where the price is far too high the dual is negative, and no bound at all.
        return found if found[0] > 0 else self.dual(limit_bytes, event)

    def refined(self, limit_bytes: float, event: MemoryEvent) -> tuple[float, float]:
        """Return the best bound at one moment and its price, of prices of any size, closer and closer."""
        bound = self.dual(limit_bytes, event)
        for width in WIDTHS if bound[1] else ():
            bound = max(bound, self._dual(limit_bytes, event, bound[1] * 2.0 ** np.linspace(-width, width, 7)))
        return bound

    def _dual(self, limit_bytes: float, event: MemoryEvent, prices: Array) -> tuple[float, float]:
        """Return the best bound at one moment, and which of the prices of a byte gives it."""
        duals = self.least(self.stage_bytes(event), prices) - prices * (limit_bytes - self.candidates.fixed_bytes)
        best = int(np.argmax(duals))
        return float(duals[best]), float(prices[best])

    @cached_property
    def free_s(self) -> float:
        """Seconds of the fastest sequence if memory were free."""
        return float(self.least(self.stage_bytes(MemoryEvent(None)), np.zeros(1))[0])

    def bound(
        self, limit_bytes: float, events: Sequence[MemoryEvent], enough_s: float = float("inf")
    ) -> tuple[float, float]:
        """Return the best lower bound over the given moments, and the price of a byte that gives it (0: memory is
        ample).

        Stops as soon as the bound reaches `enough_s`.
        """
        best, best_event, price = self.free_s, None, 0.0
        for event in events:
            if best >= enough_s:
                return best, price
            # A good price at one moment is nearly right at the others.
            bound_s, at = self.near(limit_bytes, event, price) if price else self.dual(limit_bytes, event)
            if bound_s > best:
                best, best_event, price = bound_s, event, at
        return (best, price) if best_event is None else max((best, price), self.refined(limit_bytes, best_event))


def growth_of(tables: Sequence[Array | None], before: Sequence[Array | None]) -> Array | None:
    """Return by how much each number of the tables grew, shape (prices, numbers); None where they differ in shape."""
    found = list[Array]()
    for now, then in zip(tables, before, strict=True):
        if now is None and then is None:
            continue
        if now is None or then is None or now.shape != then.shape:
            return None
        found.append((now - then).reshape(len(now), -1))
    return np.concatenate(found, axis=1)


def events_near(candidates: CandidateSet, stage: int | None) -> tuple[MemoryEvent, ...]:
    """Return the moments at which memory is priced: in the given stage, in the last two, and the optimizer step."""
    count = len(candidates.stage_classes)
    stages = dict.fromkeys(s for s in (stage, count - 1, count - 2) if s is not None and 0 <= s < count)
    found: list[MemoryEvent] = []
    for s in stages:
        seen = candidates.columns[candidates.stage_classes[s]].highest
        found += [MemoryEvent(s, sees) for sees in seen if not sees[0] and (sees[1].above or sees[1].below)]
    return (*found, MemoryEvent(None))


def highest_event(candidates: CandidateSet, stage: int) -> tuple[MemoryEvent, ...]:
    """Return the moment in a stage's backward that is the highest of any option, if there is one, with the largest
    input of a reduction of the stage above."""
    classes, columns = candidates.stage_classes, candidates.columns
    above = float(columns[classes[stage + 1]].reduce_input.max()) if stage + 1 < len(classes) else 0.0
    highest = columns[classes[stage]].highest
    held = {sees: float(of.max()) + sees[1].above * above for sees, of in highest.items() if not sees[0]}
    return (MemoryEvent(stage, max(held, key=held.__getitem__)),) if held else ()
