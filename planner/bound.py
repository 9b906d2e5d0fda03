"""A lower bound on the step time of every plan of a menu that fits: what makes the gap certified.

Give every byte above the limit at some moment of the step a price lambda >= 0.  Then

    L(lambda) = min over all sequences of options of  time + lambda * (memory at the moment - limit)

is at most the time of any plan that fits (weak Lagrangian duality; Everett 1963).  The time is a
sum over stages of windows that see one neighbour on each side (`planner.timing`), and the memory at
a fixed moment is a sum over stages, so dynamic programming over the chain finds the minimum exactly,
over all orders of options, also those that the integer program does not tell apart:

    V_i(u, d) = min over options k of stage i with upward face u of
                price_i(k) + min over u' of V_(i+1)(u', downward face of k) + windows_k(u', d)

where the upward face of an option is what the stage above sees of it (the gather before its forward,
its reduction) and the downward face what the stage below sees (the gather before its backward).
L is concave; `lower_bound_s` maximises it over lambda, and over moments takes the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.option import Option
from planner.space import Menu
from planner.timing import reduction_s
from planner.workload import Workload

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

ROUNDS = 4
"""Grids of prices, each three times finer than the one before."""


@dataclass(frozen=True)
class Place:
    """A moment at which memory is priced: in the backward of a stage, or the optimizer step (None)."""

    stage: int | None
    above: bool = False
    below: bool = False


@dataclass(frozen=True)
class _Faces:
    """The options of one kind as arrays over options k."""

    upward: Array
    """Distinct (first gather, reduction, reduction with all-reduce), one row each."""
    upward_of: Indices
    """For each option, its row in `upward`."""
    downward: Array
    """Distinct gathers before backward."""
    downward_of: Indices
    fixed_s: Array
    """Seconds that depend on no neighbour."""
    forward_s: Array
    top_s: Array
    bottom_s: Array
    top_gather_s: Array
    bottom_reduce_s: tuple[Array, Array]
    single: NDArray[np.bool_]
    """Whether it is one segment, whose top and bottom windows are one."""
    order: Indices
    """Options sorted by upward face."""
    starts: Indices
    """Where each upward face starts in `order`."""


def _faces(options: Sequence[Option], load: Workload) -> _Faces:
    repeats, overlaps = load.accumulation, load.cluster.overlaps

    def inner_s(option: Option) -> float:
        s = option.segments
        total = option.optimizer_s
        for this, after in pairwise(s):
            pair = (this.forward_s, after.forward_gather_s)
            total += repeats * (max(pair) if overlaps else sum(pair))
        for i in range(1, len(s) - 1):
            for last, times in ((False, repeats - 1), (True, 1)):
                pair = (s[i].backward_s, reduction_s(s[i + 1], last) + s[i - 1].backward_gather_s)
                total += times * (max(pair) if overlaps else sum(pair))
        return total

    segments = [option.segments for option in options]
    up = np.array([[s[0].forward_gather_s, reduction_s(s[0], False), reduction_s(s[0], True)] for s in segments])
    down = np.array([s[-1].backward_gather_s for s in segments])
    upward, upward_of = np.unique(up, axis=0, return_inverse=True)
    downward, downward_of = np.unique(down, return_inverse=True)
    upward_of = upward_of.reshape(-1)
    order = np.argsort(upward_of, kind="stable")
    second = [s[1] if len(s) > 1 else None for s in segments]
    return _Faces(
        upward=upward,
        upward_of=upward_of,
        downward=downward,
        downward_of=downward_of,
        fixed_s=np.array([inner_s(option) for option in options]),
        forward_s=np.array([s[-1].forward_s for s in segments]),
        top_s=np.array([s[-1].backward_s for s in segments]),
        bottom_s=np.array([s[0].backward_s for s in segments]),
        top_gather_s=np.array([s[-2].backward_gather_s if len(s) > 1 else 0.0 for s in segments]),
        bottom_reduce_s=(
            np.array([reduction_s(x, False) if x else 0.0 for x in second]),
            np.array([reduction_s(x, True) if x else 0.0 for x in second]),
        ),
        single=np.array([len(s) == 1 for s in segments]),
        order=order,
        starts=np.searchsorted(upward_of[order], np.arange(len(upward))),
    )


def _windows(faces: _Faces, above: Array, below: Array, load: Workload) -> Array:
    """Return the seconds of boundary windows, shape (options, faces above, faces below)."""

    def window(compute: Array, communication: Array) -> Array:
        return np.maximum(compute, communication) if load.cluster.overlaps else compute + communication

    gather, single = below[None, None, :], faces.single[:, None, None]
    own_gather = np.where(single, gather, faces.top_gather_s[:, None, None])
    total = load.accumulation * window(faces.forward_s[:, None, None], above[None, :, :1])
    for last, times in ((0, load.accumulation - 1), (1, 1)):
        top = window(faces.top_s[:, None, None], above[None, :, 1 + last, None] + own_gather)
        bottom = window(faces.bottom_s[:, None, None], faces.bottom_reduce_s[last][:, None, None] + gather)
        total = total + times * (top + np.where(single, 0.0, bottom))
    return total


class ChainBound:
    """The dynamic program for one menu."""

    def __init__(self, menu: Menu) -> None:
        self.menu, self.load = menu, menu.load
        self.faces = [_faces(options, menu.load) for options in menu.options]
        self.tables: dict[tuple[int | None, int, int | None], Array] = {}
        self._table_lists: dict[tuple[int | None, int, int | None], Any] = {}

    def table(self, above: int | None, kind: int, below: int | None) -> Array:
        """Return the windows of a kind between two others (None: the end of the chain)."""
        key = (above, kind, below)
        if key not in self.tables:
            upward = np.zeros((1, 3)) if above is None else self.faces[above].upward
            downward = np.zeros(1) if below is None else self.faces[below].downward
            self.tables[key] = _windows(self.faces[kind], upward, downward, self.load)
        return self.tables[key]

    def stage_s(self, picks: Sequence[int], index: int) -> float:
        """Return the seconds of one stage between its neighbours; over all stages they sum to the step."""
        kinds, repeats, pick = self.menu.kinds, self.load.accumulation, picks[index]
        top, bottom = index + 1 == len(kinds), index == 0
        above, below = None if top else kinds[index + 1], None if bottom else kinds[index - 1]
        upward = 0 if above is None else self._lists[above][1][picks[index + 1]]
        downward = 0 if below is None else self._lists[below][2][picks[index - 1]]
        fixed_s, _, _, gathers_s, ends_s = self._lists[kinds[index]]
        total: float = fixed_s[pick] + self._table_list(above, kinds[index], below)[pick][upward][downward]
        if top:
            total += repeats * gathers_s[pick]
        if bottom:
            gather, reduction, last_reduction = ends_s[pick]
            total += repeats * gather + (repeats - 1) * reduction + last_reduction
        return total

    @cached_property
    def _lists(self) -> list[tuple[Any, ...]]:
        # Plain lists: one-element look-ups in numpy arrays cost several times as much.
        return [
            (f.fixed_s.tolist(), f.upward_of.tolist(), f.downward_of.tolist(), f.downward[f.downward_of].tolist(),
             f.upward[f.upward_of].tolist())
            for f in self.faces
        ]  # fmt: skip

    def _table_list(self, above: int | None, kind: int, below: int | None) -> Any:
        key = (above, kind, below)
        if key not in self._table_lists:
            self._table_lists[key] = self.table(above, kind, below).tolist()
        return self._table_lists[key]

    def memory(self, place: Place) -> list[Array]:
        """Return, for each stage, the bytes of each option at a moment."""
        rows: list[Array] = []
        cache: dict[tuple[int, int], Array] = {}
        for index, kind in enumerate(self.menu.kinds):
            relation = _relation(index, place)
            if (kind, relation) not in cache:
                options = self.menu.options[kind]
                cache[kind, relation] = np.array([_held(option, relation, place, self.load) for option in options])
            rows.append(cache[kind, relation])
        return rows

    def least(self, memory: Sequence[Array], prices: Array) -> Array:
        """Return min over sequences of time + price * memory, for each price, shape of `prices`."""
        value: Array | None = None
        for index in range(len(self.menu.kinds) - 1, -1, -1):
            faces = self.faces[self.menu.kinds[index]]
            costs = self._extend(index, value, memory, prices)
            value = np.minimum.reduceat(costs[:, faces.order], faces.starts, axis=1)
        assert value is not None, "a model has at least one stage"
        least: Array = value[:, :, 0].min(axis=1)
        return least

    def _extend(self, index: int, value: Array | None, memory: Sequence[Array], prices: Array) -> Array:
        """Return the cost of this stage and all above, shape (prices, options, faces below).

        `value` is the same for the stage above, minimised to (prices, its upward faces, faces below).
        """
        kinds, repeats = self.menu.kinds, self.load.accumulation
        faces = self.faces[kinds[index]]
        above = kinds[index + 1] if index + 1 < len(kinds) else None
        below = kinds[index - 1] if index else None
        table = self.table(above, kinds[index], below)
        cost = faces.fixed_s[None] + prices[:, None] * memory[index][None]
        if above is None:
            cost = cost + repeats * faces.downward[faces.downward_of]
        if below is None:
            ends = faces.upward[faces.upward_of]
            cost = cost + repeats * ends[:, 0] + (repeats - 1) * ends[:, 1] + ends[:, 2]
        if value is None:
            best = np.broadcast_to(table[None, :, 0, :], (len(prices), table.shape[0], table.shape[2]))
        else:
            seen = value[:, :, faces.downward_of].transpose(0, 2, 1)
            best = (seen[:, :, :, None] + table[None]).min(axis=2)
        return best + cost[:, :, None]

    def sequence(self, memory: Sequence[Array], price: float) -> tuple[int, ...]:
        """Return, for each stage, the option of a sequence that attains `least` at one price."""
        prices, kinds = np.array([price]), self.menu.kinds
        value: Array | None = None
        costs: list[Array] = []
        values: list[Array] = []
        for index in range(len(kinds) - 1, -1, -1):
            faces = self.faces[kinds[index]]
            costs.append(self._extend(index, value, memory, prices)[0])
            value = np.minimum.reduceat(costs[-1][faces.order], faces.starts, axis=0)[None]
            values.append(value[0])
        costs.reverse()
        values.reverse()
        picks = [int(np.argmin(costs[0][:, 0]))]
        for index in range(1, len(kinds)):
            # Which upward face the stage below was best off with, and the cheapest option that has it.
            below = self.faces[kinds[index - 1]]
            second = self.faces[kinds[index - 2]].downward_of[picks[-2]] if index > 1 else 0
            table = self.table(kinds[index], kinds[index - 1], kinds[index - 2] if index > 1 else None)
            face = below.downward_of[picks[-1]]
            upward = int(np.argmin(values[index][:, face] + table[picks[-1], :, second]))
            cost = np.where(self.faces[kinds[index]].upward_of == upward, costs[index][:, face], np.inf)
            picks.append(int(np.argmin(cost)))
        return tuple(picks)

    def least_bytes(self, place: Place) -> float:
        """Return what every plan holds at a moment at least, reserve included."""
        return sum(float(row.min()) for row in self.memory(place)) + self.load.cluster.reserve_bytes

    def dual_s(self, limit_bytes: float, place: Place, rounds: int = ROUNDS) -> float:
        """Return the bound at one moment."""
        room = limit_bytes - self.load.cluster.reserve_bytes
        memory = self.memory(place)
        best = self.free_s
        scale = self.free_s / max(room, 1.0)
        low, high, steps = -7.0, 5.0, 13
        for _ in range(rounds):
            exponents = np.linspace(low, high, steps)
            duals = self.least(memory, scale * 2.0**exponents) - scale * 2.0**exponents * room
            top = int(np.argmax(duals))
            best = max(best, float(duals[top]))
            width = (high - low) / (steps - 1)
            low, high, steps = exponents[top] - width, exponents[top] + width, 7
        return best

    @cached_property
    def free_s(self) -> float:
        """Seconds of the fastest sequence if memory were free."""
        return float(self.least(self.memory(Place(None)), np.zeros(1))[0])

    def bound_s(self, limit_bytes: float, places: Sequence[Place], enough_s: float = float("inf")) -> float:
        """Return the best lower bound over the given moments.

        Stops as soon as the bound reaches `enough_s`.
        """
        best, best_place = self.free_s, None
        for place in places:
            if best >= enough_s:
                return best
            found = self.dual_s(limit_bytes, place, rounds=1)
            if found > best:
                best, best_place = found, place
        if best_place is None or best >= enough_s:
            return best
        return max(best, self.dual_s(limit_bytes, best_place))


def _relation(index: int, place: Place) -> int:
    """Return where a stage is, seen from the place: 9 optimizer, else its distance cut to [-2, 2]."""
    if place.stage is None:
        return 9
    return max(-2, min(2, index - place.stage))


def _held(option: Option, relation: int, place: Place, load: Workload) -> float:
    """Return the bytes that one stage's option adds at the place."""
    if relation == 9:
        return option.rest + (1 + load.optimizer.temporaries) * option.gradients
    held = float(option.rest)
    if load.accumulation > 1 or relation > 0:
        held += option.gradients
    if relation > 0:
        held += option.late
    if relation < 0:
        held += option.saved + option.kept
    if relation == 1 and place.above:
        held += option.reduce_input
    if relation == -1 and place.below:
        held += option.prefetched
    if relation == 0:
        local = [option.bytes_at(m) for m in option.moments if m.sees == (False, place.above, place.below)]
        held += max(local, default=0.0)
    return held


def places_near(menu: Menu, stage: int | None) -> tuple[Place, ...]:
    """Return the moments worth pricing: in the given stage, in the last two, and the optimizer step."""
    count = len(menu.kinds)
    stages = dict.fromkeys(s for s in (stage, count - 1, count - 2) if s is not None and 0 <= s < count)
    found: list[Place] = []
    for s in stages:
        seen = dict.fromkeys(moment.sees for option in menu.options[menu.kinds[s]] for moment in option.moments)
        found += [Place(s, above, below) for forward, above, below in seen if not forward and (above or below)]
    return (*found, Place(None))


def lower_bound_s(menu: Menu, limit_bytes: float, stage: int | None = None) -> float:
    """Return seconds that no plan of the menu within the limit can beat.

    `stage` is where the memory of a good plan peaks; any value is valid, a good one is tighter.
    """
    return ChainBound(menu).bound_s(limit_bytes, places_near(menu, stage))
