"""The search among DistributedDataParallel plans: which blocks to recompute at each micro-batch.

With c_j the seconds that recomputing block j costs in a step of M micro-batches, d_j the activations
that it saves (of a block that may be recomputed selectively, first the step to that, then the step from there to all:
`planner.search.knapsack.upgrades`), and `excess` what the model without recomputation holds above the limit when the
backward of its last stage begins, every plan that fits has

    sum_j c_j x_j >= R = min { sum_j c_j x_j : sum_j d_j x_j >= excess, 0 <= x_j <= 1 }    `_Sizing.least_s`

(the fractional knapsack, filled by c_j / d_j), and so, as a longer backward can hide that much more,

    step >= step without recomputation + R - min(exposed communication, R / M)             `_Sizing.bound_s`

The plan itself recomputes whole blocks in the same order, as few as make it fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from planner.cost.ddp import can_replicate
from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.pricing import Options, PricedPlan, replica
from planner.search.knapsack import least_cost, upgrades
from planner.search.search_space import Space
from planner.strategies.replicate import COPY
from profiler.model_graph import Recompute


def fastest_replicated(
    space: Space, loads: Sequence[Workload], limit_bytes: float, floor: float
) -> tuple[PricedPlan | None, float]:
    """Return the fastest plan of more than `floor` samples per second, and what no such plan exceeds.

    `loads` are by growing micro-batch.
    """
    best, speed, top = None, floor, 0.0
    pinned = space.pins.strategies.values()
    taken = [COPY, *space.idle_strategies(loads[0].cluster), *(strategy for slices in pinned for strategy in slices)]
    is_split = any(len(slices) > 1 for slices in pinned)
    if is_split or not can_replicate(space.graph, taken, loads[0].precision):
        return None, 0.0
    for load in loads:
        sizing = _Sizing(space, load, limit_bytes)
        least_s = sizing.least_s()
        if least_s is None and load.accumulation == 1:
            break  # More samples at once never need less memory.
        bound = 0.0 if least_s is None else load.samples_per_step / sizing.bound_s(least_s)
        if bound <= speed:
            continue
        top = max(top, bound)
        plan = PricedPlan(load, space, COPY if space.model.spanning else None, sizing.fewest_recomputed())
        if plan.options and plan.samples_per_s > speed:
            best, speed = plan, plan.samples_per_s
    return best, top


class _Sizing:
    """Chooses the blocks of a replica to recompute, at one workload."""

    def __init__(self, space: Space, load: Workload, limit_bytes: float) -> None:
        self.load, self.limit_bytes = load, limit_bytes
        self.replica, self.stages = replica(space, load), space.model.stages
        pins = [None if stage.block is None else space.pins.recompute.get(stage.block) for stage in self.stages]
        self.pinned = [pin or Recompute.NOTHING for pin in pins]
        self.plain = self.replica.options(self.pinned)
        steps = list[tuple[float, float, int, Recompute]]()
        every = {mode: self.replica.options([stage.allowed(mode) for stage in self.stages]) for mode in Recompute}
        for j, stage in enumerate(self.stages):
            if stage.block is not None and pins[j] is None:
                own = [every[mode][j] for mode in stage.recomputations]
                points = [(-o.saved, load.accumulation * sum(s.recompute_s for s in o.segments)) for o in own]
                steps += [(gain, cost, j, stage.recomputations[to]) for to, gain, cost in upgrades(points)]
        # From the bottom: blocks there are recomputed when little else is held.
        self.steps = sorted(steps, key=lambda step: step[1] / step[0])
        """Steps of recomputing more: (bytes that it saves, seconds that it costs, stage, what is recomputed then)."""

    def excess_bytes(self) -> float:
        """Return what is held above the limit when the last stage's backward begins and nothing is recomputed."""
        held = float(sum(option.rest for option in self.plain)) + self.load.fixed_bytes + self.replica.buckets
        held += self.replica.gradients if self.load.accumulation > 1 else 0
        held += sum(option.saved for option in self.plain[:-1])
        # Of a last stage that may be recomputed, zero is the only bound that is valid with and without recomputation.
        if self.stages[-1].block is None:
            held += max(m.activations for m in self.plain[-1].moments if m.phase == "backward")
        return held - self.limit_bytes

    def least_s(self) -> float | None:
        """Return R, or None if recomputing everything is not enough."""
        needed = self.excess_bytes() - 1.0  # one byte for the rounding of the sums
        return least_cost([(gain, cost) for gain, cost, *_ in self.steps], needed)

    def bound_s(self, least_s: float) -> float:
        """Return a lower bound on the step time of every plan that fits."""
        time = step_time(self.plain, self.load)
        hidden_s = min(time.exposed_communication_s, least_s / self.load.accumulation)
        return time.total_s + least_s - (hidden_s if self.load.cluster.hides_buckets else 0.0)

    def fewest_recomputed(self) -> Options:
        """Return the options with as few recomputed blocks, taken in order, as fit; none if all do not do."""

        def options(count: int) -> Options:
            chosen = {j: again for _, _, j, again in self.steps[:count]}
            return self.replica.options([chosen.get(j, again) for j, again in enumerate(self.pinned)])

        def fits(count: int) -> bool:
            return peak_memory(options(count), self.load).total_bytes <= self.limit_bytes

        count = bisect_left(range(len(self.steps) + 1), True, key=fits)
        return options(count) if count <= len(self.steps) else ()
