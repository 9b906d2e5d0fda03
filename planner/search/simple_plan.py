"""The plan that one would write by hand: one strategy for all blocks, one for the rest, the first n recomputed more.

Strategies are the common ones (`StrategySpec.baseline`: DDP, ZeRO-2, FSDP, HSDP with each group size).  For one
micro-batch b, one strategy s of the blocks, one strategy o of what is outside them, and two kinds k of recomputation
(nothing and selective, selective and everything, ...), with the first n blocks taking the one that holds less,
T the step time and M the peak, of which T grows with n and M falls,

    n(b, s, o, k) = min {n : M(b, s, o, k, n) <= limit}        found by bisection
    the plan      = argmax over b, s, o, k of b / T(b, s, o, k, n(b, s, o, k))

T with nothing recomputed bounds T from below, so that most of them need no bisection.  First o = s for every b and s;
then, at the best b and its neighbours, every pair; of k the one in which a byte costs least (`upgrades`), and at the
end every k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import ceil

from planner.cost.workload import Workload
from planner.model.fsdp_units import can_hold
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import PricedPlan, fixed
from planner.search.knapsack import upgrades
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.model_graph import Recompute

WHOLE_MULTIPLE, FROM_SIZE = 8, 16
"""Micro-batches of this size and larger are multiples of so many, as people choose them ..."""
ODD_GAIN = 0.01
"""... unless another gives more samples per second by more than this."""
SMALLEST, LARGEST = 8, 2
"""Micro-batches that are tried are at least this part of a fast plan's, and at most so many times that: with fewer
blocks recomputed, smaller ones may be faster."""
SEVERAL_MODES = 3
"""So many kinds of recomputation, nothing among them, are compared; of two, blocks have one or the other."""
NEIGHBOURS = 2
"""How many micro-batches on either side of the best are tried with a strategy of its own for what is outside blocks."""


@dataclass(frozen=True)
class _Form:
    """A simple plan but for how many blocks are recomputed."""

    load: Workload
    inside: Strategy
    outside: Strategy
    above: Recompute = Recompute.NOTHING
    """Of blocks after the first n."""
    below: Recompute = Recompute.NOTHING
    """Of the first n."""


def simplest(space: Space, loads: Sequence[Workload], limit_bytes: int, near: Workload) -> PricedPlan | None:
    """Return the fastest simple plan within the limit that keeps the space's pins, None if there is none.

    `near` is that of a fast plan: of `loads`, by growing micro-batch, those not far from its own are tried.
    """
    if any(len(slices) > 1 for slices in space.pins.strategies.values()):
        return None
    tried = [load for load in loads if near.micro_batch / SMALLEST <= load.micro_batch <= near.micro_batch * LARGEST]
    strategies = [strategy for strategy in strategies_on(near.cluster) if _is_common(strategy, space)]
    search = _SimpleSearch(space, near, limit_bytes)
    for gain, those in ((0.0, filter(_is_even, tried)), (ODD_GAIN, (one for one in tried if not _is_even(one)))):
        search.try_all((_Form(load, one, one) for load, one in product(those, strategies)), gain)
    if search.best is None:
        return None
    at = tried.index(search.best.load)
    around = tried[max(0, at - NEIGHBOURS) : at + NEIGHBOURS + 1]
    search.try_all((_Form(load, *pair) for load in around for pair in product(strategies, strategies)), ODD_GAIN / 10)
    search.try_every_kind()
    return search.best


def _is_common(strategy: Strategy, space: Space) -> bool:
    fits = all(can_hold(operator, strategy) for operator in space.graph.operators)
    return bool(strategy.spec.baseline) and not strategy.offload and fits


def _is_even(load: Workload) -> bool:
    return load.micro_batch < FROM_SIZE or load.micro_batch % WHOLE_MULTIPLE == 0


def _accumulated(form: _Form) -> tuple[Strategy, Strategy, bool]:
    return form.inside, form.outside, form.load.accumulation > 1


class _SimpleSearch:
    """Prices simple plans of a space, and keeps the fastest that fits."""

    def __init__(self, space: Space, near: Workload, limit_bytes: int) -> None:
        self.space, self.limit_bytes = space, limit_bytes
        self.best: PricedPlan | None = None
        self._best_form: _Form | None = None
        stages, pinned = enumerate(space.model.stages), space.pins.recompute
        blocks = [(index, stage.block) for index, stage in stages if stage.block is not None]
        self._pinned = {index: pinned[block] for index, block in blocks if block in pinned}
        self._open = [index for index, block in blocks if block not in pinned]
        """Stages whose recomputation is not pinned, from the bottom."""
        modes = sorted(set[Recompute]().union(*(space.modes(space.stage_classes[index], near) for index in self._open)))
        self._modes = modes
        self._known: dict[tuple[object, ...], PricedPlan] = {}
        """Plans that were priced, by all that they depend on."""
        self._too_large: dict[tuple[Strategy, Strategy, bool], int] = {}
        """Micro-batches from which on the plan of most recomputation does not fit, with and without accumulation."""

    def try_all(self, forms: Iterable[_Form], gain: float) -> None:
        """Keep the fastest of these forms, if it is faster by more than this share than what is kept so far."""
        for form in forms:
            floor = self.best.samples_per_s * (1.0 + gain) if self.best else 0.0
            if form.load.micro_batch >= self._too_large.get(_accumulated(form), form.load.micro_batch + 1):
                continue
            kept = self._plan(form, 0)
            if kept.samples_per_s > floor:
                plan = kept if self._fits(kept) else self._recomputed(self._cheapest_kind(form, kept))
                if plan is not None and plan.samples_per_s > floor:
                    self.best, self._best_form = plan, form

    def try_every_kind(self) -> None:
        """Keep the fastest of the best form's plans with any two kinds of recomputation."""
        form = self._best_form
        if form is None or len(self._modes) < SEVERAL_MODES or self._fits(self._plan(form, 0)):
            return
        for above, below in combinations(self._modes, 2):
            made = replace(form, above=above, below=below)
            if not self._fits(self._plan(made, 0)) and (plan := self._recomputed(made)) is not None:
                self.best = max(self.best or plan, plan, key=lambda one: one.samples_per_s)

    def _cheapest_kind(self, form: _Form, kept: PricedPlan) -> _Form:
        """Return the form with the two kinds of recomputation between which the limit lies at the least cost."""
        if len(self._modes) < SEVERAL_MODES:
            return replace(form, below=max(self._modes, default=Recompute.NOTHING))
        plans = [kept, *(self._plan(replace(form, above=mode), 0) for mode in self._modes[1:])]
        points = [(-plan.peak.total_bytes, 1.0 / plan.samples_per_s) for plan in plans]
        above = Recompute.NOTHING
        for position, _, _ in upgrades(points):
            below = self._modes[position]
            if self._fits(plans[position]):
                break
            above = below
        else:
            above, below = self._modes[-2:]  # none fits
        return replace(form, above=above, below=below)

    def _recomputed(self, form: _Form) -> PricedPlan | None:
        """Return a form with as few blocks recomputed more as fit, of which there is at least one."""
        low, high = 0, len(self._open)
        plan = self._plan(form, high)
        if not self._fits(plan):
            if form.below == max(self._modes, default=Recompute.NOTHING):
                self._too_large.setdefault(_accumulated(form), form.load.micro_batch)
            return None
        excess = self._plan(form, low).peak.total_bytes - self.limit_bytes
        slack = self.limit_bytes - plan.peak.total_bytes
        halves = False
        while high - low > 1:  # so few do not fit, so many do
            # Each block changes about as much; halving, every second time, ends it where that is not so.
            share = 0.5 if halves else excess / (excess + slack)
            middle, halves = min(max(low + 1, low + ceil((high - low) * share)), high - 1), not halves
            tried = self._plan(form, middle)
            if self._fits(tried):
                high, plan, slack = middle, tried, self.limit_bytes - tried.peak.total_bytes
            elif self.best is not None and tried.samples_per_s <= self.best.samples_per_s:
                return None  # and more of them are slower
            else:
                low, excess = middle, tried.peak.total_bytes - self.limit_bytes
        return plan

    def _fits(self, plan: PricedPlan) -> bool:
        return plan.peak.total_bytes <= self.limit_bytes

    def _plan(self, form: _Form, count: int) -> PricedPlan:
        """Return a form with so many blocks recomputed more."""
        above, below = (form.above, form.below) if count else (form.above, form.above)
        above = below if count == len(self._open) else above
        key = form.load, form.inside, form.outside, above, below, count if above != below else 0
        if key not in self._known:
            self._known[key] = self._made(form, count)
        return self._known[key]

    def _made(self, form: _Form, count: int) -> PricedPlan:
        space, recomputed = self.space, dict.fromkeys(self._open, form.above)
        recomputed |= dict.fromkeys(self._open[:count], form.below) | self._pinned
        pinned = {operator: slices[0] for operator, slices in space.pins.strategies.items()}
        made, choices = dict[tuple[int, Recompute], StageDecision](), list[StageDecision]()
        for index, (stage_class, stage) in enumerate(zip(space.stage_classes, space.model.stages, strict=True)):
            key = stage_class, recomputed.get(index, Recompute.NOTHING)
            if key not in made:  # alike stages have one object, which `fullest` need not compare field by field
                own = form.outside if stage.block is None else form.inside
                taken = tuple(pinned.get(operator, own) for operator in stage.operators)
                made[key] = StageDecision(taken, stage.allowed(key[1]))
            choices.append(made[key])
        spanning = tuple(pinned.get(operator, form.outside) for operator in space.model.spanning)
        plan = PricedPlan(form.load, space, spanning or None, fixed(space, form.load, choices, spanning or None))
        return plan.as_run(self.limit_bytes)
