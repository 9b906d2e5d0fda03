"""The search among DistributedDataParallel plans: which blocks to recompute at each micro-batch.

With c_j the seconds that recomputing block j adds to the computing of M micro-batches (where devices wait for their
host, that may be less than it computes), d_j the activations that it saves (of a block that may be recomputed
selectively, first the step to that, then the step from there to all: `planner.search.knapsack.upgrades`), and `excess`
what is held above the limit in the last stage, with the least of its own, if nothing below it is recomputed, every plan
that fits has

    sum_j c_j x_j >= R = min { sum_j c_j x_j : sum_j d_j x_j >= excess, 0 <= x_j <= 1 }    `_Sizing.least_s`

(the fractional knapsack, filled by c_j / d_j), and so, as a longer backward can hide that much more,

    step >= step without recomputation + R - min(exposed communication - L, R / M)         `_Sizing.bound_s`

where L is the reduction of what the first call's backward fills, after which there is nothing to hide under.

The plan itself recomputes whole blocks in the same order, as few as make it fit.  Where that leaves more than
`CLOSE_ENOUGH`, blocks are whole in R too, and plans that save enough are priced by rising R of their own.  Where there
are few combinations of what is recomputed, all are, until the bound says that no other is faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from math import prod

from planner.cost.ddp import can_replicate
from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import StepTime, step_time
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.pricing import Options, PricedPlan
from planner.search.knapsack import least_cost, upgrades, whole_choices
from planner.strategies.replicate import COPY
from profiler.model_graph import Recompute

Recomputed = tuple[Recompute, ...]
"""What is recomputed of every stage."""

FEW_PLANS = 250
"""So many combinations of what is recomputed are looked at one by one: five blocks with three kinds of each."""
CLOSE_ENOUGH = 5e-4
"""Share of a plan's speed up to which the bound may be above it: less is not worth to look at whole blocks."""
MOST_CHOICES = 2_000
"""Of what is recomputed of some stages, choices that may be left to compare; more, where hundreds of blocks differ."""
TRIED = 100
"""Of the choices for all stages, so many are priced at most."""
ROUNDING = 1e-9
"""Relative rounding of sums."""


def fastest_replicated(
    space: Space, loads: Sequence[Workload], limit_bytes: float, floor: float
) -> tuple[PricedPlan | None, float]:
    """Return the fastest plan of more than `floor` samples per second, and what no such plan exceeds.

    `loads` are by growing micro-batch.
    """
    pinned = space.pins.strategies.values()
    taken = [COPY, *space.idle_strategies(loads[0].cluster), *(strategy for slices in pinned for strategy in slices)]
    is_split = any(len(slices) > 1 for slices in pinned)
    if is_split or not can_replicate(space.graph, taken, loads[0].precision):
        return None, 0.0
    sizings = list[tuple[float, _Sizing]]()
    for load in loads:
        sizing = _Sizing(space, load, limit_bytes)
        least_s = sizing.least_s()
        if least_s is not None:
            sizings.append((load.samples_per_step / sizing.bound_s(least_s), sizing))
        elif load.accumulation == 1:
            break  # More samples at once never need less memory.
    best, speed, top = None, floor, 0.0
    for bound, sizing in sorted(sizings, key=lambda pair: -pair[0]):
        if bound <= speed:
            break
        found = sizing.fastest()
        if found is None:
            bound_s, found = sizing.whole_blocks(speed)
            top = max(top, min(bound, sizing.load.samples_per_step / bound_s))
        plan = PricedPlan(sizing.load, space, COPY if space.model.spanning else None, found)
        if plan.options and plan.samples_per_s > speed:
            best, speed = plan, plan.samples_per_s
    return best, max(top, speed if best else 0.0)


class _Sizing:
    """Chooses the blocks of a replica to recompute, at one workload."""

    def __init__(self, space: Space, load: Workload, limit_bytes: float) -> None:
        self.load, self.limit_bytes = load, limit_bytes
        self.replica, self.stages = space.replica(load), space.model.stages
        pins = [None if stage.block is None else space.pins.recompute.get(stage.block) for stage in self.stages]
        self.pinned = [pin or Recompute.NOTHING for pin in pins]
        by_stage = [space.modes(stage_class, load) for stage_class in space.stage_classes]
        self.offered = [modes if pin is None else (pin,) for modes, pin in zip(by_stage, pins, strict=True)]
        """What may be recomputed of every stage, first the least."""
        steps = list[tuple[float, float, int, Recompute]]()
        for j, (modes, costs) in enumerate(zip(self.offered, self.replica.costs, strict=True)):
            points = [
                (-costs.saved_bytes(mode), load.accumulation * self.replica.computing_s(j, mode)) for mode in modes
            ]
            steps += [(gain, cost, j, modes[to]) for to, gain, cost in upgrades(points)]
        # From the bottom: blocks there are recomputed when little else is held.
        self.steps = sorted(steps, key=lambda step: step[1] / step[0])
        """Steps of recomputing more: (bytes that it saves, seconds that it costs, stage, what is recomputed then)."""

    @cached_property
    def plain(self) -> StepTime:
        """The step in which nothing is recomputed but what is pinned."""
        return step_time(self.replica.options(self.pinned), self.load)

    def excess_bytes(self) -> float:
        """Return what is held above the limit in the last stage if nothing below it is recomputed, with the least that
        any choice of that stage holds itself.
        """
        parameters, costs = self.replica.parameters, self.replica.costs
        held = float(parameters.rest + parameters.buckets) + self.load.fixed_bytes
        held += parameters.gradients if self.load.accumulation > 1 else 0
        held += sum(one.saved_bytes(mode) for one, mode in zip(costs[:-1], self.pinned[:-1], strict=True))
        last = map(costs[-1].memory, self.offered[-1])
        return held + min(max(*one.backward_peak, *one.again_peak, 0.0) for one in last) - self.limit_bytes

    def least_s(self) -> float | None:
        """Return R, or None if recomputing everything is not enough."""
        needed = self.excess_bytes() - 1.0  # one byte for the rounding of the sums
        below = [(gain, cost) for gain, cost, j, _ in self.steps if j < len(self.stages) - 1]
        return least_cost(below, needed)

    def bound_s(self, least_s: float) -> float:
        """Return a lower bound on the step time of every plan that recomputes for so long or longer."""
        time = self.plain
        hideable_s = max(0.0, time.exposed_communication_s - self.replica.last_reduction_s)
        hidden_s = min(hideable_s, least_s / self.load.accumulation)
        return time.total_s + least_s - (hidden_s if self.load.cluster.hides_buckets else 0.0)

    def fastest(self) -> Options | None:
        """Return the options of the fastest plan, none if none fits; None if there are too many to look at."""
        if prod(map(len, self.offered)) > FEW_PLANS:
            return None
        least_s, plans = self.least_s() or 0.0, list[tuple[float, Recomputed]]()
        for recompute in product(*self.offered):
            more_s = sum(self._more_s(j, mode) for j, mode in enumerate(recompute))
            plans += [(more_s, recompute)] if more_s >= least_s * (1 - ROUNDING) else []
        return self._fastest(sorted(plans), ())

    def _fastest(self, plans: Iterable[tuple[float, Recomputed]], best: Options) -> Options:
        """Return the fastest of some options and of the plans that fit, by the seconds that these recompute for."""
        best_s = step_time(best, self.load).total_s if best else float("inf")
        for more_s, recompute in plans:
            if self.bound_s(more_s) >= best_s:
                break
            options = self.replica.options(recompute)
            if peak_memory(options, self.load).total_bytes <= self.limit_bytes:
                total_s = step_time(options, self.load).total_s
                best, best_s = (options, total_s) if total_s < best_s else (best, best_s)
        return best

    def whole_blocks(self, floor: float) -> tuple[float, Options]:
        """Return what no step is shorter than, and the options of the fastest plan that was found, none if none fits.

        Plans of `floor` samples per second and less are of no use.
        """
        best, least_s = self.fewest_recomputed(), self.bound_s(self.least_s() or 0.0)
        best_s = step_time(best, self.load).total_s if best else float("inf")
        samples = self.load.samples_per_step
        if samples / least_s <= max(floor, samples / best_s * (1 + CLOSE_ENOUGH)):
            return least_s, best
        groups = [
            [(self._saved_bytes(j, mode), self._more_s(j, mode)) for mode in modes]
            for j, modes in enumerate(self.offered[:-1])
        ]
        choices = whole_choices(groups, self.excess_bytes() - 1.0, MOST_CHOICES)
        if not choices:
            return least_s, best

        def recomputed(numbers: Sequence[int]) -> Recomputed:
            return tuple(offered[number] for offered, number in zip(self.offered, numbers, strict=False))

        # The last stage may have any: of its memory the least counts.
        last = [(self._more_s(len(self.stages) - 1, mode), mode) for mode in self.offered[-1]]
        plans = sorted(
            (below_s + more_s, (*recomputed(below), mode)) for below_s, below in choices for more_s, mode in last
        )
        return max(least_s, self.bound_s(plans[0][0])), self._fastest(plans[:TRIED], best)

    def _saved_bytes(self, number: int, mode: Recompute) -> float:
        """Return what recomputing a stage so saves."""
        costs = self.replica.costs[number]
        return float(costs.saved_bytes(self.pinned[number]) - costs.saved_bytes(mode))

    def _more_s(self, number: int, mode: Recompute) -> float:
        """Return the seconds that recomputing a stage so adds to the computing of a step."""
        computing_s = self.replica.computing_s
        return self.load.accumulation * (computing_s(number, mode) - computing_s(number, self.pinned[number]))

    def fewest_recomputed(self) -> Options:
        """Return the options with as few recomputed blocks, taken in order, as fit; none if all do not do."""

        def options(count: int) -> Options:
            chosen = {j: again for _, _, j, again in self.steps[:count]}
            return self.replica.options([chosen.get(j, again) for j, again in enumerate(self.pinned)])

        def fits(count: int) -> bool:
            return peak_memory(options(count), self.load).total_bytes <= self.limit_bytes

        count = bisect_left(range(len(self.steps) + 1), True, key=fits)
        return options(count) if count <= len(self.steps) else ()
