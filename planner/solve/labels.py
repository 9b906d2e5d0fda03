"""The fastest plan of one candidate set within a limit: a shortest path with memory as its resource.

Stages are the layers of a graph, options its nodes, and a plan a path from the top stage to the bottom one.  Its length
is the step time; what it may not exceed is the peak memory.  The standard method for such a problem is label setting
(Irnich and Desaulniers, "Shortest path problems with resource constraints", 2005).  A label stands for options of
stages j and above: its seconds, its memory (`planner.solve.label_memory`) and its state
(`planner.solve.overlap_states`).

    labels = { the empty label }
    for each stage from the top down:
        labels = labels x options of the stage, without those that
            would take `cut_s` or more                               (`planner.solve.completion_bounds`)
            cannot be completed within the limit                     (the same)
            are no better than another in seconds and all memory     (dominance)
    the first of the labels by seconds is the fastest plan

Dominance inside a state compares seconds and memory; of labels in different states, the dominating one has to be faster
by as much as its state can cost more (`LabelSetting._worse_s`).  Where a rank owns spanning operators a label has the
seconds and the memory of two ranks, the mean and that owner: plans have to fit on both, and take as long as the slower.

Every run is a certificate.  Memory is rounded down to
multiples of `grain_bytes`, so that many labels are equal; that only relaxes the limit.  If there are too
many, only some go on, and the least bound of the others is what the run certifies at most.  So
no plan of the set takes less than

    min(least bound of what is left out, least bound of the labels over the cap, seconds of the first complete label),

of which the first is at least `cut_s`, and infinite if memory rules everything out.

What a run may cost is a number of labels and not a time, so plans do not depend on how fast a machine is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.options.dominance import Column, Rows, undominated_rows
from planner.solve.completion_bounds import CompletionBounds
from planner.solve.label_memory import (
    BACKWARD,
    COLUMNS,
    NOTHING_PLACED,
    OPTIMIZER,
    StageMemory,
    most_gathered,
    peaks,
    raise_pending,
    resources,
)
from planner.solve.lagrangian_bound import ChainBound, MemoryEvent, highest_event

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Picks = tuple[int, ...]

LEAST_MADE, LEAST_KEPT = 4000, 200
"""Labels of a stage that are compared with each other, and of those that go on, whatever the run may make."""
LONG = 200
"""Stages from which on those numbers are smaller, so that they are as many over all stages as of so many."""
BEAM_MADE, BEAM_KEPT = 250, 125
"""The first two of a beam search: it finds a plan below which the others' labels are cut off, which so few do as a
rule, and what it makes is lost to the runs that prove."""
UNEVEN = 8
"""How many times its share a stage may make."""
MADE_PER_LABEL = 4
"""Of more that are made, one of so many goes on at most; dominance leaves fewer, as a rule."""
CHUNK = 1 << 20
"""Pairs of a label and an option that are looked at at once: arrays of 8 MB."""
QUICK = (2, 4, 6)
"""Of the prices of moments that are already seen, those at which all pairs are looked at."""
RIVALS = 500
"""Labels with which all of other states are compared: the fastest ones."""
ROUNDING = 1e-9
"""Relative rounding of sums in the certificate."""
LITTLE = 0.1
"""Price of all memory, in the time of the fastest step, where memory is ample."""


@dataclass(frozen=True)
class Labels:
    """Labels that end at the same stage."""

    seconds: Array
    """On each of `ChainBound.on_ranks`, shape (labels, ranks)."""
    held: Array
    """Columns of `planner.solve.label_memory`, one rank's after the other's, shape (labels, columns)."""
    state: Indices
    least_s: Array
    """The least seconds of the whole step."""
    parent: Indices
    """The label of the stage above that each extends."""
    option: Indices

    def some(self, which: NDArray[np.bool_] | Indices) -> Labels:
        """Return some of them."""
        held = self.held[which]
        return Labels(
            self.seconds[which], held, self.state[which], self.least_s[which], self.parent[which], self.option[which]
        )


@dataclass(frozen=True)
class Run:
    """What one run gave."""

    least_s: float
    """No plan of the set that fits takes less; infinite: none fits."""
    dropped: bool
    """Whether labels over the cap, and no others, keep `least_s` below the cut."""
    made: int
    """Labels that were compared with each other."""
    plans: Iterator[Picks]
    """Options of complete labels, by rising seconds: sequences that fit but for what their memory leaves out."""


@dataclass(frozen=True)
class _Rank:
    """What labels need for their seconds and memory on one rank."""

    place: int
    """Of its column in the labels' `seconds`."""
    columns: slice
    """Of the labels' `held`."""
    base_s: Sequence[Array]
    """`OverlapStates.base_s` of every stage; all else of the states is the same on all ranks."""
    memory: Sequence[StageMemory]
    """Of every stage."""
    bounds: CompletionBounds
    room_bytes: float
    most_gathered: Sequence[Array]
    owned_s: float
    """What its host steps beside."""
    holds_less: bool
    """Whether it holds no more than the first rank, whose columns it has then."""


class LabelSetting:
    """Label setting on one chain within one limit."""

    def __init__(self, chain: ChainBound, limit_bytes: float, prices: Sequence[float], stages: Sequence[int]) -> None:
        """`prices` are the prices of a byte in seconds that give good bounds on each of `ChainBound.on_ranks`, 0 where
        memory is ample; `stages` are those at which plans may peak."""
        candidates = chain.candidates
        self.chain, self.states = chain, chain.states
        self._worse = dict[tuple[int, int], Array]()  # alike stages share theirs
        events = [*(event for stage in stages for event in highest_event(candidates, stage)), MemoryEvent(None)]
        self.ranks = list[_Rank]()
        for place, (on_rank, price) in enumerate(zip(chain.on_ranks, prices, strict=True)):
            of_class = [StageMemory(columns, candidates.load) for columns in on_rank.candidates.columns]
            memory = [of_class[stage_class] for stage_class in candidates.stage_classes]
            room_bytes, owned_s = limit_bytes - on_rank.candidates.fixed_bytes, on_rank.candidates.owned_s
            price = price or LITTLE * chain.free_s / room_bytes
            bounds = CompletionBounds(on_rank, memory, events, price, room_bytes)
            # A rank that is there for the seconds of its host holds no more than the mean does, on which plans fit.
            first = 0 if owned_s else sum(not rank.holds_less for rank in self.ranks) * COLUMNS
            base_s, most = [some.base_s for some in on_rank.states], most_gathered(memory)
            columns, less = slice(first, first + COLUMNS), owned_s > 0
            self.ranks.append(_Rank(place, columns, base_s, memory, bounds, room_bytes, most, owned_s, less))
        self.holding = [rank for rank in self.ranks if not rank.holds_less]

    def _empty(self) -> Labels:
        zero, seconds = np.zeros(1, dtype=np.intp), np.array([[rank.owned_s for rank in self.ranks]])
        return Labels(seconds, np.tile(NOTHING_PLACED, len(self.holding)), zero, np.zeros(1), zero, zero)

    def tightened_s(self) -> float:
        """Return seconds that no plan is below, after the bounds were made tighter; it takes as long as some runs."""
        for rank in self.ranks:
            rank.bounds.tighten()
        labels, _ = self._extended(self._empty(), len(self.states) - 1, np.inf)
        return float(labels.least_s.min(initial=np.inf)) * (1 - ROUNDING)

    def run(self, cut_s: float, grain_bytes: float = 0.0, most_made: int = 1_000_000, *, unevenly: bool = False) -> Run:
        """Find plans that take less than `cut_s`, with memory rounded down to multiples of the grain (0: not).

        `most_made` is how many labels may be made, over all stages: as many of each, or `unevenly`, where a few stages
        have most of them.
        """
        count = len(self.states)
        share, least = most_made * (UNEVEN if unevenly else 1) // count, min(1.0, LONG / count)
        most_of_stage = max(int(LEAST_MADE * least), share)
        most_kept = max(int(LEAST_KEPT * least), share // MADE_PER_LABEL)
        return self._run(cut_s, grain_bytes, most_of_stage, most_kept, most_made)

    def beam(self, cut_s: float, grain_bytes: float = 0.0) -> Run:
        """Find plans as `run` does, with few labels of each stage."""
        least = min(1.0, LONG / len(self.states))
        return self._run(cut_s, grain_bytes, int(BEAM_MADE * least), max(int(BEAM_KEPT * least), 1))

    def _run(
        self, cut_s: float, grain_bytes: float, most_of_stage: int, most_kept: int, most_made: float = np.inf
    ) -> Run:
        labels, left_s, lost_s, made, passed = self._empty(), np.inf, np.inf, 0, list[Labels]()
        for index in reversed(range(len(self.states))):
            labels, over_s = self._extended(labels, index, cut_s)
            left_s = min(left_s, over_s)
            # Every stage may have some, whatever others have made.
            left = max(most_made - made, LEAST_MADE)
            labels, dropped_s = _most_promising(labels, int(min(most_of_stage, left)))
            made += len(labels.seconds)
            if grain_bytes:
                np.floor(labels.held / grain_bytes, out=labels.held)
                np.multiply(labels.held, grain_bytes, out=labels.held)
            if index:
                for rank in self.holding:
                    raise_pending(labels.held[:, rank.columns], rank.most_gathered[index - 1])
                labels = labels.some(self._undominated(labels, index))
            labels, also_s = _most_promising(labels, most_kept)
            lost_s = min(lost_s, dropped_s, also_s)
            passed.append(labels)
            if not len(labels.seconds):
                return Run(min(left_s, lost_s) * (1 - ROUNDING), lost_s < left_s, made, iter(()))
        seconds = labels.seconds.max(axis=1)
        labels = passed[-1] = labels.some(np.argsort(seconds, kind="stable"))
        first_s = float(seconds.min())
        plans = (self._picks(passed, label) for label in range(len(labels.seconds)))
        return Run(min(first_s, left_s, lost_s) * (1 - ROUNDING), lost_s < first_s, made, plans)

    def _extended(self, labels: Labels, index: int, cut_s: float) -> tuple[Labels, float]:
        """Return all labels with one more stage that may lead to a plan below the cut, and the others' least bound."""
        states = self.states[index]
        top = index + 1 == len(self.states)
        present, place = np.unique(labels.state, return_inverse=True)  # states above, of which labels have a few
        upward = present if top else self.states[index + 1].upward[present]
        # By state above and option: the seconds that are added, and the state that comes of it.
        above_s = 0.0 if top else self.states[index + 1].more_s[present][:, states.downward_of]
        after, added = states.of[:, upward].T, list[Array]()
        quick = []
        for rank in self.ranks:
            added_s = rank.base_s[index][:, upward].T + above_s
            added.append(added_s)
            peak = np.zeros(1) if top else peaks(labels.held[:, rank.columns])
            for number in (0,) if top else QUICK:  # Nothing has been seen above the top stage: only seconds count.
                price, rest_s = rank.bounds.seen(index, number)
                passing = rank.memory[index].passing[None]
                whole_s = added_s + rest_s[after] + price * (passing - rank.room_bytes)
                quick.append((labels.seconds[:, rank.place] + price * peak, whole_s))
        found, left_s = [], np.inf
        step = max(1, CHUNK // len(states.base_s))
        for start in range(0, len(labels.seconds), step):
            part = slice(start, start + step)
            above = place[part]
            pairs_s = np.full((len(above), len(states.base_s)), -np.inf)
            for so_far_s, whole_s in quick:
                np.maximum(pairs_s, so_far_s[part, None] + whole_s[above], out=pairs_s)
            keep = pairs_s < cut_s
            left_s = min(left_s, pairs_s.min(initial=np.inf, where=~keep))
            for rank in self.holding:
                keep &= rank.bounds.may_fit(index, labels.held[part, rank.columns])
            parent, option = np.nonzero(keep)
            for rank, added_s in zip(self.ranks, added, strict=True):
                if rank.bounds.tables:  # Nearly all that goes they drop, before there are all columns of its memory.
                    pair = above[parent], option
                    sums = rank.memory[index].summed(labels.held[part, rank.columns], parent, option)
                    least_s = labels.seconds[part, rank.place].take(parent) + added_s[pair]
                    least_s += rank.bounds.seconds_in_room(index, after[pair], sums)
                    below = least_s < cut_s
                    left_s = min(left_s, least_s.min(initial=np.inf, where=~below))
                    parent, option = parent[below], option[below]
            pair = above[parent], option
            state = after[pair]
            seconds, held = np.empty((len(parent), len(self.ranks))), np.empty((len(parent), labels.held.shape[1]))
            fitting = np.ones(len(parent), dtype=bool)
            for rank, added_s in zip(self.ranks, added, strict=True):
                seconds[:, rank.place] = labels.seconds[part, rank.place].take(parent) + added_s[pair]
                if rank.holds_less:
                    continue
                own = rank.memory[index].extended(labels.held[part, rank.columns].take(parent, axis=0), option)
                held[:, rank.columns] = own
                fitting &= rank.bounds.fits(index, own)
            fits = np.flatnonzero(fitting)
            least_s = np.full(len(fits), -np.inf)
            for rank in self.ranks:
                below_s = rank.bounds.seconds(index, state[fits], resources(held[fits, rank.columns]))
                np.maximum(least_s, seconds[fits, rank.place] + below_s, out=least_s)
            below = least_s < cut_s
            left_s, which = min(left_s, least_s.min(initial=np.inf, where=~below)), fits[below]
            found.append(
                Labels(seconds[which], held[which], state[which], least_s[below], parent[which] + start, option[which])
            )
        return _together(found), float(left_s)

    def _undominated(self, labels: Labels, index: int) -> Indices:
        """Return the labels that no other one dominates."""
        kept = []
        order = np.argsort(labels.state, kind="stable")
        for alike in np.split(order, np.flatnonzero(np.diff(labels.state[order])) + 1):
            if len(alike):
                rows = np.column_stack([labels.seconds[alike], labels.held[alike]])
                kept.append(alike[undominated_rows(rows)])
        if len(kept) < 2:
            return kept[0] if kept else order
        return self._undominated_by_others(labels, np.concatenate(kept), index)

    def _undominated_by_others(self, labels: Labels, kept: Indices, index: int) -> Indices:
        """Return those of the kept labels that none in another state dominates."""
        present, place = np.unique(labels.state[kept], return_inverse=True)
        worse_s = self._worse_s(index)[np.ix_(present, present)]
        seconds = labels.seconds[kept]
        numbers = labels.held[kept]
        # Those that are the fastest in any state go first.
        anywhere_s = seconds.max(axis=1) + worse_s.max(axis=1)[place]
        rivals = np.argsort(anywhere_s, kind="stable")[:RIVALS]
        better = Rows(numbers[rivals]).at_most(numbers)
        for state in range(len(present)):
            rows = np.flatnonzero(place == state)
            # Strictly: of two that dominate each other, both stay.
            for own_s in seconds.T:
                better[rows] &= Column(own_s[rivals] + worse_s[place[rivals], state]).below(own_s[rows])
        return kept[~better.any(axis=1)]

    def _worse_s(self, index: int) -> Array:
        """Return by how many seconds at most a completion costs more from one state than from another, of a stage
        above another; the shape is (from, than)."""
        states, below = self.states[index], self.chain.table(*self.chain.contexts[index - 1])
        key = id(states), id(below)
        if key not in self._worse:
            seen = below.transpose(1, 0, 2).reshape(below.shape[1], -1)
            by_face = np.array([(row - seen).max(axis=1) for row in seen])
            by_window = np.array([(row - states.more_s).max(axis=1) for row in states.more_s])
            self._worse[key] = by_window + by_face[np.ix_(states.upward, states.upward)]
        return self._worse[key]

    def _picks(self, passed: Sequence[Labels], label: int) -> Picks:
        """Return the option of every stage, in execution order."""
        picks = []
        for labels in reversed(passed):
            picks.append(int(labels.option[label]))
            label = int(labels.parent[label])
        return tuple(picks)


def _together(parts: Sequence[Labels]) -> Labels:
    columns = (np.concatenate([getattr(part, name) for part in parts]) for name in Labels.__dataclass_fields__)
    return Labels(*columns)


def _most_promising(labels: Labels, most: int) -> tuple[Labels, float]:
    """Return so many labels, half of them of the least bounds and half of the least memory, and the least bound of the
    others.  Where memory is tight, those of the least bounds alone may all end before the last stage."""
    if len(labels.seconds) <= most:
        return labels, np.inf
    order = np.argsort(labels.least_s, kind="stable")
    half, rest = order[: most // 2], order[most // 2 :]
    memory = np.zeros(len(rest))
    for start in range(0, labels.held.shape[1], COLUMNS):
        held = labels.held[rest, start : start + COLUMNS]
        memory += peaks(held) + held[:, BACKWARD] + held[:, OPTIMIZER]
    lean, others = np.split(rest[np.argsort(memory, kind="stable")], [most - len(half)])
    return labels.some(np.sort(np.concatenate([half, lean]))), float(labels.least_s[others].min())
