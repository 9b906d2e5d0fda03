"""The integer program: how many stages of each class take which option.

Variables (r a run of alike stages, k an option of its class)

    n[r, k]     integer, how many of the run's stages take the option; sum_k n[r, k] = length of r
    used[r, k]  0 or 1, whether any does (for runs longer than one; otherwise n itself)

Objective: seconds of a step, in which each option costs what one more stage of it adds to a long run of its own
(`steady_s`); decoding orders the options inside a run.  Who stands beside whom is left to `planner.solve.labels`.

Memory: one row per moment of `planner.cost.peak_memory`.  Inside a run stages are laid out by the change that
their backward makes, gradients less activations, the most negative on top; the memory over a run is
then convex, and highest at the first or last stage of each option.  Rows are written for those, with
the least that neighbours can hold; a moment that the decoded plan still violates is added with what its neighbours
actually hold, and the program is solved again.

PuLP is the modelling layer; HiGHS solves (CBC if it is missing).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, product

import numpy as np
import pulp
from numpy.typing import NDArray

from planner.cost.peak_memory import beside, neighbour_bytes, peak_memory
from planner.cost.stage_option import StageCandidate
from planner.cost.workload import Workload
from planner.options.candidate_set import CandidateSet
from planner.options.option_columns import OptionColumns
from planner.options.pareto import lightest
from planner.solve.overlap_states import INNER, edges_s, faces_of

APART_STAGES = 8
"""Up to this many stages, the plan that needs least memory is sought with every stage a run of its own."""
MANY_RUNS_GAP = 1e-3
"""Relative gap at which the solver may stop on many runs: label setting goes on from there.
Measured on 300 distinct layers: 0.2 s, against more than 15 s for a tenth of it."""
SECONDS = 20.0
"""Time limit of the solver, where the search itself has no shorter one; never reached on the models of the zoo."""
MANY_OPTIONS = 24
"""Of a class of more options, the program gets those that are cheapest at some prices of memory."""
PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Prices of memory at which options are compared, in the whole difference in time for the whole one in bytes."""
FEW_RUNS = 40
"""Up to this many runs, every run gets its memory rows at once (each row is as long as the model)."""
MAX_CUTS = 30
"""Rounds of adding violated moments before the plan is given up as infeasible."""
SMALLEST_CUTS = 3
"""The same rounds for the plan that needs least memory, which is the best of those; eight took 2.5 times as
long on a model of twelve blocks."""
SAME_PEAK = 1e-6
"""Relative difference up to which the program's peak equals the decoded plan's, given the solver's tolerance."""
SOLVED = (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)

Array = NDArray[np.float64]
Terms = dict[pulp.LpVariable, float]


@dataclass(frozen=True)
class Solution:
    """The solver's solution, decoded."""

    options: tuple[StageCandidate, ...]
    """One option per stage in execution order."""
    picks: tuple[int, ...]
    """For each stage, the index of its option among those of its class."""
    objective_s: float
    """Objective of the integer program."""

    def among(self, candidates: CandidateSet, kept: Sequence[Sequence[int]]) -> Solution:
        """Return it with its picks numbered as in the candidates of which only the given ones were kept."""
        return replace(self, picks=tuple(kept[c][k] for c, k in zip(candidates.stage_classes, self.picks, strict=True)))


def steady_s(columns: OptionColumns, load: Workload) -> Array:
    """Return what one more stage of each option adds to the step of a long run of it."""
    faces, every = faces_of(columns.terms), np.arange(len(columns))
    between = edges_s(faces, faces.upward, faces.downward, load)[every, faces.upward_of, faces.downward_of]
    found: Array = faces.windows[:, INNER] + between
    return found


def drift_bytes(option: StageCandidate, load: Workload) -> float:
    """Return by how much live memory grows through a stage's backward."""
    gradients = 0 if load.accumulation > 1 else option.gradients
    return gradients + option.reduced_after_backward - option.saved - option.kept


def make_solver(gap: float, seconds: float) -> pulp.LpSolver:
    """Return HiGHS, or CBC where highspy is missing.

    One thread: HiGHS keeps its threads for the next program, and a process forked after a search would wait for
    threads that it does not have.
    """
    solver = pulp.HiGHS(msg=False, timeLimit=seconds, gapRel=gap, threads=1)
    return solver if solver.available() else pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds, gapRel=gap)


class CountingProgram:
    """Builds and solves the program for one candidate set and one limit."""

    def __init__(self, candidates: CandidateSet, limit_bytes: float | None, apart: bool = False) -> None:
        """`apart` makes every stage a run of its own."""
        self.candidates, self.load = candidates, candidates.load
        classes = candidates.stage_classes
        alike = [[c] for c in classes] if apart else [list(run) for _, run in groupby(classes)]
        self.runs = [(run[0], len(run)) for run in alike]
        self.gap = 0.0 if len(self.runs) <= FEW_RUNS else MANY_RUNS_GAP
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self.limit: pulp.LpVariable | float = self.problem.add_variable("limit_mib", 0)
        if limit_bytes is not None:
            self.limit = float(limit_bytes - self.load.fixed_bytes)
        self._options = {c: tuple(candidates.options[c]) for c in dict.fromkeys(classes)}
        """By class: rows go through all options again and again, which are made when a list is asked for them."""
        self.count: list[list[pulp.LpVariable]] = []
        self.used: list[list[pulp.LpVariable]] = []
        self.with_rows: set[int] = set()
        """Runs of one stage whose rows have been added."""
        for r, (_, length) in enumerate(self.runs):
            self._add_run(r, range(len(self.options(r))), length)

    def _add_run(self, r: int, options: range, length: int) -> None:
        count = [self.problem.add_variable(f"n_{r}_{k}", 0, length, pulp.LpInteger) for k in options]
        self.problem += pulp.LpAffineExpression([(n, 1) for n in count]) == length
        used = count
        if length > 1:
            used = [self.problem.add_variable(f"used_{r}_{k}", 0, 1, pulp.LpInteger) for k in options]
            for n, u in zip(count, used, strict=True):
                self.problem += pulp.LpAffineExpression([(n, 1), (u, -length)]) <= 0
        self.count.append(count)
        self.used.append(used)

    def options(self, r: int) -> Sequence[StageCandidate]:
        """Return the options of a run."""
        return self._options[self.runs[r][0]]

    def _of_each(self, value: Callable[[int, StageCandidate], float]) -> Terms:
        """Return value(run, option) as the terms in the counts of all options of all runs."""
        runs = range(len(self.runs))
        return {n: value(r, option) for r in runs for n, option in zip(self.count[r], self.options(r), strict=True)}

    # --- objective ---

    def minimise_time(self) -> None:
        """Set the objective to the seconds of a step."""
        seconds = [steady_s(columns, self.load).tolist() for columns in self.candidates.columns]
        pairs = zip(self.runs, self.count, strict=True)
        terms = {n: cost for (c, _), count in pairs for n, cost in zip(count, seconds[c], strict=True)}
        self.problem.setObjective(_expression(terms))

    # --- memory ---

    def limit_memory(self) -> None:
        """Add the optimizer's row and the rows of every run's ends."""
        self._at_most_limit(self._of_each(lambda r, option: option.rest + option.stepped + option.updates))
        # Of many runs only the last two can be expected to matter; the others are added when violated.
        first = 0 if len(self.runs) <= FEW_RUNS else len(self.runs) - 2
        for r in range(first, len(self.runs)):
            if self.runs[r][1] == 1:
                self._add_single_rows(r)
            else:
                for k in range(len(self.options(r))):
                    self._add_run_rows(r, k)

    def _base(self, r: int, forward: bool) -> Terms:
        """Return what other runs hold while run `r` executes, and what every stage holds at rest."""

        def held(q: int, option: StageCandidate) -> float:
            is_reduced = q > r and not forward
            total = float(option.rest)
            total += option.kept_for(forward) if q < r else 0.0
            total += option.gradients if self.load.accumulation > 1 or is_reduced else 0.0
            return total + (option.reduced_after_backward if is_reduced else 0.0)

        return self._of_each(held)

    def _add_single_rows(self, r: int) -> None:
        self.with_rows.add(r)
        shapes = {moment.sees: moment for option in self.options(r) for moment in option.moments}
        bases = {forward: self._base(r, forward) for forward in {one.phase == "forward" for one in shapes.values()}}
        for sees, moment in sorted(shapes.items(), key=lambda item: item[0]):
            terms = dict(bases[moment.phase == "forward"])
            for n, option in zip(self.count[r], self.options(r), strict=True):
                local = [option.bytes_at(m) for m in option.moments if m.sees == sees]
                _add(terms, {n: max(local, default=0.0)}, 1)
            for q, is_above in ((r + 1, True), (r - 1, False)):
                if 0 <= q < len(self.runs):
                    seen = [neighbour_bytes(moment, *beside(o, is_above)) for o in self.options(q)]
                    _add(terms, dict(zip(self.used[q], seen, strict=True)), 1)
            self._at_most_limit(terms)

    def _limit_steps_of_one(self, solution: Solution) -> None:
        """Add the optimizer's row for the largest tensors of a plan, which it steps apart.

        That for all of them together exists: what exceeds it is the solver's tolerance, which no row can remove.
        """
        sizes = [(size, i) for i, one in enumerate(solution.options) for size in (one.largest, one.second)]
        terms = self._of_each(lambda _, option: option.rest + option.stepped)
        for tensors, (size, place) in zip((2, 1), sorted(sizes, reverse=True), strict=False):
            ends = accumulate(length for _, length in self.runs)
            r, k = next(q for q, end in enumerate(ends) if place < end), solution.picks[place]
            _add(terms, {self.used[r][k]: size}, tensors)
        self._at_most_limit(terms)

    def _layout(self, r: int) -> list[int]:
        """Return the run's options from top to bottom."""
        options = self.options(r)
        return sorted(range(len(options)), key=lambda k: (drift_bytes(options[k], self.load), k))

    def _add_run_rows(self, r: int, k: int) -> None:
        option = self.options(r)[k]
        around = [o for q in (r - 1, r, r + 1) if 0 <= q < len(self.runs) for o in self.options(q)]
        most: dict[bool, float] = {}  # In a forward, and after it: of rows that differ in this number one is enough.
        for moment in option.moments:
            own = option.bytes_at(moment)
            own += sum(min(neighbour_bytes(moment, *beside(o, is_above)) for o in around) for is_above in (True, False))
            forward = moment.phase == "forward"
            most[forward] = max(own, most.get(forward, own))
        for forward, own in most.items():
            self._at_most_limit(self._moment_terms(r, k, forward, own, first=True))
            if drift_bytes(option, self.load) > 0 and not forward:
                self._at_most_limit(self._moment_terms(r, k, False, own, first=False))

    def _moment_terms(self, r: int, k: int, forward: bool, own: float, first: bool) -> Terms:
        """Return the memory at a moment of the topmost (`first`) or of the lowest stage that takes option k."""
        terms, options, layout = self._base(r, forward), self.options(r), self._layout(r)
        accumulates = self.load.accumulation > 1
        place = layout.index(k)
        for position, other in enumerate(layout):
            option, n = options[other], self.count[r][other]
            above = position < place or (other == k and not first)
            reduced = 0.0 if accumulates or forward else float(option.gradients)
            reduced += 0.0 if forward else option.reduced_after_backward
            held = reduced if above else option.kept_for(forward)
            _add(terms, {n: held}, 1)
            if other == k:
                _add(terms, {self.used[r][k]: own - held}, 1)
        return terms

    def _at_most_limit(self, terms: Terms) -> None:
        # In MiB: rows in bytes next to rows in seconds would be badly scaled.
        row = _expression({n: value / 2**20 for n, value in terms.items()})
        limit = self.limit / 2**20 if isinstance(self.limit, float) else self.limit
        self.problem += row - limit <= 0 if isinstance(limit, pulp.LpVariable) else row <= limit

    # --- solving ---

    def solve(self, limit_bytes: float, ends_at: float = float("inf")) -> Solution | None:
        """Return the best plan within the limit, or None if none was found until `ends_at` (`time.perf_counter`)."""
        self.limit_memory()
        for _ in range(MAX_CUTS):
            left_s = ends_at - time.perf_counter()
            if left_s <= 0:
                return None
            self.problem.solve(make_solver(self.gap, min(SECONDS, left_s)))
            solution = self._decode()
            if solution is None:
                return None
            peak = peak_memory(solution.options, self.load)
            if peak.total_bytes <= limit_bytes:
                return solution
            self._cut_off(solution, limit_bytes)
        return None

    @classmethod
    def smallest(cls, candidates: CandidateSet, below_bytes: float = float("inf")) -> Solution | None:
        """Return a plan that needs about the least memory, None if all need as much; its objective means nothing."""
        kept = [lightest(columns) for columns in candidates.columns]
        program = cls(candidates.only(kept), None, apart=len(candidates.stage_classes) <= APART_STAGES)
        program.problem.setObjective(pulp.LpAffineExpression([(program.limit, 1)]))
        if below_bytes < float("inf"):
            assert isinstance(program.limit, pulp.LpVariable)
            program.limit.bounds(0, max(0.0, below_bytes - candidates.load.fixed_bytes) / 2**20)
        program.limit_memory()
        best: tuple[float, Solution] | None = None
        for _ in range(SMALLEST_CUTS):
            program.problem.solve(make_solver(program.gap, SECONDS))
            solution = program._decode()
            if solution is None:
                break
            peak = peak_memory(solution.options, candidates.load)
            if best is None or peak.total_bytes < best[0]:
                best = peak.total_bytes, solution
            claimed_bytes = solution.objective_s * 2**20 + candidates.load.fixed_bytes
            if peak.total_bytes <= claimed_bytes * (1 + SAME_PEAK):
                break
            program._cut_off(solution, claimed_bytes)
        return best[1].among(candidates, kept) if best is not None else None

    def _decode(self) -> Solution | None:
        """Lay the counts out as one option per stage; None if the solver found none."""
        if self.problem.sol_status not in SOLVED:
            return None
        picks: list[int] = []
        for r, (_, length) in enumerate(self.runs):
            from_top = [k for k in self._layout(r) for _ in range(round(self.count[r][k].value() or 0))]
            if len(from_top) != length:
                return None  # Out of time without a plan, though the status is "feasible".
            picks += reversed(from_top)
        return Solution(self.candidates.picked(picks), tuple(picks), pulp.value(self.problem.objective))

    def _cut_off(self, solution: Solution, limit_bytes: float) -> None:
        """Add the moment at which the decoded plan exceeds the limit."""
        peak = peak_memory(solution.options, self.load)
        if peak.stage is None:
            self._limit_steps_of_one(solution)
            return
        starts = [sum(length for _, length in self.runs[:r]) for r in range(len(self.runs))]
        r = max(i for i, start in enumerate(starts) if start <= peak.stage)
        if self.runs[r][1] == 1 and r not in self.with_rows:
            self._add_single_rows(r)
            return
        k = solution.picks[peak.stage]
        same = [i for i in range(starts[r], starts[r] + self.runs[r][1]) if solution.picks[i] == k]
        forward, first = peak.phase == "forward", peak.stage == same[-1]
        # What the stage itself holds is the peak less what the row has for all others.
        others = self._moment_terms(r, k, forward, 0.0, first)
        elsewhere = sum(value * (n.value() or 0.0) for n, value in others.items())
        own = peak.total_bytes - self.load.fixed_bytes - elsewhere
        self._at_most_limit(self._moment_terms(r, k, forward, own, first))


def _add(terms: Terms, more: Terms, factor: float) -> None:
    for variable, value in more.items():
        terms[variable] = terms.get(variable, 0.0) + factor * value


def _expression(terms: Terms) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression([(variable, value) for variable, value in terms.items() if value])


def supported(columns: OptionColumns, load: Workload) -> list[int]:
    """Return the options of a class that are cheapest at some prices of memory: those that the program needs.

    Memory has a price at the first moment of backward, at the last, and at the stage's own highest.
    """
    last, highest = columns.gradients + columns.late, np.max([*columns.highest.values()], axis=0)
    rows = [steady_s(columns, load), columns.rest + columns.saved, columns.rest + last, highest]
    numbers = np.column_stack(rows) - np.min(rows, axis=1)
    most = numbers.max(axis=0)
    prices = np.array([(1.0, *some) for some in product(PRICES, repeat=3)])
    cheapest = np.argmin(prices @ (numbers / np.where(most > 0, most, 1.0)).T, axis=1)
    return sorted({int(k) for k in cheapest})


def fastest(candidates: CandidateSet, limit_bytes: float, ends_at: float = float("inf")) -> Solution | None:
    """Return the fastest plan of the candidates within a limit, or None if none that fits is found until `ends_at`."""
    kept = [
        supported(columns, candidates.load) if len(columns) > MANY_OPTIONS else list(range(len(columns)))
        for columns in candidates.columns
    ]
    program = CountingProgram(candidates.only(kept), limit_bytes)
    program.minimise_time()
    solution = program.solve(limit_bytes, ends_at)
    return solution and solution.among(candidates, kept)
