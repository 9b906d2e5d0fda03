"""The search of one candidate set within a limit: the integer program, then label setting.

The program over counts gives a plan, and where it peaks.  Then labels (`planner.solve.labels`) are extended below a
cut that is a little above the bound, and is taken further from it run by run, until a plan is found that fits; a plan
of another candidate set ends that sooner.  The number of labels grows steeply with the distance of the cut, so narrow
runs cost next to nothing beside the last.

A plan is priced again as a whole (`planner.pricing.priced`).  If operators of strategy `owner` make its fullest rank
exceed the limit, which labels do not see, the program is solved again with the limit lowered by the excess, and without
such operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice

from planner.cost.peak_memory import peak_memory
from planner.cost.shared_collectives import rest_s
from planner.cost.step_time import step_time
from planner.options.candidate_set import CandidateSet
from planner.options.search_space import Space
from planner.pricing import PricedPlan, priced
from planner.solve.counting_ilp import fastest
from planner.solve.labels import LabelSetting, Picks, Run
from planner.solve.lagrangian_bound import ChainBound

ATTEMPTS = 3
"""How often the program is solved with a lower limit until the fullest rank fits."""
FIRST_WIDTH = 5e-4
"""Distance of the first run's cut from the bound."""
WIDER, SLIGHTLY_WIDER, FEW_MADE = 2.0, 1.4, 1000
"""Factors from one run's distance to the next's: the second after runs that made more labels than the third."""
MANY_MADE = 20_000
"""After a run that made so many labels without a plan, a beam search comes: with a good plan the others cost less."""
HARD_MADE = 3_000
"""After a run that made so many labels, bounds are made tighter, which takes as long as several such runs."""
MOST_TIGHTENED = 128
"""Stages of chains for which they are."""
MOST_MADE = 700_000
"""Labels that one run makes."""
MUCH = 0.05
"""A plan that may be slower than the best by so much is worth runs in which few stages make most labels."""
WIDEST = 16.0
"""No plan is looked for that takes so many times as long as the bound more."""
GRAIN = 2e-4
"""Memory is rounded down by what at its price is this part of the step, over all stages."""
FINER, FINEST = 5.0, 3
"""By how much, and how often, it is rounded less where that hides whether a plan fits."""
PRICING = 300
"""Labels that take as long as to price a whole plan on one rank."""
TRIED = 200
"""Complete labels of a run that are looked at for a plan that fits."""

MOST_IN_VAIN = 6
"""After so many plans in a row that are no faster as a whole than the fastest, no more are priced.  With owners a plan
takes longer as a whole than its label says, so that each of many labels would be worth a look."""


def programmed(
    candidates: CandidateSet, space: Space, limit_bytes: int, ends_at: float = float("inf")
) -> PricedPlan | None:
    """Return the plan that the integer program finds within a limit, None if it finds none until `ends_at`, by
    `time.perf_counter`."""
    limit = float(limit_bytes)
    for _ in range(ATTEMPTS):
        solution = fastest(candidates, limit, ends_at)
        if solution is None:
            break
        plan = priced(space, candidates.load, candidates.chosen(solution.picks), candidates.spanning)
        excess = plan.peak.total_bytes - limit_bytes
        if excess <= 0:
            return plan.as_run(limit_bytes)
        limit -= excess
    rest = _without_owners(candidates)
    return programmed(rest, space, limit_bytes, ends_at) if rest else None


def has_runs(candidates: CandidateSet) -> bool:
    """Whether most stages are like a neighbour, so that counting them makes a program small."""
    classes = candidates.stage_classes
    return 2 * sum(1 for _ in groupby(classes)) <= len(classes)


def _without_owners(candidates: CandidateSet) -> CandidateSet | None:
    """Return the candidates without strategy `owner`, under which ranks differ; None if there are none with it, or if
    a stage would have no option."""
    owned = [[any(s.spec.has_owner for s in choice.strategies) for choice in some] for some in candidates.choices]
    kept = [[k for k, is_owned in enumerate(some) if not is_owned] for some in owned]
    return candidates.only(kept) if any(map(any, owned)) and all(kept) else None


class Widening:
    """Label setting below a cut that is taken further and further from the bound."""

    def __init__(
        self,
        chain: ChainBound,
        space: Space,
        limit_bytes: int,
        start_s: float,
        prices: Sequence[float],
        stage: int | None,
    ) -> None:
        """`start_s` is a bound on the candidates' seconds, `prices` are those of a byte that give a good one on each of
        `ChainBound.on_ranks`; `stage` is where a plan was seen to peak."""
        candidates, count = chain.candidates, len(chain.candidates.stage_classes)
        self.candidates, self.space, self.limit_bytes = candidates, space, limit_bytes
        stages = dict.fromkeys(s for s in (stage, count - 1, 0, 1, count // 2) if s is not None and s < count)
        self.start_s, price = start_s, max(prices)
        self.least_s = self.start_s
        """No plan of the candidates takes less."""
        self.labels = LabelSetting(chain, limit_bytes, prices, tuple(stages))
        self.grain_bytes = GRAIN * self.start_s / (price * count) if price else 0.0
        self.width, self.finer = FIRST_WIDTH, 0
        self.was_searched, self.is_searching = False, False
        """Whether a beam search was made, and whether the next run is one."""
        self.is_hard, self.was_tightened = False, False
        """Whether a run made many labels without a plan, and whether bounds were made tighter for that."""
        self.is_uneven = False
        """Whether a few stages may make most labels of a run."""
        self.is_over, self.lacks_labels = False, False
        """Whether another run is of no use, and whether the last one had to leave out labels."""
        self.exceeds_on_owner = False
        """Whether what would be the fastest plan exceeds the limit on its fullest rank alone."""
        self.waits_for_owner = False
        """Whether what would be the fastest plan takes longer, as one rank steps what it owns for longer than the
        mean."""
        self.is_relaxed = False
        """Whether sequences of options are no plans, as spanning operators may take several strategies at once."""
        self.is_rest = False
        """Whether it is a part of what was searched before and could not be told apart: its first run, in which a few
        stages may make most labels, goes as far as the best plan."""
        self.pricing = 0
        """Labels that the plans priced so far count for."""

    def advance(self, enough_s: float, most_made: int) -> tuple[PricedPlan | None, int]:
        """Run once more, for a plan that takes less than `enough_s`; return it if one is found, and the labels made.

        Plans that are priced as a whole count as `PRICING` labels for each rank that owns something.
        """
        if self.is_hard and not self.was_tightened:
            self.was_tightened = True
            self.least_s = max(self.least_s, self.labels.tightened_s())
            if self.least_s >= enough_s:
                self.is_over = True
                return None, 0
            if self.least_s > self.start_s * (1 + self.width):
                self.start_s, self.width = self.least_s, FIRST_WIDTH
        while self.start_s * (1 + self.width) <= self.least_s:
            self.width *= WIDER
        beam, self.is_searching = self.is_searching, False
        if self.is_rest and not self.is_uneven:
            self._allow_uneven()
        cut_s = enough_s if beam or self.is_rest else min(self.start_s * (1 + self.width), enough_s)
        if beam:
            run = self.labels.beam(cut_s, self.grain_bytes)
        else:
            run = self.labels.run(cut_s, self.grain_bytes, min(most_made, MOST_MADE), unevenly=self.is_uneven)
        first, *others = *islice(run.plans, TRIED), ()
        is_exact = bool(first) and self._fits(first)
        pricing = self.pricing
        tried = [] if self.is_relaxed else [picks for picks in (first, *others) if picks]
        plan, is_first = self._fastest(tried)
        self.exceeds_on_owner = is_exact and bool(tried) and not is_first
        self.least_s = max(self.least_s, run.least_s)
        self.lacks_labels = run.dropped
        if first and not run.dropped and not self.is_rest:
            waiting_s = self.space.waiting_s(self.candidates.load, self.candidates.chosen(first))
            self.waits_for_owner = waiting_s > FIRST_WIDTH * self.least_s
        self.is_hard |= run.made >= HARD_MADE and len(self.candidates.stage_classes) <= MOST_TIGHTENED
        if not beam:
            self._decide(
                run,
                is_last=cut_s >= enough_s,
                has_rival=enough_s < float("inf"),
                complete=bool(first),
                exact=is_exact,
                is_much=self.least_s * (1 + MUCH) < enough_s,
                # What is slower as a whole than labels say, as with owners, would be found by the next run again.
                found=plan is not None and self.candidates.load.samples_per_step / plan.samples_per_s < cut_s,
            )
        return plan, run.made + self.pricing - pricing

    def _decide(
        self, run: Run, *, is_last: bool, has_rival: bool, complete: bool, exact: bool, is_much: bool, found: bool
    ) -> None:
        """Choose the next run: finer, up to a plan that was just found, or wider.

        `has_rival` is whether any plan is known, `complete` whether there was a complete label, `exact` whether the
        first one fits, as its memory says, and `is_much` whether a plan may be faster by `MUCH` than the best known.
        """
        if exact and (not run.dropped or self.exceeds_on_owner):
            self.is_over = True  # What is left is that its fullest rank holds more, or takes longer, than the mean.
        elif complete and not run.dropped and (self.waits_for_owner or (self.is_rest and self.is_relaxed)):
            self.is_over = True  # What memory is rounded by matters less than what other points say.
        elif complete and not run.dropped:
            self.finer += 1
            self.grain_bytes /= FINER
            self.is_over = self.finer > FINEST
        elif found:
            self.is_over = is_last and run.dropped
        else:
            # A wider run would lack still more labels, unless bounds become tighter first.
            lacks = run.dropped and has_rival and (self.was_tightened or not self.is_hard)
            if lacks and is_much and not self.is_uneven:
                self._allow_uneven()
                return
            self.is_over = is_last or self.width >= WIDEST or lacks
            self.width *= WIDER if run.made < FEW_MADE else SLIGHTLY_WIDER
            self.is_searching = run.made >= MANY_MADE and not self.was_searched
            self.was_searched |= self.is_searching

    def _allow_uneven(self) -> None:
        """Let a few stages make most labels, of memory that is rounded more, of which there are half as many."""
        self.is_uneven = True
        self.grain_bytes *= FINER

    def _fits(self, picks: Picks) -> bool:
        """Return whether a plan fits on the mean rank, and on the owner of a spanning operator."""
        on_ranks = self.candidates, *self.candidates.on_owners
        return all(
            peak_memory(some.picked(picks), some.load).total_bytes + some.owned_bytes <= self.limit_bytes
            for some in on_ranks
        )

    def _fastest(self, tried: Sequence[Picks]) -> tuple[PricedPlan | None, bool]:
        """Return the fastest of some plans that fits as a whole, and whether the first does; they are by rising sum of
        seconds on the mean rank."""
        best: PricedPlan | None = None
        in_vain, first_fits = 0, False
        for place, picks in enumerate(tried):
            samples, options = self.candidates.load.samples_per_step, self.candidates.picked(picks)
            total_s = step_time(options, self.candidates.load).total_s
            if best and samples / total_s <= best.samples_per_s:
                if samples / (total_s - rest_s((option.parts, 1) for option in options)) <= best.samples_per_s:
                    break
                continue
            plan = self._priced(picks)
            first_fits |= place == 0 and plan is not None
            if plan and (best is None or plan.samples_per_s > best.samples_per_s):
                best, in_vain = plan, 0
            elif best is not None:
                in_vain += 1
                if in_vain == MOST_IN_VAIN:
                    break
        return best, first_fits

    def _priced(self, picks: Picks) -> PricedPlan | None:
        """Return a plan as a whole, if it fits."""
        found = self.candidates
        if not self._fits(picks):
            return None
        choices, ranks = found.chosen(picks), found.load.cluster.world_size
        owned = any(strategy.spec.has_owner for choice in choices for strategy in choice.strategies)
        self.pricing += PRICING * (ranks if owned else 1)
        plan = priced(self.space, found.load, choices, found.spanning, self.limit_bytes)
        return plan.as_run(self.limit_bytes) if plan.peak.total_bytes <= self.limit_bytes else None
