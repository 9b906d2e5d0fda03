"""The best plan that is found for one menu within a limit: program, pricing, local search.

A menu may have hundreds of options for a kind of stage, and most of them are in no good plan.  The
program and the local search get a few columns of it: what sequences that are optimal at some price of
memory take (`planner.search.lagrangian_bound`), and the options of one strategy.  This is column generation cut short:
the bound is that of the whole menu, so what the columns lack shows in the gap.

A plan is priced again as a whole (`Space.settled`).  If operators of strategy `owner` make its fullest
rank exceed the limit, the menu is solved again with the limit lowered by what it was exceeded by, and
without such operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.cost.ddp import as_run
from planner.cost.peak_memory import peak_memory
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.search.counting_ilp import EXACT_STAGES, CountingProgram, Solution, fastest
from planner.search.lagrangian_bound import ChainBound, MemoryEvent, places_near
from planner.search.local_search import LocalSearch
from planner.search.search_space import CandidateSet, Settled, Space, Spanning, StageDecision

FEW_OPTIONS = 40
"""Kinds of stages with at most so many options give all of them to the program."""
PRICES = (0.5, 0.8, 1.0, 1.25, 2.0)
"""Factors of the best price of memory at which sequences are taken."""
ATTEMPTS = 3
"""How often a menu is solved with a lower limit until the fullest rank fits."""
PROVEN = 1e-9
"""A plan this close to its bound is optimal, but for rounding."""


@dataclass(frozen=True)
class Candidate:
    """A whole plan that fits."""

    load: Workload
    space: Space
    """With the operators split that the plan splits."""
    spanning: Spanning
    choices: tuple[StageDecision, ...]
    options: tuple[StageCandidate, ...]
    """One per stage in execution order, on the fullest rank."""

    @property
    def samples_per_s(self) -> float:
        """Predicted samples per second of all ranks."""
        return self.load.samples_per_step / step_time(self.options, self.load).total_s


@dataclass(frozen=True)
class Solved:
    """What solving a menu gave."""

    best: Candidate | None
    """None if no plan was found."""
    least_s: float = 0.0
    """No plan of the menu within the limit is faster, by the solver's own bound; 0 if it says nothing."""


def columns_of(chain: ChainBound, limit_bytes: float) -> CandidateSet:
    """Return the menu with the options that are worth giving to the program."""
    menu = chain.menu
    if all(len(options) <= FEW_OPTIONS for options in menu.options):
        return menu
    kept = [
        {k for k, choice in enumerate(choices) if len(choices) <= FEW_OPTIONS or choice.is_whole}
        for choices in menu.choices
    ]
    places = places_near(menu, None)
    _, best = chain.tightest(limit_bytes, places)
    for place in dict.fromkeys((best or places[0], places[-1])):
        _, price = chain.dual(limit_bytes, place)
        memory = chain.memory(place)
        for factor in PRICES if price else (0.0,):
            for kind, pick in zip(menu.kinds, chain.sequence(memory, factor * price), strict=True):
                kept[kind].add(pick)
    return menu.only([sorted(rows) for rows in kept])


def solve(chain: ChainBound, space: Space, limit_bytes: int, exact: bool = True) -> Solved:
    """Return the best plan found of a menu (`chain` is its bound) within a limit.

    `exact` allows for the exact form of the program, where the menu is small enough for it.
    """
    limit, least_s = float(limit_bytes), 0.0
    fitting: list[Candidate] = []
    for attempt in range(ATTEMPTS):
        excess = 0.0
        for solution in _solutions(chain, limit, exact):
            if attempt == 0:
                least_s = max(least_s, solution.least_s)
            settled = space.settled(chain.load, solution.choices, chain.menu.spanning)
            over = peak_memory(settled.options, chain.load).total_bytes - limit_bytes
            excess = max(excess, over)
            fitting += [_as_run(settled, chain.menu, limit_bytes)] if over <= 0 else []
        if fitting or excess == 0:
            break
        limit -= excess
    if limit < limit_bytes and (uniform := _without_owners(chain.menu)) is not None:
        found = solve(ChainBound(uniform), space, limit_bytes, exact).best
        fitting += [found] if found else []
    return Solved(max(fitting, key=lambda candidate: candidate.samples_per_s, default=None), least_s)


def _without_owners(menu: CandidateSet) -> CandidateSet | None:
    """Return the menu without operators of strategy `owner`, of which ranks differ; None if that changes nothing,
    or leaves a stage without options."""
    kept = [
        [k for k, choice in enumerate(choices) if not any(s.spec.has_owner for s in choice.strategies)]
        for choices in menu.choices
    ]
    fewer = any(len(rows) < len(options) for rows, options in zip(kept, menu.options, strict=True))
    return menu.only(kept) if fewer and all(kept) else None


def _as_run(settled: Settled, menu: CandidateSet, limit_bytes: int) -> Candidate:
    options = as_run(settled.options, menu.spanning, None, settled.space, menu.load, limit_bytes)
    return Candidate(menu.load, settled.space, menu.spanning, settled.choices, options)


@dataclass(frozen=True)
class _Found:
    """One plan of a menu that fits by the menu's own options."""

    choices: tuple[StageDecision, ...]
    least_s: float = 0.0
    """No plan of the menu is faster; 0 if that was not asked."""


def _solutions(chain: ChainBound, limit_bytes: float, exact: bool) -> Iterator[_Found]:
    """Yield good plans of a menu."""
    columns = columns_of(chain, limit_bytes)
    polisher = LocalSearch(columns, limit_bytes, chain if columns is chain.menu else None)
    counted = fastest(columns, limit_bytes)
    start = counted or CountingProgram.smallest(columns)
    stage = peak_memory(start.options, columns.load).stage
    priced = polisher.cheapest_fitting(_first_place(columns, stage))
    best_s = float("inf")
    for picks in (start.picks if polisher.fits(start.picks) else None, priced):
        if picks is not None:
            improved = polisher.improve(picks)
            best_s = min(best_s, step_time(polisher.options(improved), columns.load).total_s)
            yield _Found(columns.chosen(improved))
    few = exact and len(columns.kinds) <= EXACT_STAGES
    if few and best_s > chain.bound_s(limit_bytes, places_near(columns, stage)) * (1 + PROVEN):
        # Where memory is tight, options that no price suggests can double the speed.
        told: Solution | None = fastest(chain.menu, limit_bytes, exact=True)
        if told is not None:
            yield _Found(chain.menu.chosen(told.picks), told.least_s)


def _first_place(menu: CandidateSet, stage: int | None) -> MemoryEvent:
    return places_near(menu, stage)[0]
