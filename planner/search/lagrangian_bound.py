"""A lower bound on the step time of every plan of a candidate set that fits: it makes the gap certified.

Give every byte above the limit at some moment of the step a price lambda >= 0.  Then

    L(lambda) = min over all sequences of options of  time + lambda * (memory at the moment - limit)

is at most the time of any plan that fits (weak Lagrangian duality; Everett 1963).  The time is a
sum over stages of terms that depend on one neighbour on each side (`planner.cost.step_time`), and the memory at
a fixed moment is a sum over stages, so dynamic programming over the chain finds the minimum exactly,
over all orders of options:

    V_i(u, d) = min over options k of stage i with upward face u of
                price_i(k) + min over u' of V_(i+1)(u', downward face of k) + windows_k(u', d)

where the upward face of an option is what the stage above sees of it (the gather before its forward,
its reduction) and the downward face what the stage below sees (the gather before its backward).
L is concave; `ChainBound.bound` maximises it over lambda, and over moments takes the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_memory import Moment
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import OverlapTerms, overlap_terms
from planner.cost.workload import Workload
from planner.search.event_bytes import OPTIMIZER, EventBytes
from planner.search.search_space import CandidateSet

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Place = tuple[int | None, int, int | None]
"""Classes of a stage and of its neighbours: above, its own, below; None: the end of the chain."""

TOLERANCE = 1e-5
"""Relative loss of the bound that is accepted for stopping within a run of equal stages."""
ROUNDS = 4
"""Grids of prices, each three times finer than the one before."""


@dataclass(frozen=True)
class MemoryEvent:
    """A moment at which memory is priced: in the backward of a stage, or the optimizer step (None)."""

    stage: int | None
    moment: Moment | None = None
    """Any moment of the stage that sees the same neighbours."""


@dataclass(frozen=True)
class _Faces:
    """The options of one class as arrays over options k."""

    upward: Array
    """Distinct (first gather, reduce-scatter, all-reduce), one row each."""
    upward_of: Indices
    """For each option, its row in `upward`."""
    downward: Array
    """Distinct gathers before backward."""
    downward_of: Indices
    windows: Array
    """The numbers of `planner.cost.step_time.OverlapTerms`, shape (options, numbers)."""
    turn_s: Array
    """What its forward does not hide of the gather before its backward, if it is the last stage."""
    order: Indices
    """Options sorted by upward face."""
    starts: Indices
    """Where each upward face starts in `order`."""


_INNER, _FORWARD, _TOP, _TOP_GATHER, _BOTTOM, _SINGLE = (
    OverlapTerms._fields.index(name) for name in ("inner_s", "forward_s", "top_s", "top_gather_s", "bottom_s", "single")
)
_UPWARD = [OverlapTerms._fields.index(name) for name in ("first_gather_s", "reduce_s", "all_reduce_s")]
_DOWNWARD = OverlapTerms._fields.index("last_gather_s")
_BOTTOM_REDUCE, _BOTTOM_ALL_REDUCE, _TOP_COPY, _BOTTOM_COPY = (
    OverlapTerms._fields.index(name)
    for name in ("bottom_reduce_s", "bottom_all_reduce_s", "top_copy_s", "bottom_copy_s")
)


def _faces(options: Sequence[StageCandidate], load: Workload, syncs: bool) -> _Faces:
    windows = np.array([overlap_terms(option, load, syncs) for option in options], dtype=np.float64)
    upward, upward_of = np.unique(windows[:, _UPWARD], axis=0, return_inverse=True)
    downward, downward_of = np.unique(windows[:, _DOWNWARD], return_inverse=True)
    upward_of = upward_of.reshape(-1)
    order = np.argsort(upward_of, kind="stable")
    starts = np.searchsorted(upward_of[order], np.arange(len(upward)))
    turn_s = np.maximum(windows[:, _DOWNWARD] - windows[:, _FORWARD], 0.0)
    return _Faces(upward, upward_of, downward, downward_of, windows, turn_s, order, starts)


def _edges_s(faces: _Faces, above: Array, below: Array, load: Workload) -> Array:
    """Return the seconds of the terms at the edges, shape (options, faces above, faces below)."""
    numbers = faces.windows[:, :, None, None]
    gather, single = below[None, None, :], numbers[:, _SINGLE] > 0
    own_gather = np.maximum(np.where(single, gather, numbers[:, _TOP_GATHER]), numbers[:, _TOP_COPY])
    copied = numbers[:, _BOTTOM_COPY]
    total = load.accumulation * np.maximum(numbers[:, _FORWARD], above[None, :, :1])
    for last, times in load.passes:
        top = np.maximum(numbers[:, _TOP], above[None, :, 1, None] + own_gather)
        bottom = np.maximum(numbers[:, _BOTTOM], numbers[:, _BOTTOM_REDUCE] + np.maximum(gather, copied))
        if last:
            top = np.maximum(top, above[None, :, 2, None])
            bottom = np.maximum(bottom, numbers[:, _BOTTOM_ALL_REDUCE])
        total = total + times * (top + np.where(single, 0.0, bottom))
    return total


class ChainBound:
    """The dynamic program for one candidate set."""

    def __init__(self, candidates: CandidateSet) -> None:
        self.candidates, self.load = candidates, candidates.load
        self.faces = [_faces(options, self.load, candidates.syncs_each_microbatch) for options in candidates.options]
        self._duals: dict[tuple[float, MemoryEvent, int], tuple[float, float]] = {}
        faces, load, options = self.faces, self.load, candidates.options  # not `self`: chains are large, and many

        @cache
        def table(above: int | None, stage_class: int, below: int | None) -> Array:
            """Return the edge terms of a class between two others (None: the end of the chain)."""
            upward = np.zeros((1, 3)) if above is None else faces[above].upward
            downward = np.zeros(1) if below is None else faces[below].downward
            return _edges_s(faces[stage_class], upward, downward, load)

        @cache
        def held(stage_class: int, relation: int, moment: Moment | None) -> Array:
            return of_class(stage_class).at(relation, moment)

        of_class = cache(lambda stage_class: EventBytes(options[stage_class], load))
        self.table, self._held = table, held

    @cached_property
    def places(self) -> list[Place]:
        """Of every stage."""
        ends: tuple[Any, ...] = (None, *self.candidates.stage_classes, None)
        return [(above, own, below) for below, own, above in zip(ends[:-2], ends[1:-1], ends[2:], strict=True)]

    def alone_s(self, index: int) -> Array:
        """Return the seconds of each option of a stage that depend on no neighbour, at the ends of the chain too."""
        (above, stage_class, below), repeats = self.places[index], self.load.accumulation
        faces = self.faces[stage_class]
        alone: Array = faces.windows[:, _INNER]
        if above is None:
            alone = alone + repeats * faces.turn_s
        if below is None:
            ends = faces.windows[:, _UPWARD]
            alone = alone + repeats * (ends[:, 0] + ends[:, 1]) + ends[:, 2]
        return alone

    def memory(self, event: MemoryEvent) -> list[Array]:
        """Return, for each stage, the bytes of each option at a moment."""
        rows: list[Array] = []
        for index, stage_class in enumerate(self.candidates.stage_classes):
            # For stages further away only the side counts.
            relation = OPTIMIZER if event.stage is None else max(-2, min(2, index - event.stage))
            rows.append(self._held(stage_class, relation, event.moment if abs(relation) < 2 else None))
        return rows

    def least(self, memory: Sequence[Array], prices: Array) -> Array:
        """Return min over sequences of time + price * memory, for each price, shape of `prices`.

        Within a run of equal stages each adds the same to every V(u, d), except near the ends of the run.  So once V
        has grown by nearly the same everywhere, the rest of the run is extrapolated with the least growth: if
        V_i >= V_(i+1) + c everywhere then V_(i-n) >= V_i + n c, as minima and sums preserve the order.  The result is a
        lower bound, and off by at most `TOLERANCE`.
        """
        value: Array | None = None
        index, alike = len(self.candidates.stage_classes) - 1, self._alike_below(memory)
        while index >= 0:
            faces = self.faces[self.candidates.stage_classes[index]]
            costs = self._extend(index, value, memory, prices)
            before, value = value, np.minimum.reduceat(costs[:, faces.order], faces.starts, axis=1)
            index -= 1
            rest = alike[index + 1]
            if rest and before is not None and before.shape == value.shape:
                growth = value - before
                least = growth.min(axis=(1, 2))
                loss = rest * (growth.max(axis=(1, 2)) - least)
                if (loss <= TOLERANCE * value.min(axis=(1, 2))).all():
                    value = value + (rest * least)[:, None, None]
                    index -= rest
        assert value is not None, "a model has at least one stage"
        total: Array = value[:, :, 0].min(axis=1)
        return total

    def _alike_below(self, memory: Sequence[Array]) -> list[int]:
        """Return, for each stage, how many stages directly below it add the same to V as it does."""
        rules = [(place, id(rows)) for place, rows in zip(self.places, memory, strict=True)]
        found: list[int] = []
        for index, rule in enumerate(rules):
            found.append(found[-1] + 1 if index and rule == rules[index - 1] else 0)
        return found

    def _extend(self, index: int, value: Array | None, memory: Sequence[Array], prices: Array) -> Array:
        """Return the cost of this stage and all above, shape (prices, options, faces below).

        `value` is the same for the stage above, minimised to (prices, its upward faces, faces below).
        """
        place = self.places[index]
        faces, table = self.faces[place[1]], self.table(*place)
        cost = self.alone_s(index)[None] + prices[:, None] * memory[index][None]
        if value is None:
            best = np.broadcast_to(table[None, :, 0, :], (len(prices), table.shape[0], table.shape[2]))
        else:
            seen = value[:, :, faces.downward_of].transpose(0, 2, 1)
            # One face above after the other: all at once would not stay in the processor's cache.
            best, other = seen[:, :, :1] + table[None, :, 0], np.empty((*seen.shape[:2], table.shape[2]))
            for face in range(1, table.shape[1]):
                np.add(seen[:, :, face, None], table[None, :, face], out=other)
                np.minimum(best, other, out=best)
        return best + cost[:, :, None]

    def sequence(self, memory: Sequence[Array], price: float) -> tuple[int, ...]:
        """Return, for each stage, the option of a sequence that attains `least` at one price."""
        prices, classes = np.array([price]), self.candidates.stage_classes
        value: Array | None = None
        costs, values = dict[int, Array](), dict[int, Array]()
        for index in reversed(range(len(classes))):
            faces = self.faces[classes[index]]
            costs[index] = self._extend(index, value, memory, prices)[0]
            values[index] = np.minimum.reduceat(costs[index][faces.order], faces.starts, axis=0)
            value = values[index][None]
        picks = [int(np.argmin(costs[0][:, 0]))]
        for index in range(1, len(classes)):
            # The best upward face for the stage below, and the cheapest option with it.
            below = self.faces[classes[index - 1]]
            second = self.faces[classes[index - 2]].downward_of[picks[-2]] if index > 1 else 0
            table = self.table(classes[index], classes[index - 1], classes[index - 2] if index > 1 else None)
            face = below.downward_of[picks[-1]]
            upward = int(np.argmin(values[index][:, face] + table[picks[-1], :, second]))
            cost = np.where(self.faces[classes[index]].upward_of == upward, costs[index][:, face], np.inf)
            picks.append(int(np.argmin(cost)))
        return tuple(picks)

    def least_bytes(self, event: MemoryEvent) -> float:
        """Return a lower bound on what any plan holds at a moment, reserve included."""
        rows = self.memory(event)
        least = {id(row): float(row.min()) for row in {id(row): row for row in rows}.values()}
        return sum(least[id(row)] for row in rows) + self.load.fixed_bytes

    def dual(self, limit_bytes: float, event: MemoryEvent, rounds: int = ROUNDS) -> tuple[float, float]:
        """Return the bound at one moment, and the price of a byte that gives it."""
        key = (limit_bytes, event, rounds)
        if key not in self._duals:
            self._duals[key] = self._dual(*key)
        return self._duals[key]

    def near(self, limit_bytes: float, event: MemoryEvent, price: float) -> tuple[float, float]:
        """Return the best bound at one moment and its price, of a few prices about a given one."""
        memory, prices = self.memory(event), price * np.array([0.6, 1.0, 1.7])
        duals = self.least(memory, prices) - prices * (limit_bytes - self.load.fixed_bytes)
        return float(duals.max()), float(prices[np.argmax(duals)])

    def _dual(self, limit_bytes: float, event: MemoryEvent, rounds: int) -> tuple[float, float]:
        room = limit_bytes - self.load.fixed_bytes
        memory = self.memory(event)
        best, price, scale = self.free_s, 0.0, self.free_s / max(room, 1.0)
        low, high, steps = -7.0, 5.0, 13
        for _ in range(rounds):
            exponents = np.linspace(low, high, steps)
            prices = scale * 2.0**exponents
            top = 0
            # The dual is concave in the price: where the lowest gains nothing over none, no higher one does.
            if price or self.least(memory, prices[:1])[0] - prices[0] * room > best:
                duals = self.least(memory, prices) - prices * room
                top = int(np.argmax(duals))
                if duals[top] > best:
                    best, price = float(duals[top]), float(prices[top])
            width = (high - low) / (steps - 1)
            low, high, steps = exponents[top] - width, exponents[top] + width, 7
        return best, price

    @cached_property
    def free_s(self) -> float:
        """Seconds of the fastest sequence if memory were free."""
        return float(self.least(self.memory(MemoryEvent(None)), np.zeros(1))[0])

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
            find = partial(self.near, price=price) if price else partial(self.dual, rounds=1)
            bound_s, at = find(limit_bytes, event)
            if bound_s > best:
                best, best_event, price = bound_s, event, at
        return (best, price) if best_event is None else max((best, price), self.dual(limit_bytes, best_event))


def events_near(candidates: CandidateSet, stage: int | None) -> tuple[MemoryEvent, ...]:
    """Return the moments at which memory is priced: in the given stage, in the last two, and the optimizer step."""
    count = len(candidates.stage_classes)
    stages = dict.fromkeys(s for s in (stage, count - 1, count - 2) if s is not None and 0 <= s < count)
    found: list[MemoryEvent] = []
    for s in stages:
        options = candidates.options[candidates.stage_classes[s]]
        seen = {moment.sees: moment for option in options for moment in option.moments if moment.phase != "forward"}
        found += [MemoryEvent(s, m) for m in seen.values() if m.neighbours.above or m.neighbours.below]
    return (*found, MemoryEvent(None))


def highest_event(candidates: CandidateSet, stage: int) -> tuple[MemoryEvent, ...]:
    """Return the moment in a stage's backward that is the highest of any option, if there is one."""
    options = candidates.options[candidates.stage_classes[stage]]
    moments = [(option.bytes_at(m), m) for option in options for m in option.moments if m.phase != "forward"]
    return (MemoryEvent(stage, max(moments, key=lambda pair: pair[0])[1]),) if moments else ()
