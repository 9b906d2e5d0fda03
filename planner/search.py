"""The search: the plan with most samples per second within a memory limit, and a proof of how good.

The outer sweep runs over points (micro-batch, accumulation, strategy of the spanning operators).
Each point gets an upper bound on its samples per second from `planner.bound`, first a quick one.
Points are taken from the highest bound down; one whose bound was quick gets the full one and goes
back; for one whose bound is full the integer program finds a plan (and so does pricing), local search
improves it and the pure cost functions evaluate it again.  When the highest bound is not above the
best plan found, the rest cannot be better and is left out.  Plans that replicate everything are run by
DistributedDataParallel where they fit so, and have their own search and bound (`planner.replicas`).  So

    gap = 1 - best / max(best, highest remaining bound)

holds for every plan of every point of the sweep.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.baselines import Baseline, baselines
from planner.bound import ChainBound, places_near
from planner.data_parallel import COPY, as_run
from planner.ilp import EXACT_STAGES, CountingProgram, fastest
from planner.memory import MemoryPeak, peak_memory
from planner.option import Option
from planner.polish import Polisher
from planner.replicas import Replicated, fastest_replicated
from planner.space import Menu, Space
from planner.strategy import Strategy, strategies_on
from planner.timing import step_time
from planner.units import check_scalars
from planner.workload import Workload
from profiler.cluster import Cluster
from profiler.errors import OsdpError
from profiler.graph import ModelGraph

EVERY_SIZE_TO = 16
"""Micro-batches up to here are all tried; beyond, steps of about an eighth (throughput is flat)."""
MAX_MICRO_BATCH = 4096
PROVEN = 1e-9
"""A plan this close to its point's bound is optimal, but for rounding."""
CLOSE_ENOUGH = 1e-3
"""A point whose bound is within this of the best plan is not worth another integer program."""

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done."""


@dataclass(frozen=True)
class Task:
    """What the user asked for."""

    graph: ModelGraph
    cluster: Cluster
    limit_bytes: int
    """Per device, reserve included."""
    optimizer: str = "adam"
    global_batch: int | None = None
    """Samples per step of all ranks; None: one micro-batch of any size per step."""
    micro_batch: int | None = None
    """Fixed micro-batch per rank; None: searched."""


@dataclass(frozen=True)
class Found:
    """The best plan of a search."""

    space: Space
    load: Workload
    options: tuple[Option, ...]
    """One per stage in execution order."""
    spanning: Strategy | None
    menu: Menu
    """The options that it was chosen from."""
    samples_per_s: float
    bound_samples_per_s: float
    """No plan of the sweep is faster."""
    baselines: tuple[Baseline, ...]
    points: int
    """Points of the sweep."""
    solved: int
    """Points for which an integer program was solved."""
    search_s: float

    @property
    def gap(self) -> float:
        """Certified relative distance to the fastest plan of the sweep."""
        return max(0.0, 1.0 - self.samples_per_s / self.bound_samples_per_s)


@dataclass(frozen=True)
class _Point:
    """One point of the sweep; ordered by falling bound."""

    load: Workload
    menu: Menu
    chain: ChainBound
    bound: float
    """Upper bound on samples per second."""
    full: bool
    """Whether all moments were priced for it."""
    relaxed: bool
    """Whether the spanning operators' strategy is still open."""

    def __lt__(self, other: _Point) -> bool:
        return self.bound > other.bound

    def tightened(self, limit_bytes: int, floor: float, stage: int | None = None) -> _Point:
        """Return the point with memory priced at all moments, until the bound is below `floor`.

        `stage` is where a plan of this point was seen to peak.
        """
        samples = self.load.samples_per_step
        enough_s = samples / floor if floor else float("inf")
        bound_s = self.chain.bound_s(limit_bytes, places_near(self.menu, stage), enough_s)
        return replace(self, bound=min(self.bound, samples / bound_s), full=True)

    def split(self, space: Space, limit_bytes: int) -> Iterator[_Point]:
        """Yield one point for each strategy of the spanning operators."""
        for spanning in space.spanning_strategies(strategies_on(self.load.cluster)):
            child = _quick_point(space.menu(self.load, spanning), limit_bytes, relaxed=False)
            if child:
                yield replace(child, bound=min(self.bound, child.bound))


def micro_batches(task: Task) -> list[tuple[int, int]]:
    """Return the (micro-batch, accumulation) pairs of the sweep, by growing micro-batch.

    Raises `OsdpError` if the global batch cannot be split as asked.
    """
    world = task.cluster.world_size
    if task.global_batch is not None:
        per_rank, rest = divmod(task.global_batch, world)
        if rest or not per_rank:
            raise OsdpError("the global batch must be a multiple of the number of ranks", got=str(task.global_batch),
                            expected=f"a multiple of {world}",
                            advice=f"--global-batch {max(1, round(task.global_batch / world)) * world}")  # fmt: skip
        sizes = [task.micro_batch] if task.micro_batch else range(1, per_rank + 1)
        pairs = [(size, per_rank // size) for size in sizes if per_rank % size == 0]
        if not pairs:
            raise OsdpError("the micro-batch does not divide the global batch", got=str(task.micro_batch),
                            expected=f"a divisor of {per_rank} ({task.global_batch} over {world} ranks)")  # fmt: skip
        return pairs
    if task.micro_batch:
        return [(task.micro_batch, 1)]
    sizes, size = [], 1
    while size <= MAX_MICRO_BATCH:
        sizes.append(size)
        size += 1 if size < EVERY_SIZE_TO else max(1, size // 8)
    return [(size, 1) for size in sizes]


def search(task: Task, progress: Progress = lambda what, fraction: None) -> Found:
    """Return the fastest plan within the limit.

    Raises `OsdpError` if nothing fits, with the smallest limit that would do and who needs it, or if
    a parameter has no dimension.
    """
    started = time.perf_counter()
    for operator in task.graph.operators:
        check_scalars(operator)
    space = Space(task.graph)
    loads = tuple(
        Workload(task.cluster, task.optimizer, task.graph.precision, size, accumulation)
        for size, accumulation in micro_batches(task)
    )
    rivals = baselines(space, loads, task.limit_bytes)
    fitting = [baseline for baseline in rivals if baseline.feasible]
    best = max(fitting, key=lambda b: b.samples_per_s, default=None)
    incumbent = _from_baseline(best, space) if best else None
    replicated = fastest_replicated(space, loads, task.limit_bytes, incumbent.samples_per_s if incumbent else 0.0)
    if replicated.is_faster:
        incumbent = _from_replicated(replicated, space)
    queue = _points(space, loads, task.limit_bytes, progress)
    count = len(queue)
    solved, top = 0, replicated.bound_samples_per_s
    while queue:
        point = heapq.heappop(queue)
        speed = incumbent.samples_per_s if incumbent else 0.0
        if point.bound <= speed * (1 + CLOSE_ENOUGH):
            top = max(top, point.bound)
            break
        if not point.full:
            heapq.heappush(queue, point.tightened(task.limit_bytes, speed))
            continue
        if point.relaxed:
            for child in point.split(space, task.limit_bytes):
                heapq.heappush(queue, child)
            continue
        progress("solving", solved / (solved + count))
        solved += 1
        candidate = _solve(point, space, task.limit_bytes)
        if candidate is None:
            top = max(top, point.bound)  # Nothing was found, which proves nothing.
            continue
        if candidate.samples_per_s > speed:
            incumbent = candidate
        peak = peak_memory(candidate.options, point.load)
        top = max(top, point.tightened(task.limit_bytes, 0.0, peak.stage).bound)
    if incumbent is None:
        raise _nothing_fits(space, loads, task)
    progress("done", 1.0)
    return Found(space, incumbent.load, incumbent.options, incumbent.menu.spanning, incumbent.menu,
                 incumbent.samples_per_s,
                 max(top, incumbent.samples_per_s), rivals, count, solved, time.perf_counter() - started)  # fmt: skip


@dataclass(frozen=True)
class _Candidate:
    load: Workload
    options: tuple[Option, ...]
    menu: Menu
    samples_per_s: float


def _quick_point(menu: Menu, limit_bytes: int, relaxed: bool) -> _Point | None:
    """Return a point with memory priced at one moment only; None if memory rules it out."""
    chain, places = ChainBound(menu), places_near(menu, None)
    if any(chain.least_bytes(place) > limit_bytes for place in places):
        return None
    bound_s = chain.dual_s(limit_bytes, places[0], rounds=1)
    return _Point(menu.load, menu, chain, menu.load.samples_per_step / bound_s, full=False, relaxed=relaxed)


def _points(space: Space, loads: Sequence[Workload], limit_bytes: int, progress: Progress) -> list[_Point]:
    """Return the points of the sweep that memory does not rule out, as a heap."""
    points: list[_Point] = []
    for index, load in enumerate(loads):
        progress("bounding", index / len(loads))
        point = _quick_point(space.relaxed_menu(load), limit_bytes, relaxed=bool(space.model.spanning))
        if point:
            points.append(point)
        elif load.accumulation == 1:
            break  # More samples at once never need less memory.
    heapq.heapify(points)
    return points


def _solve(point: _Point, space: Space, limit_bytes: int) -> _Candidate | None:
    """Return the best plan found at a point: from the program, and from pricing where its plan peaks."""
    counted = fastest(point.menu, limit_bytes)
    polisher = Polisher(point.menu, limit_bytes, point.chain)

    def improved(picks: tuple[int, ...]) -> _Candidate:
        options = polisher.options(polisher.improve(picks))
        options = as_run(options, point.menu.spanning, None, space, point.load, limit_bytes)
        speed = point.load.samples_per_step / step_time(options, point.load).total_s
        return _Candidate(point.load, options, point.menu, speed)

    start = counted or CountingProgram.smallest(point.menu)
    stage = peak_memory(start.options, point.load).stage
    priced = polisher.cheapest_fitting(places_near(point.menu, stage)[0])
    starts = [start.picks if polisher.fits(start.picks) else None, priced]
    found = [improved(picks) for picks in starts if picks is not None]
    best = max(found, key=lambda candidate: candidate.samples_per_s, default=None)
    few = len(point.menu.kinds) <= EXACT_STAGES
    if few and (best is None or best.samples_per_s < point.bound * (1 - PROVEN)):
        exact = fastest(point.menu, limit_bytes, exact=True)
        found += [improved(exact.picks)] if exact is not None else []
    return max(found, key=lambda candidate: candidate.samples_per_s, default=None)


def _from_baseline(best: Baseline, space: Space) -> _Candidate:
    menu = space.menu(best.load, best.strategy if space.model.spanning else None)
    return _Candidate(best.load, best.options, menu, best.samples_per_s)


def _from_replicated(best: Replicated, space: Space) -> _Candidate:
    assert best.load is not None, "a plan that is faster is there"
    menu = space.menu(best.load, COPY if space.model.spanning else None)
    return _Candidate(best.load, best.options, menu, best.samples_per_s)


def least_memory(space: Space, load: Workload) -> tuple[MemoryPeak, tuple[Option, ...]]:
    """Return the plan that needs least memory and its peak."""
    best: tuple[MemoryPeak, tuple[Option, ...]] | None = None
    for spanning in space.spanning_strategies(strategies_on(load.cluster)):
        menu = space.menu(load, spanning)
        for options in _small_plans(menu):
            peak = peak_memory(options, load)
            if best is None or peak.total_bytes < best[0].total_bytes:
                best = peak, options
    assert best is not None, "there is at least one strategy"
    return best


def _small_plans(menu: Menu) -> Iterator[tuple[Option, ...]]:
    """Yield plans that need little memory: the program's, and the least at each place that can be priced."""
    smallest = CountingProgram.smallest(menu)
    yield smallest.options
    polisher = Polisher(menu, float("inf"))
    for place in places_near(menu, peak_memory(smallest.options, menu.load).stage):
        memory = polisher.chain.memory(place)
        for price in (1e-9, 1e-6, 1e-3):  # seconds a byte, far above what time is worth
            yield polisher.options(polisher.chain.sequence(memory, price))


def _nothing_fits(space: Space, loads: Sequence[Workload], task: Task) -> OsdpError:
    load = min(loads, key=lambda load: load.micro_batch)
    peak, _ = least_memory(space, load)
    needed = -(-round(peak.total_bytes) // 2**20)
    operator = space.operator_at(peak)
    where = f"in {peak.phase} of {operator.name}" if operator else "in the optimizer step"
    largest = sorted(space.model.graph.operators, key=lambda operator: -operator.numel)[:2]
    parts = sorted(peak.categories.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{name.replace('_', ' ')} {value / 2**20:,.0f} MiB" for name, value in parts)
    return OsdpError(
        "no plan fits the memory limit",
        got=f"{task.limit_bytes / 2**20:,.0f} MiB per device",
        expected=f"at least {needed:,} MiB; the smallest plan (micro-batch {load.micro_batch}) peaks {where}: {shares}",
        advice=f"--mem {needed}MB, more devices, a shorter --seq or a smaller --batch; "
        f"the largest operators are {' and '.join(operator.name for operator in largest)}",
    )
