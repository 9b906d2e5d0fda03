"""The search: the plan with most samples per second within a memory limit, and a bound on every other plan.

The outer sweep runs over points (micro-batch, accumulation, strategy of the spanning operators; with uneven
micro-batches also whether ranks wait for each other in every micro-batch or only once per step).  Each size of a
micro-batch first gets an upper bound on its samples per second without any candidates (`planner.search.ceiling`), which
is as far as most of them get; each of its points then one from `planner.solve.lagrangian_bound`, first a quick one.
What has the highest bound comes next: a point with a quick bound gets the full one and is put back; the first point
with a full bound gets the integer program, which finds a plan; and then each gets one run of label setting after the
other, which finds better ones and lowers the bound.  Strategies of the spanning operators make points that differ
little.  Where bounds are far above the best plan, labels of all of them together, each stage with any, come first:
they are no plans, but lower the bounds of all.  A point whose best plan fits, or is as fast, on the mean rank alone is
split by what ranks own (`Space.owning`).  Whole plans are priced again by the cost functions.  When the
highest bound is not above the best plan found, nothing that remains can be better, and the search ends.  Plans that
replicate everything are run by DistributedDataParallel where they fit so, and have their own search and bound
(`planner.search.ddp_search`).  So

    gap = 1 - best / max(best, highest remaining bound)

holds for every plan of every point of the sweep.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from planner.cost.workload import Workload
from planner.model.stages import MOST_SHARING
from planner.options.candidate_set import CandidateSet, Owned, Spanning
from planner.options.search_space import Space
from planner.pricing import Options, PricedPlan
from planner.problem import NO_PINS, Progress, Task, micro_batches
from planner.search.baselines import Baseline, baselines
from planner.search.ceiling import Ceiling
from planner.search.ddp_search import fastest_replicated
from planner.search.infeasible import NothingFits, refusal_of
from planner.search.least_memory import smallest_of
from planner.search.simple_plan import simplest
from planner.solve.core_options import core_of
from planner.solve.lagrangian_bound import ChainBound, events_near, highest_event
from planner.solve.misfits import without_misfits
from planner.solve.solve_candidates import MUCH, Widening, has_runs, programmed
from profiler.garbage_collection import without_garbage_collection
from profiler.model_graph import Recompute

MOST_MADE = 1_200_000
"""Labels that a search makes; then the bounds of the remaining points count in the gap.  About 2 us of CPU each."""
PROGRAMS = 4
"""So many points at most get the integer program, all but the first only while no plan is known.  Elsewhere labels that
are cut off at its plan take less time than another program, and find the same plans."""
CLOSE_ENOUGH = 5e-4
"""A point whose bound is within this of the best plan is not worth more work ..."""
MANY_MADE = 100_000
"""... nor is a plan that gains no more, once so many labels were made."""
FEWER_MADE = 200_000
"""Labels of a search for a plan where the last per cents do not matter; while it may be slower than the best by `MUCH`,
there are `MOST_MADE` all the same."""
REST = 1.5
"""How many times as many labels there are as long as points are left that were split by what ranks own: they begin
close to the best plan."""
CORE_MADE = 600_000
"""Labels of a search among few options (`planner.solve.core_options`) that follows where `MUCH` is unproven."""
LABELS_PER_S = 200_000
"""Labels that a run may make for each second that is left of a time limit."""


@dataclass(frozen=True)
class Effort:
    """How plans are looked for, and how long."""

    labels: int = MOST_MADE
    """Labels that may be made (`MUCH` says when there are more); 0: every point gets the integer program alone."""
    seconds: float = float("inf")
    """Time after which the search ends with the best plan so far, and the gap that it has."""
    remedies: bool = True
    """Whether it is looked for what would help where nothing fits, which takes searches of its own."""


@dataclass(frozen=True)
class Found:
    """The best plan of a search."""

    space: Space
    """The space that the plan is priced in: with the operators split that the plan splits."""
    load: Workload
    options: Options
    spanning: Spanning
    samples_per_s: float
    bound_samples_per_s: float
    """No plan of the sweep is faster."""
    baselines: tuple[Baseline, ...]
    points: int
    """Points of the sweep."""
    search_s: float
    simple: PricedPlan | None = None
    """The fastest simple plan (`planner.search.simple_plan`), if it was looked for and one fits."""

    @property
    def gap(self) -> float:
        """Certified relative distance to the fastest plan of the sweep.

        The bound is that of a relaxation, or the solver's dual bound on the exact program; never the solver's status
        "optimal", which it also reports when its time is over.
        """
        return max(0.0, 1.0 - self.samples_per_s / self.bound_samples_per_s)


@dataclass(frozen=True)
class _Size:
    """One micro-batch and accumulation of the sweep, before it has candidates; ordered by falling bound."""

    load: Workload
    bound: float
    """Upper bound on samples per second: `planner.search.ceiling`."""

    def __lt__(self, other: _Size | _Point) -> bool:
        return self.bound > other.bound

    def points(self, space: Space, limit_bytes: int) -> Iterator[_Point]:
        """Yield its points that memory does not rule out."""
        # With uneven micro-batches, plans that synchronise ranks once per step wait less: they get points of their own.
        waits = self.load.waits
        for syncs in (True, False) if waits.per_micro_batch != waits.per_step else (True,):
            candidates = space.relaxed_candidates(self.load, syncs)
            # Plans that recompute none of those that share something hold less than their options say.
            blocks = candidates.shared_by
            counts = range(len(blocks) + 1) if len(blocks) <= MOST_SHARING else (0, len(blocks))
            for sharing in (some for count in counts for some in combinations(blocks, count)):
                if point := _quick_point(candidates.sharing(sharing), limit_bytes, bool(space.model.spanning)):
                    yield replace(point, bound=min(self.bound, point.bound), sharing=sharing)


@dataclass
class _Above:
    """What is known of all strategies of the spanning operators together: a point of each has no better plan."""

    bound: float
    """Upper bound on samples per second."""
    is_hard: bool = False
    """Whether it took labels with tighter bounds to find that."""
    parts: list[_Above] | None = None
    """What is known of all strategies together in each range of what ranks own, if they were split so."""

    @property
    def least(self) -> float:
        """The least that is known to bound all plans."""
        return self.bound if self.parts is None else min(self.bound, max((p.bound for p in self.parts), default=0.0))


@dataclass(frozen=True)
class _Point:
    """One point of the sweep; ordered by falling bound."""

    chain: ChainBound
    bound: float
    """Upper bound on samples per second."""
    full: bool
    """Whether the bound prices memory at all moments."""
    prices: tuple[float, ...]
    """Prices of memory of the bounds, in seconds per byte, on each of `ChainBound.on_ranks`."""
    relaxed: bool
    """Whether the spanning operators' strategy is still open."""
    children: tuple[_Point, ...] | None = None
    """If it is, one point for each strategy but for those that are in the sweep, by falling bound; None: not known."""
    above: _Above | None = None
    """What is known of all strategies together."""
    sharing: tuple[int, ...] = ()
    """Of the blocks that keep what others take that are recomputed, those of which its plans may recompute others."""
    widening: Widening | None = None
    """Its label setting, once the integer program was solved."""
    is_over: bool = False
    """Whether no more can be done for it."""
    owned: Owned | None = None
    """What a rank owns by its plans, if they are those of one range of that (`Space.owning`)."""
    made: int = 0
    """Labels that were made for it."""

    def __lt__(self, other: _Size | _Point) -> bool:
        return self.bound > other.bound or (self.relaxed and self.bound == other.bound)

    def tightened(self, limit_bytes: int, floor: float) -> _Point:
        """Return the point with memory priced at all moments, until the bound is below `floor`."""
        samples = self.chain.load.samples_per_step
        enough_s = samples / floor if floor else float("inf")
        candidates = self.chain.candidates
        below = [event for s in (0, len(candidates.stage_classes) // 2) for event in highest_event(candidates, s)]
        events = (*events_near(candidates, None), *below)
        found = [chain.bound(limit_bytes, events, enough_s) for chain in self.chain.on_ranks]
        bound = min(self.bound, *(samples / bound_s for bound_s, _ in found))
        return replace(self, bound=bound, full=True, prices=tuple(price for _, price in found))

    def split(self, space: Space, limit_bytes: int) -> _Point:
        """Return it with a point for each strategy of the spanning operators."""
        load, syncs, children = self.chain.load, self.chain.candidates.syncs_each_microbatch, list[_Point]()
        above = _Above(self.bound)
        for spanning in space.spanning_offered(load):
            if self.owned is None:
                candidates = space.candidates(load, spanning, syncs)
            else:
                candidates = space.owning(load, spanning, syncs, self.owned)
            if child := _quick_point(candidates.sharing(self.sharing), limit_bytes, False, self.prices[0]):
                bound = min(self.bound, child.bound)
                children.append(replace(child, bound=bound, sharing=self.sharing, above=above, owned=self.owned))
        return replace(self, children=tuple(sorted(children)), above=above)

    def released(self, number: int | None) -> Iterator[_Point]:
        """Yield the first so many of its children, or all, and then what is left of it."""
        assert self.children is not None, "it has been split"
        yield from self.children[:number]
        rest = () if number is None else self.children[number:]
        if rest:
            yield replace(self, children=rest, bound=min(self.bound, rest[0].bound))

    @property
    def least(self) -> float:
        """The least that is known to bound its plans, of all strategies together or by itself."""
        return self.bound if self.above is None else min(self.bound, self.above.least)

    @property
    def is_alone(self) -> bool:
        """Whether it is not one of several of its micro-batch, by strategies of spanning operators or by owners."""
        return not self.relaxed and self.above is None

    @property
    def exceeds_on_owner(self) -> bool:
        """Whether its best plans fit on the mean rank alone, and more could be known of the others."""
        return self.owned is None and self.widening is not None and self.widening.exceeds_on_owner

    @property
    def waits_for_owner(self) -> bool:
        """Whether its best plans take so long on the mean rank alone, and more could be known of the others."""
        return self.owned is None and self.widening is not None and self.widening.waits_for_owner

    def by_owned(self, space: Space, limit_bytes: int) -> list[_Point]:
        """Return one point for each range of what one rank owns."""
        found = list[_Point]()
        mean, is_hard = self.chain.candidates, self.widening is not None and self.widening.is_hard
        for owned in space.owned_ranges(mean.load, in_seconds=not self.exceeds_on_owner):
            candidates = space.owning(mean.load, mean.spanning, mean.syncs_each_microbatch, owned)
            if child := _quick_point(candidates.sharing(self.sharing), limit_bytes, self.relaxed, self.prices[0]):
                bound = min(self.bound, child.bound)
                above = _Above(bound, is_hard)
                found.append(replace(child, bound=bound, sharing=self.sharing, above=above, owned=owned))
        if self.relaxed and self.above is not None:
            self.above.parts = [point.above for point in found if point.above is not None]
        return found

    def advanced(
        self,
        space: Space,
        limit_bytes: int,
        floor: float,
        most_made: int,
        ends_at: float,
        *,
        programs: bool,
        labels: bool,
        core: bool,
    ) -> tuple[_Point, PricedPlan | None, int]:
        """Return the point after a piece of work for plans faster than `floor`, a plan if one was found, and the
        labels that were made for it.

        `programs` is whether it gets the integer program first, which has until `ends_at`, or, where few stages are
        alike and the program takes long, a beam search, and the program if that finds nothing; `labels` whether more
        than the program, `core` whether that is among few of its options.
        """
        samples, widening, made = self.chain.load.samples_per_step, self.widening, 0
        if widening is None:
            chain = without_misfits(self.chain, limit_bytes)
            if chain is None:
                return replace(self, bound=0.0, is_over=True), None, made
            chain = core_of(chain) if core else chain
            beam_first = labels and not has_runs(chain.candidates)
            plan = programmed(chain.candidates, space, limit_bytes, ends_at) if programs and not beam_first else None
            if not labels:
                return replace(self, is_over=True), plan, made
            stage = plan.peak.stage if plan else None
            widening = Widening(chain, space, limit_bytes, samples / self.bound, self.prices, stage)
            widening.is_searching, widening.was_searched = programs, programs or self.relaxed
            widening.is_relaxed, widening.is_rest = self.relaxed, self.owned is not None
            widening.is_hard = self.above is not None and self.above.is_hard
            if programs and beam_first:
                enough_s = samples / floor if floor else float("inf")
                plan, made = widening.advance(enough_s, most_made)
                if plan is None and widening.least_s < enough_s:
                    plan = programmed(chain.candidates, space, limit_bytes, ends_at)
        else:
            widening.least_s = max(widening.least_s, samples / self.bound)
            plan, made = widening.advance(samples / floor if floor else float("inf"), most_made)
        bound = min(self.bound, samples / widening.least_s)
        if self.relaxed and self.above is not None:
            self.above.bound, self.above.is_hard = min(self.above.bound, bound), widening.is_hard
        point = replace(self, bound=bound, widening=widening, is_over=widening.is_over, made=self.made + made)
        return point, plan, made


@without_garbage_collection()  # which would walk through all that torch has imported, up to a third of the time
def search(
    task: Task,
    progress: Progress = lambda what, fraction: None,
    space: Space | None = None,
    material_gain: float | None = None,
    effort: Effort | None = None,
) -> Found:
    """Return the fastest plan within the limit.

    Several searches of one graph with the same pins can share a `space`, whose caches then do.  Given `material_gain`,
    the fastest simple plan is found too, and the search ends when no plan is faster than that by more than this share.
    Raises `OsdpError` if no plan fits, with the smallest limit that is enough and the operators that need it.
    """
    started, effort = time.perf_counter(), effort or Effort()
    space = space or Space(task.graph, pins=task.pins)
    loads = loads_of(task, space)
    rivals = baselines(space, loads, task.limit_bytes)
    uniform = rivals
    if any(Recompute.OFFLOADED in space.modes(stage_class, loads[0]) for stage_class in range(len(space.examples))):
        uniform += baselines(space, loads, task.limit_bytes, offloaded=True)
    fitting = [baseline for baseline in uniform if baseline.feasible and task.pins == NO_PINS]  # they have no pins
    best = max(fitting, key=lambda baseline: baseline.samples_per_s, default=None)
    tied = best.strategy if best and space.model.spanning else None
    incumbent = PricedPlan(best.load, space, tied, best.options) if best else None
    replicated, ddp_top = fastest_replicated(space, loads, task.limit_bytes, best.samples_per_s if best else 0.0)
    plans, simple, enough = [replicated or incumbent], None, 0.0
    if material_gain is not None and best is not None:
        simple = simplest(space, loads, task.limit_bytes, best.load)
        plans.append(simple)
        enough = (1.0 + material_gain) * simple.samples_per_s if simple else 0.0
    known = max(filter(None, plans), key=lambda plan: plan.samples_per_s, default=None)
    queue = _sizes(space, loads, task.limit_bytes)
    count = len(queue)
    sweep = _Sweep(loads, task.limit_bytes, enough, started + effort.seconds, effort.labels, progress)
    plan, top, lacks_labels = sweep.best_first(queue, space, known)
    if lacks_labels and (plan is None or top > max(enough, plan.samples_per_s * (1 + MUCH))):
        plan = sweep.of_core(space, plan)
    if plan is None:
        plan = smallest_of(space, loads, task.limit_bytes)
        if plan.peak.total_bytes > task.limit_bytes:
            raise NothingFits(refusal_of(plan, space, task, remedies=effort.remedies))
    if material_gain is not None and best is None:  # what the simple plan is looked for near is known only now
        simple = simplest(space, loads, task.limit_bytes, plan.load)
    progress("done", 1.0)
    speed, took_s = plan.samples_per_s, time.perf_counter() - started
    bound = max(top, ddp_top, speed)
    return Found(plan.space, plan.load, plan.options, plan.spanning, speed, bound, rivals, count, took_s, simple)


def loads_of(task: Task, space: Space) -> tuple[Workload, ...]:
    """Return the workloads of the sweep, by growing micro-batch; raises OsdpError as `micro_batches` does."""
    settings = task.graph, task.cluster, task.optimizer
    loads = (Workload.of(*settings, *sizes, task.waits(*sizes)) for sizes in micro_batches(task))
    return tuple(space.known_load(replace(load, for_uneven=task.for_uneven)) for load in loads)


@dataclass
class _Sweep:
    """What one search looks for."""

    loads: Sequence[Workload]
    limit_bytes: int
    enough: float
    """Plans of fewer samples per second are of no use."""
    ends_at: float
    """When the time is over, by `time.perf_counter`."""
    labels: int
    """As in `Effort`."""
    progress: Progress
    core: bool = False
    """Whether plans are looked for among few options of each stage: then what no plan exceeds means nothing."""
    had_core: bool = False
    """Whether that was done."""

    def of_core(self, space: Space, incumbent: PricedPlan | None) -> PricedPlan | None:
        """Return the best plan after a search among few options of each stage, the first time."""
        if self.had_core:
            return incumbent
        self.had_core = True
        sweep = replace(self, labels=min(self.labels, CORE_MADE), core=True)
        return sweep.best_first(_sizes(space, self.loads, self.limit_bytes), space, incumbent)[0] or incumbent

    def best_first(
        self, queue: list[_Size | _Point], space: Space, incumbent: PricedPlan | None
    ) -> tuple[PricedPlan | None, float, bool]:
        """Return the best plan, what no plan of the points exceeds in samples per second, and whether with more labels
        there could be a better one.

        If what no plan exceeds is not more than `enough`, it may be of any plan that is known.
        """
        count, solved, programmed_points, made, top, lacks_labels = len(queue), 0, 0, 0, 0.0, False
        while queue:
            point = heapq.heappop(queue)
            speed, left_s = incumbent.samples_per_s if incumbent else 0.0, self.ends_at - time.perf_counter()
            much = bool(self.labels) and not self.core and point.bound > speed * (1 + MUCH)
            most = MOST_MADE if much else self.labels
            if isinstance(point, _Point) and point.owned is not None:
                most = int(most * REST)
            spent = left_s < 0 or (incumbent is not None and made >= most > 0)
            floor = max(speed, self.enough)
            wanted = max(speed * (1 + (CLOSE_ENOUGH if made >= MANY_MADE else 0.0)), self.enough)
            close = speed * (1 + (0.0 if isinstance(point, _Size) else CLOSE_ENOUGH))
            if isinstance(point, _Point) and (point.full or spent) and point.least < point.bound:
                heapq.heappush(queue, replace(point, bound=point.least))
                continue
            if spent or point.bound <= max(close, floor):
                return incumbent, max(top, point.bound), lacks_labels or (spent and self.labels > 0)
            if isinstance(point, _Point) and (cheaper := _cheaper(queue, point, max(close, floor))):
                queue.remove(cheaper)
                heapq.heapify(queue)
                heapq.heappush(queue, point)
                point = cheaper
            is_tried = isinstance(point, _Point) and (point.widening is not None or point.owned is not None)
            can_join = isinstance(point, _Point) and not point.is_over and (much or is_tried)
            if isinstance(point, _Size):
                for found in point.points(space, self.limit_bytes):
                    heapq.heappush(queue, found)
            elif not point.full:
                heapq.heappush(queue, point.tightened(self.limit_bytes, floor))
            elif point.is_over and point.waits_for_owner and much and not self.had_core:
                # With a good plan the labels of what follows are few.
                incumbent = self.of_core(space, incumbent)
                heapq.heappush(queue, point)
            elif point.is_over and (point.exceeds_on_owner or (point.waits_for_owner and not self.core)):
                for child in point.by_owned(space, self.limit_bytes):
                    heapq.heappush(queue, child)
            elif point.relaxed and point.children is None and not (point.owned and can_join):
                heapq.heappush(queue, point.split(space, self.limit_bytes))
            elif point.relaxed and not (can_join and programmed_points and speed):
                # The first one gets a plan, with which labels of all strategies together are few.
                for child in point.released(1 if can_join else None):
                    heapq.heappush(queue, child)
            elif point.is_over:
                top = max(top, point.bound)
                lacks_labels |= point.widening is not None and point.widening.lacks_labels
            else:
                self.progress("solving", solved / (solved + count))
                programs = not self.labels or (
                    point.widening is None
                    and not point.relaxed
                    and (programmed_points == 0 or (not speed and programmed_points < PROGRAMS))
                )
                most_made = int(min(most - made, left_s * LABELS_PER_S))
                how = {"programs": programs, "labels": self.labels > 0, "core": self.core}
                advanced, plan, more = point.advanced(space, self.limit_bytes, wanted, most_made, self.ends_at, **how)
                programmed_points += programs and advanced.bound > 0.0  # else no plan fits, and none was asked for
                solved += 1
                made += more
                heapq.heappush(queue, advanced)
                if plan is not None and plan.samples_per_s > speed:
                    incumbent = plan
        return incumbent, top, lacks_labels


def _cheaper(queue: list[_Size | _Point], point: _Point, floor: float) -> _Point | None:
    """Return the point with the highest bound of those that have taken far fewer labels than one that has taken many:
    with a plan of theirs, its next ones are fewer, and without they cost little.  Points that differ in the strategies
    of spanning operators do not take turns: there are too many, which what is known of all together bounds.
    """
    if point.is_over or not point.is_alone or point.made < MANY_MADE:
        return None
    others = (one for one in queue if isinstance(one, _Point) and one.is_alone and not one.is_over)
    fewer = (one for one in others if one.widening and one.bound > floor and one.made < point.made / 2)
    return min(fewer, default=None)


def _quick_point(candidates: CandidateSet, limit_bytes: int, relaxed: bool, near: float = 0.0) -> _Point | None:
    """Return a point with memory priced at one moment only; None if memory rules it out.

    `near` is a good price of memory for a similar point.
    """
    if not all(candidates.options):
        return None
    chain, events = ChainBound(candidates), events_near(candidates, None)
    if any(on_rank.least_bytes(event) > limit_bytes for on_rank in chain.on_ranks for event in events):
        return None
    bound_s, price = chain.near(limit_bytes, events[0], near) if near else chain.dual(limit_bytes, events[0])
    return _Point(chain, chain.load.samples_per_step / bound_s, full=False, prices=(price,), relaxed=relaxed)


def _sizes(space: Space, loads: Sequence[Workload], limit_bytes: int) -> list[_Size | _Point]:
    """Return the micro-batches of the sweep that memory does not rule out at once, as a heap."""
    sizes: list[_Size | _Point] = []
    ceiling = Ceiling(space, limit_bytes)
    for load in loads:
        step_s = ceiling.fewest_s(load)
        if step_s is not None:
            sizes.append(_Size(load, load.samples_per_step / step_s))
        elif load.accumulation == 1:
            break  # More samples at once never need less memory.
    heapq.heapify(sizes)
    return sizes
