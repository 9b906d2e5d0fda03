"""Solves one candidate set within a limit: integer program, Lagrangian pricing, local search.

A candidate set may have hundreds of options for a class of stages, most of them in no good plan.  The program and the
local search get a few of them: those in sequences that are optimal at some price of memory
(`planner.search.lagrangian_bound`), and those with one strategy.  This is truncated column generation: the bound is
that of the whole set, so the gap covers what the selection lacks.

A plan is priced again as a whole (`planner.pricing.priced`).  If operators of strategy `owner` make its fullest rank
exceed the limit, the set is solved again with the limit lowered by the excess, and without such operators.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.pricing import PricedPlan, priced
from planner.search.candidates import StageDecision
from planner.search.counting_ilp import EXACT_STAGES, CountingProgram, fastest
from planner.search.lagrangian_bound import ChainBound, events_near
from planner.search.local_search import LocalSearch
from planner.search.search_space import CandidateSet, Space

FEW_OPTIONS = 40
"""Classes of stages with at most so many options keep all of them."""
PRICES = (0.5, 0.8, 1.0, 1.25, 2.0)
"""Multiples of the best price of memory at which sequences are taken."""
ATTEMPTS = 3
"""How often a candidate set is solved with a lower limit until the fullest rank fits."""
PROVEN = 1e-9
"""A plan this close to its bound is optimal up to rounding."""


def columns_of(chain: ChainBound, limit_bytes: float) -> CandidateSet:
    """Return the candidates with the options that are passed to the program."""
    candidates = chain.candidates
    if all(len(options) <= FEW_OPTIONS for options in candidates.options):
        return candidates
    kept = [{k for k, c in enumerate(some) if len(some) <= FEW_OPTIONS or c.is_whole} for some in candidates.choices]
    events = events_near(candidates, None)
    _, best = chain.tightest(limit_bytes, events)
    for event in dict.fromkeys((best or events[0], events[-1])):
        _, price = chain.dual(limit_bytes, event)
        memory = chain.memory(event)
        for factor in PRICES if price else (0.0,):
            for stage_class, pick in zip(candidates.stage_classes, chain.sequence(memory, factor * price), strict=True):
                kept[stage_class].add(pick)
    return candidates.only([sorted(rows) for rows in kept])


def solve(chain: ChainBound, space: Space, limit_bytes: int, exact: bool = True) -> tuple[PricedPlan | None, float]:
    """Return the best plan found within a limit, and a lower bound on the seconds of all candidates (0: none known).

    `chain` bounds the candidates; `exact` allows the exact form of the program, where it is small enough.
    """
    limit, bound_s = float(limit_bytes), 0.0
    fitting: list[PricedPlan] = []
    for attempt in range(ATTEMPTS):
        excess = 0.0
        for choices, least_s in _solutions(chain, limit, exact):
            if attempt == 0:
                bound_s = max(bound_s, least_s)
            plan = priced(space, chain.load, choices, chain.candidates.spanning)
            over = plan.peak.total_bytes - limit_bytes
            excess = max(excess, over)
            fitting += [plan.as_run(limit_bytes)] if over <= 0 else []
        if fitting or excess == 0:
            break
        limit -= excess
    if limit < limit_bytes and (uniform := _without_owners(chain.candidates)) is not None:
        found, _ = solve(ChainBound(uniform), space, limit_bytes, exact)
        fitting += [found] if found else []
    return max(fitting, key=lambda plan: plan.samples_per_s, default=None), bound_s


def _without_owners(candidates: CandidateSet) -> CandidateSet | None:
    """Return the candidates without strategy `owner`, under which ranks differ; None if there are none with it, or if
    a stage would have no option."""
    owned = [[any(s.spec.has_owner for s in choice.strategies) for choice in some] for some in candidates.choices]
    kept = [[k for k, is_owned in enumerate(some) if not is_owned] for some in owned]
    return candidates.only(kept) if any(map(any, owned)) and all(kept) else None


def _solutions(chain: ChainBound, limit_bytes: float, exact: bool) -> Iterator[tuple[tuple[StageDecision, ...], float]]:
    """Yield good plans that fit by the mean rank's memory, each with a lower bound on the seconds (0: none known)."""
    columns = columns_of(chain, limit_bytes)
    local = LocalSearch(columns, limit_bytes, chain if columns is chain.candidates else None)
    start = fastest(columns, limit_bytes) or CountingProgram.smallest(columns)
    events = events_near(columns, peak_memory(start.options, columns.load).stage)
    best_s = float("inf")
    for picks in (start.picks if local.fits(start.picks) else None, local.cheapest_fitting(events[0])):
        if picks is not None:
            improved = local.improve(picks)
            best_s = min(best_s, step_time(columns.picked(improved), columns.load).total_s)
            yield columns.chosen(improved), 0.0
    few = exact and len(columns.stage_classes) <= EXACT_STAGES
    if few and best_s > chain.bound_s(limit_bytes, events) * (1 + PROVEN):
        # Where memory is tight, options that are optimal at no price can double the speed.
        exactly = fastest(chain.candidates, limit_bytes, exact=True)
        if exactly is not None:
            yield chain.candidates.chosen(exactly.picks), exactly.least_s
