"""The plan that needs least memory: it fits if any plan does, and otherwise is the one that the refusal describes.

The integer program that minimises the peak, and pricing of memory at the moments near it, give plans of each candidate
set.  Sets are taken in order of their lower bound, and plans in order of their estimated peak, which no rank is below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from planner.cost.peak_memory import peak_memory
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.pricing import PricedPlan, priced
from planner.solve.counting_ilp import CountingProgram
from planner.solve.lagrangian_bound import ChainBound, events_near

PRICES = (1e-9, 1e-6, 1e-3)
"""Prices of memory in seconds per byte, so high that time hardly counts."""

T = TypeVar("T")


def smallest_plan(space: Space, load: Workload, limit_bytes: float = float("inf")) -> PricedPlan:
    """Return the plan of one workload that needs least memory, as the runtime executes it within a limit."""

    def smallest_of_set(chain: ChainBound, best: PricedPlan | None) -> PricedPlan | None:
        found = chain.candidates
        return _smallest(
            dict.fromkeys(_small_plans(chain, best.peak.total_bytes if best else float("inf"))),
            lambda picks: peak_memory(found.picked(picks), load).total_bytes,
            lambda picks, _: priced(space, load, found.chosen(picks), found.spanning).as_run(limit_bytes),
            best,
        )

    chains = [ChainBound(space.candidates(load, spanning)) for spanning in space.spanning_offered(load)]
    smallest = _smallest(chains, _least_bytes, smallest_of_set, None)
    assert smallest is not None, "there is at least one strategy, and the program gives one plan"
    return smallest


def _smallest(
    items: Iterable[T],
    least_bytes: Callable[[T], float],
    plan_of: Callable[[T, PricedPlan | None], PricedPlan | None],
    best: PricedPlan | None,
) -> PricedPlan | None:
    """Return the smallest of the best plan yet and those of all items, given a lower bound on each item's."""
    for bound_bytes, item in sorted(((least_bytes(item), item) for item in items), key=lambda pair: pair[0]):
        if best is not None and bound_bytes >= best.peak.total_bytes:
            break
        plan = plan_of(item, best)
        if plan is not None and (best is None or plan.peak.total_bytes < best.peak.total_bytes):
            best = plan
    return best


def smallest_of(space: Space, loads: Sequence[Workload], limit_bytes: float) -> PricedPlan:
    """Return the smallest plan of several workloads, by growing micro-batch."""
    # With a given global batch, smaller micro-batches mean more accumulation, which keeps gradients.
    ends = (loads[0], loads[-1]) if loads[0].accumulation > 1 else loads[:1]
    found = [smallest_plan(space, load, limit_bytes) for load in dict.fromkeys(ends)]
    return min(found, key=lambda smallest: smallest.peak.total_bytes)


def is_ruled_out(space: Space, load: Workload, limit_bytes: float) -> bool:
    """Whether one moment of the step alone proves that no plan fits."""
    return _least_bytes(ChainBound(space.relaxed_candidates(load))) > limit_bytes


def _least_bytes(chain: ChainBound) -> float:
    """Return a lower bound on the peak of every plan of a candidate set."""
    return max(chain.least_bytes(event) for event in events_near(chain.candidates, None))


def _small_plans(chain: ChainBound, below_bytes: float) -> Iterator[tuple[int, ...]]:
    """Yield plans that need little memory: the program's, and those of least memory at events that can be priced.

    None if no plan of the candidate set needs less than so many bytes.
    """
    smallest = CountingProgram.smallest(chain.candidates, below_bytes)
    if smallest is None:
        return
    yield smallest.picks
    for event in events_near(chain.candidates, peak_memory(smallest.options, chain.load).stage):
        memory = chain.memory(event)
        yield from (chain.sequence(memory, price) for price in PRICES)
