"""A bound on the plans of one workload that needs no candidates: computation, and the activations of whole stages.

With f_j and b_j the seconds of stage j's forward and backward in a step (or in which the host launches them, where that
is longer), d_j the activations that recomputing it saves, r_j the seconds that it costs at least, and x_j whether it is
recomputed, every step takes at least the time of computation and optimizer,

    step >= sum_j (f_j + b_j + optimizer_j) + min { sum_j r_j x_j : sum_j d_j x_j >= excess, 0 <= x_j <= 1 }

(of a stage that may be recomputed selectively, j stands for each step of `planner.search.knapsack.upgrades`),

where `excess` is what is held above the limit in the last stage if nothing is recomputed, with every number the least
that any choice of the stage needs.  Communication is left out, so this says little of small micro-batches.  But it
rules out most of the large ones, for a hundredth of the time that their candidates take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.stage_costs import StageCosts
from planner.cost.stage_option import StageOption, launched
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.search.knapsack import least_cost, upgrades
from profiler.model_graph import Recompute


class Ceiling:
    """The bound of each workload, within one limit."""

    def __init__(self, space: Space, limit_bytes: float) -> None:
        self.space, self.limit_bytes = space, limit_bytes
        self._at_least = dict[int, _Least]()
        """By the options of a class of stages, which many workloads share, and the space keeps."""

    def fewest_s(self, load: Workload) -> float | None:
        """Return seconds that no plan's step is below, or None if no plan fits."""
        space, seconds, items, held = self.space, 0.0, list[tuple[float, float]](), load.fixed_bytes
        offered = [space.offered(stage_class, load) for stage_class in range(len(space.examples))]
        of_class = []
        for stage_class, options in enumerate(offered):
            if id(options) not in self._at_least:
                self._at_least[id(options)] = _least(options)
            least, costs = self._at_least[id(options)], space.stage_costs(stage_class, load)
            # The cheapest first: one that takes longer and saves less is in no better plan.
            launches = least.forward_launch_s, least.backward_launch_s
            modes = sorted((load.accumulation * computing_s(costs, mode, *launches), mode) for mode in least.again)
            points = [(-costs.memory(mode).kept, cost - modes[0][0]) for cost, mode in modes]
            more = [(gain, cost) for _, gain, cost in upgrades(points)]
            of_class.append((modes[0][0] + least.optimizer_s, least.rest - points[0][0], more))
        *below, top = space.stage_classes
        for stage_class in below:
            step_s, kept, more = of_class[stage_class]
            seconds, held, items = seconds + step_s, held + kept, items + more
        seconds += of_class[top][0]
        local = ((space.costs(top, choice.counts, load), option) for choice, option in offered[top])
        held += min(option.rest + option.highest_bytes(at) for at, option in local)
        again_s = least_cost(items, held - self.limit_bytes - 1.0)  # one byte for the rounding of the sums
        return None if again_s is None else seconds + again_s


def computing_s(
    costs: StageCosts, recompute: Recompute, forward_unit_launch_s: float = 0.0, backward_unit_launch_s: float = 0.0
) -> float:
    """Return seconds that no option's computing is below, waiting for the host included, and for copies of what is
    offloaded: a sum over segments of the longer of two is at least the longer of their sums.
    """
    more_s = costs.launch_again_s(recompute)
    forward_launch_s = sum(costs.forward_launch_s) + forward_unit_launch_s + more_s[0]
    backward_launch_s = sum(costs.backward_launch_s) + backward_unit_launch_s + more_s[1]
    computing_s = sum(costs.forward_s), sum(costs.backward_s) + costs.again_s(recompute, True)
    forward_s, backward_s, _ = launched(*computing_s, forward_launch_s, backward_launch_s)
    return float(forward_s + backward_s) + sum(costs.copy_waits_s(recompute, is_whole=False))


@dataclass(frozen=True)
class _Least:
    """The least of any option of a class of stages, at all micro-batches."""

    rest: int
    """Bytes at rest."""
    optimizer_s: float
    forward_launch_s: float
    """Of its units."""
    backward_launch_s: float
    again: tuple[Recompute, ...]
    """What they recompute."""


def _least(options: Sequence[tuple[StageDecision, StageOption]]) -> _Least:
    rest = min(option.rest for _, option in options)
    optimizer_s = min(option.constants["optimizer_s"] for _, option in options)
    launches = ([sum(of_run) for of_run in zip(*(r.unit_launch_s for r in o.runs), strict=True)] for _, o in options)
    forward_s, backward_s = map(min, zip(*launches, strict=True))
    return _Least(rest, optimizer_s, forward_s, backward_s, tuple(sorted({option.recompute for _, option in options})))
