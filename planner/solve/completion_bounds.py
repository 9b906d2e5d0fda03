"""Lower bounds on what the lower part of a chain still costs, given the memory above it.

Any completion of the stages i < j has to bring the plan below the limit at every moment.  With a price lambda of memory
at one moment (weak Lagrangian duality, as in `planner.solve.lagrangian_bound`), a label of stages j and above costs

    T + lambda (held - room) + Z_j(state)        Z_j(s) = min_d more_s(s, d) + H_(j-1)(d, upward face of s)

at least, where `held` is the column of `planner.solve.label_memory` that the moment is a sum of and H_i(d, u) the
least priced seconds of stages 0 to i with downward face d below a stage with upward face u:

    H_i(d, u) = min over options k with downward face d of  base_s(k, u) + lambda bytes_i(k) + Z_i(state of k, u)

`bytes` are, for moments that are already seen (HIGHEST), what each stage adds to them; for a moment in the backward of
a stage below (BACKWARD) or in the optimizer's step (OPTIMIZER), what each stage holds then.  Each is priced at a few
prices; the bound is the highest.  Where these are far off, `planner.solve.room_tables` has others beside them.

A moment in backward may see the last reduction above it (`planner.solve.stage_bytes`): of a stage below j, in Z as it
stands, or, if those between are all quiet, of j or above, in a second Z to which lambda times the column REDUCTION is
added.  The less of both bounds the label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.solve.label_memory import BACKWARD, HIGHEST, OPTIMIZER, REDUCTION, StageMemory, peaks
from planner.solve.lagrangian_bound import TOLERANCE, ChainBound, MemoryEvent, growth_of, highest_event
from planner.solve.overlap_states import OverlapStates
from planner.solve.room_tables import RoomTable
from planner.solve.stage_bytes import StageBytes, least_above, payments

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

SEEN_PRICES = (0.0, 0.4, 0.7, 0.88, 1.0, 1.13, 1.4, 2.2, 5.0)
"""Multiples of the best price at which moments that are already seen are priced."""
EVENT_PRICES = (0.7, 1.0, 1.4)
"""The same for moments further down."""
SLACK_BYTES = 1.0
"""For the rounding of sums in another order."""
LOWEST = 2
"""Stages of whose backward the highest moment may be a resource."""


@dataclass(frozen=True)
class _Priced:
    """One moment at several prices."""

    column: int
    """Of the labels' memory, from which on stages are counted."""
    stage: int
    """Labels with this stage placed have seen the moment; -1: none has."""
    prices: Array
    least_s: list[Array | None]
    """Z of every stage, shape (prices, states); None: there is none, as the next stage is the moment's."""
    quiet_s: list[Array | None]
    """Z where stages down to the moment's are quiet; None: the label's last reduction is not what the moment sees."""


class CompletionBounds:
    """Bounds for the labels of one chain, within one limit."""

    def __init__(
        self,
        chain: ChainBound,
        memory: Sequence[StageMemory],
        events: Sequence[MemoryEvent],
        price: float,
        room_bytes: float,
    ) -> None:
        """`memory` is of every stage; `price` is the price of a byte that gives the best bound of whole plans."""
        self.room_bytes, self.chain, self.memory, self.price = room_bytes, chain, memory, price
        self.states = chain.states
        self.tables: list[tuple[int, dict[int, float], RoomTable]] = []
        """Moments that are not priced, by their column; the prices of others; and the table."""
        self.seen_from = 0
        """The lowest stage whose labels have not seen one of those moments."""
        alone = {id(columns): StageBytes(columns.passing) for columns in memory}
        self.passing = [alone[id(columns)] for columns in memory]
        self.priced = [self._table(None, self.passing, price * np.array(SEEN_PRICES))]
        for event in events:
            self.priced.append(self._table(event, chain.stage_bytes(event), price * np.array(EVENT_PRICES)))
        self.least_passing = _sums_below([m.passing.min() for m in memory])
        """Bytes that every completion adds to moments already seen, by the number of stages that are not placed."""
        self.least_peak = [-np.inf]
        """What is at least held in backward somewhere below, beside BACKWARD, by the same."""
        for j, columns in enumerate(memory):
            # The stage's own moments lie on top of what is saved below; moments further down are on top of its sums.
            own = columns.backward_peak.min() + self.least_passing[j]
            self.least_peak.append(max(own, self.least_peak[-1] + columns.backward.min()))

    def tighten(self) -> None:
        """Add tables in which memory at one moment is not priced, for chains where bounds at prices are far off."""
        if self.tables:
            return
        rows, whole = self._binding_rows()
        prices = dict(zip(rows, self.chain.joint_prices(whole, self.price, self.room_bytes), strict=True))
        priced = [column for column, price in prices.items() if price] or [HIGHEST]
        for column in priced:
            others = {other: prices[other] for other in priced if other != column} or {column: 0.0}
            paid = payments([rows[other] for other in others], np.array([[*others.values()]]))
            self.tables.append((column, others, RoomTable(self.states, rows[column], paid, self.room_bytes)))

    def _binding_rows(self) -> tuple[dict[int, list[StageBytes]], list[list[StageBytes]]]:
        """Return the bytes of every stage's options at the moments that mostly bind, by the labels' column: those that
        are seen, the optimizer's, one in the backward of the lowest stages; and the same for whole plans."""
        chain, candidates, count = self.chain, self.chain.candidates, len(self.states)
        rows = {HIGHEST: self.passing, OPTIMIZER: chain.stage_bytes(MemoryEvent(None))}
        top = highest_event(candidates, count - 1)
        whole = [chain.stage_bytes(top[0]) if top else rows[HIGHEST], rows[OPTIMIZER]]
        lowest = [event for stage in range(min(LOWEST, count - 1)) for event in highest_event(candidates, stage)]
        if lowest:
            event = max(lowest, key=chain.least_bytes)
            rows[BACKWARD] = chain.stage_bytes(event)
            whole.append(rows[BACKWARD])
            self.seen_from = (event.stage or 0) + 1
        return rows, whole

    def _table(self, event: MemoryEvent | None, rows: Sequence[StageBytes], prices: Array) -> _Priced:
        """Return the table of one moment; None: of those that are already seen.

        Where Z has grown by nearly the same in all states from one stage to an equal one above, as in
        `planner.solve.lagrangian_bound`, it grows by the least of that to the last of equal stages.
        """
        least_s, quiet_s = list[Array | None](), list[Array | None]()
        paid, above, index = payments([rows], prices[:, None]), _alike_above(self.states, rows), 0
        below: Array | None = None
        quiet_below: Array | None = None
        while index < len(self.states):
            states, row = self.states[index], paid[index]
            rest = np.zeros((len(prices), len(states.upward))) if index == 0 else states.least_above(below)
            quiet = states.least_above(quiet_below)
            if row.last is not None and index and paid[index - 1].last is None and quiet is None:
                rest, quiet = None, rest  # The stage below is the moment's.
            least_s.append(rest)
            quiet_s.append(quiet)
            if index and above[index - 1] and above[index]:
                growth = growth_of((rest, quiet), (least_s[-2], quiet_s[-2]))
                if growth is not None:
                    least = growth.min(axis=1)
                    if (above[index] * (growth.max(axis=1) - least) <= TOLERANCE * self.chain.free_s).all():
                        for number in range(above[index]):
                            more = (number + 1) * least[:, None]
                            least_s.append(None if rest is None else rest + more)
                            quiet_s.append(None if quiet is None else quiet + more)
                        index += above[index]
            below, quiet_below = least_above(row, states.least_by_pair, least_s[-1], quiet_s[-1])
            index += 1
        if event is None or event.stage is None:
            return _Priced(HIGHEST if event is None else OPTIMIZER, -1, prices, least_s, quiet_s)
        return _Priced(BACKWARD, event.stage, prices, least_s, quiet_s)

    def seconds(self, index: int, state: Indices, resources: Mapping[int, Array]) -> Array:
        """Return seconds that the stages below one add at least; `state` and `resources`, which are those of
        `planner.solve.label_memory`, are of labels that end there."""
        found = self.seconds_in_room(index, state, resources)
        for priced in self.priced:
            if priced.stage >= index:
                continue  # These labels have seen it.
            excess = resources[priced.column] - self.room_bytes
            rest_s, quiet_s = priced.least_s[index], priced.quiet_s[index]
            for place, price in enumerate(priced.prices):
                seconds = np.full(len(state), np.inf) if rest_s is None else rest_s[place][state] + price * excess
                if quiet_s is not None:
                    pending = quiet_s[place][state] + price * (excess + resources[REDUCTION])
                    np.minimum(seconds, pending, out=seconds)
                np.maximum(found, seconds, out=found)
        return found

    def seconds_in_room(self, index: int, state: Indices, resources: Mapping[int, Array]) -> Array:
        """Return the same by tables of moments that are not priced alone; -inf where there is none."""
        found = np.full(len(state), -np.inf)
        for column, prices, table in self.tables if index >= self.seen_from else ():
            pays = sum(price * (resources[other] - self.room_bytes) for other, price in prices.items())
            reduction = resources[REDUCTION]
            in_room, paid_s = reduction if column == BACKWARD else 0.0, prices.get(BACKWARD, 0.0) * reduction
            np.maximum(found, table.seconds(index, state, resources[column], in_room, paid_s) + pays, out=found)
        return found

    def seen(self, index: int, number: int) -> tuple[float, Array]:
        """Return one of the prices of moments that are already seen, and its least seconds for every state."""
        priced = self.priced[0]
        least_s = priced.least_s[index]
        assert least_s is not None, "moments that are seen are above all stages that are left"
        return float(priced.prices[number]), least_s[number]

    def may_fit(self, index: int, held: Array) -> NDArray[np.bool_]:
        """Return which labels that end above a stage may fit with which of its options, shape (labels, options).

        Of those that do not, `fits` says the same of the memory with the stage; but that is an array for all pairs.
        """
        stage, room = self.memory[index], self.room_bytes + SLACK_BYTES
        backward = np.maximum(stage.backward_peak + self.least_passing[index], stage.backward + self.least_peak[index])
        may_fit: NDArray[np.bool_] = stage.passing <= (room - self.least_passing[index] - peaks(held))[:, None]
        may_fit &= backward <= (room - held[:, BACKWARD])[:, None]
        may_fit &= stage.optimizer <= (room - held[:, OPTIMIZER])[:, None]
        return may_fit

    def fits(self, index: int, held: Array) -> NDArray[np.bool_]:
        """Return which labels some completion may bring below the limit."""
        room = self.room_bytes
        fits: NDArray[np.bool_] = peaks(held) + self.least_passing[index] <= room
        fits &= (held[:, BACKWARD] + self.least_peak[index] <= room) & (held[:, OPTIMIZER] <= room)
        return fits


def _alike_above(states: Sequence[OverlapStates], rows: Sequence[StageBytes]) -> list[int]:
    """Return how many stages directly above each have the same states and bytes."""
    found, rules = [0], [(id(one), id(row)) for one, row in zip(states, rows, strict=True)]
    for own, above in zip(rules[-2::-1], rules[:0:-1], strict=True):
        found.append(found[-1] + 1 if own == above else 0)
    return found[::-1]


def _sums_below(values: Sequence[float]) -> list[float]:
    """Return the sum of all values before each place."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
