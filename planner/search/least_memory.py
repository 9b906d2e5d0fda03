"""The plan that needs least memory: it fits if any plan does, and otherwise is the one that the refusal describes.

The integer program that minimises the peak, and pricing of memory at the moments near it, give plans of each candidate
set.  Sets are taken in order of their lower bound, and plans in order of their estimated peak; both loops end where the
next cannot be smaller than the best whole plan so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost.peak_memory import MemoryPeak, peak_memory
from planner.cost.workload import Workload
from planner.pricing import PricedPlan, priced
from planner.search.counting_ilp import CountingProgram
from planner.search.lagrangian_bound import ChainBound, events_near
from planner.search.search_space import Space
from profiler.byte_sizes import whole_mib

PRICES = (1e-9, 1e-6, 1e-3)
"""Prices of memory in seconds per byte, so high that time hardly counts."""


@dataclass(frozen=True)
class LeastMemoryPlan:
    """The plan that needs least memory, of those found."""

    candidate: PricedPlan
    peak: MemoryPeak

    @property
    def needed_bytes(self) -> int:
        """The smallest limit that it fits, in whole MiB."""
        return whole_mib(self.peak.total_bytes)


def smallest_plan(space: Space, load: Workload, limit_bytes: float = float("inf")) -> LeastMemoryPlan:
    """Return the plan of one workload that needs least memory, as the runtime executes it within a limit."""
    best: LeastMemoryPlan | None = None
    chains = [ChainBound(space.menu(load, spanning)) for spanning in space.spanning_offered(load)]
    least = {index: _least_bytes(chain) for index, chain in enumerate(chains)}
    for index in sorted(least, key=lambda index: least[index]):
        if best is not None and least[index] >= best.peak.total_bytes:
            break
        found = _smallest_of_menu(space, chains[index], limit_bytes)
        if best is None or found.peak.total_bytes < best.peak.total_bytes:
            best = found
    assert best is not None, "there is at least one strategy"
    return best


def _smallest_of_menu(space: Space, chain: ChainBound, limit_bytes: float) -> LeastMemoryPlan:
    """Return the smallest plan of a candidate set, of those that pricing and the program find."""
    best: LeastMemoryPlan | None = None
    sizes = {picks: peak_memory(chain.menu.picked(picks), chain.load).total_bytes for picks in _small_plans(chain)}
    for picks in sorted(sizes, key=lambda picks: sizes[picks]):
        if best is not None and sizes[picks] >= best.peak.total_bytes:
            break  # No rank holds less than the estimate.
        plan = priced(space, chain.load, chain.menu.chosen(picks), chain.menu.spanning).as_run(limit_bytes)
        found = LeastMemoryPlan(plan, peak_memory(plan.options, chain.load))
        if best is None or found.peak.total_bytes < best.peak.total_bytes:
            best = found
    assert best is not None, "the program gives one plan"
    return best


def smallest_of(space: Space, loads: Sequence[Workload], limit_bytes: float) -> LeastMemoryPlan:
    """Return the smallest plan of several workloads, by growing micro-batch."""
    # With a given global batch, smaller micro-batches mean more accumulation, which keeps gradients.
    ends = (loads[0], loads[-1]) if loads[0].accumulation > 1 else loads[:1]
    found = [smallest_plan(space, load, limit_bytes) for load in dict.fromkeys(ends)]
    return min(found, key=lambda smallest: smallest.peak.total_bytes)


def is_ruled_out(space: Space, load: Workload, limit_bytes: float) -> bool:
    """Whether one moment of the step alone proves that no plan fits."""
    return _least_bytes(ChainBound(space.relaxed_menu(load))) > limit_bytes


def _least_bytes(chain: ChainBound) -> float:
    """Return a lower bound on the peak of every plan of a candidate set."""
    return max(chain.least_bytes(event) for event in events_near(chain.menu, None))


def _small_plans(chain: ChainBound) -> Iterator[tuple[int, ...]]:
    """Yield plans that need little memory: the program's, and those of least memory at events that can be priced."""
    smallest = CountingProgram.smallest(chain.menu)
    yield smallest.picks
    for event in events_near(chain.menu, peak_memory(smallest.options, chain.menu.load).stage):
        memory = chain.memory(event)
        for price in PRICES:
            yield tuple(chain.sequence(memory, price))
