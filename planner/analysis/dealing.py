"""What dealing samples by their cost buys where micro-batches are uneven, and what one-sided communication does.

The search runs for each of four tasks: samples dealt as drawn or by their cost (`planner.cost.balanced_waits`), each
without and with the strategies that are only for uneven micro-batches (`StrategySpec.offered`).  All is derived
from the cost model:

    times as fast = samples/s / samples/s as drawn and without                      `Dealing.over`

More strategies to choose from, and samples that are dealt no worse, never make the best plan slower: where a search
that is not exhaustive finds less, the other's plan is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from planner.cost.stragglers import NO_WAITS, Waits
from planner.options.search_space import Space
from planner.problem import Progress, Task
from planner.search.search import Found, loads_of
from planner.strategies.registry import strategies_on
from profiler.errors import OsdpError

Find = Callable[[Task, Space], Found]
"""Finds the plan of a task in a space of its graph and pins; raises OsdpError if there is none."""


@dataclass(frozen=True)
class Dealt:
    """The best plan for one way of dealing samples, without or with strategies for uneven micro-batches."""

    balanced: bool
    """Whether samples are dealt by their cost."""
    for_uneven: bool
    """Whether strategies that are only for uneven micro-batches may be taken."""
    samples_per_s: float | None
    """None if no plan fits."""
    micro_batch: int
    accumulation: int
    waits: Waits
    """How long ranks wait for the slowest at that micro-batch."""


@dataclass(frozen=True)
class Dealing:
    """What dealing samples buys, what strategies for uneven micro-batches do, and both."""

    names: tuple[str, ...]
    """Of the strategies that are only for uneven micro-batches."""
    rows: tuple[Dealt, ...]
    """As drawn, by cost; with those strategies as drawn, by cost."""

    def over(self, row: Dealt) -> float | None:
        """Return how many times as fast a row is as the first; None if either has no plan."""
        first = self.rows[0].samples_per_s
        return None if row.samples_per_s is None or first is None else row.samples_per_s / first


def compare_dealing(task: Task, found: Found, find: Find, progress: Progress = lambda what, fraction: None) -> Dealing:
    """Return what dealing samples by their cost would buy, given what was found for a task with samples as drawn.

    `find` is how that was found, so that all plans are of one kind.
    """
    offered, always = strategies_on(task.cluster, uneven=True), strategies_on(task.cluster)
    names = dict.fromkeys(strategy.spec.name for strategy in offered if strategy not in always)
    space, rows = Space(task.graph, pins=task.pins), list[Dealt]()

    def key(then: Task) -> tuple[bool, bool]:
        """Return what tells the tasks apart: strategies for uneven micro-batches are not offered if none is."""
        return then.imbalance.balanced, any(load.offers_uneven for load in loads_of(then, space))

    results: dict[tuple[bool, bool], Found | None] = {key(task): found}
    for index, (for_uneven, balanced) in enumerate(product((False, True), repeat=2)):
        progress(f"with samples dealt {'by cost' if balanced else 'as drawn'}", index / 4)
        then = replace(task, for_uneven=for_uneven, imbalance=replace(task.imbalance, balanced=balanced))
        if key(then) not in results:
            results[key(then)] = _if_any(find, then, space)
        rows.append(_not_slower(Dealt(balanced, for_uneven, *_result(results[key(then)])), rows))
    return Dealing(tuple(names), tuple(rows))


def _if_any(find: Find, task: Task, space: Space) -> Found | None:
    """Return what is found; what was asked was asked before, so all that can be wrong is that nothing fits."""
    try:
        return find(task, space)
    except OsdpError:
        return None


def _result(found: Found | None) -> tuple[float | None, int, int, Waits]:
    """Return speed, micro-batch, accumulation and waits."""
    if found is None:
        return None, 0, 0, NO_WAITS
    return found.samples_per_s, found.load.micro_batch, found.load.accumulation, found.load.waits


def _not_slower(here: Dealt, rows: Sequence[Dealt]) -> Dealt:
    """Return a row, with the plan of one that may choose among less if that is faster."""
    less = [row for row in rows if row.balanced <= here.balanced and row.for_uneven <= here.for_uneven]
    best = max((here, *less), key=lambda row: row.samples_per_s or 0.0)
    return replace(best, balanced=here.balanced, for_uneven=here.for_uneven)
