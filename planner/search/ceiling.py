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

from planner.cost.stage_costs import StageCosts
from planner.cost.stage_option import StageOption, launched
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.search.knapsack import least_cost, upgrades
from profiler.model_graph import Recompute


def fewest_s(space: Space, load: Workload, limit_bytes: float) -> float | None:
    """Return seconds that no plan's step is below, or None if no plan fits."""
    seconds, items, held = 0.0, list[tuple[float, float]](), load.fixed_bytes
    offered = [space.offered(stage_class, load) for stage_class in range(len(space.examples))]
    at_least = [_least(options) for options in offered]
    for index, stage_class in enumerate(space.stage_classes):
        options, costs = offered[stage_class], space.costs(stage_class, (), load)
        rest, optimizer_s, unit_launch_s, again = at_least[stage_class]
        # The cheapest first: one that takes longer and saves less is in no better plan.
        modes = sorted((load.accumulation * _computing_s(costs, mode, *unit_launch_s), mode) for mode in again)
        seconds += modes[0][0] + optimizer_s
        if index + 1 < len(space.stage_classes):
            points = [(-costs.memory(mode).saved[-1], cost - modes[0][0]) for cost, mode in modes]
            held += rest - points[0][0]
            items += [(gain, cost) for _, gain, cost in upgrades(points)]
        else:
            local = ((space.costs(stage_class, choice.counts, load), option) for choice, option in options)
            held += min(option.rest + option.highest_bytes(at) for at, option in local)
    again_s = least_cost(items, held - limit_bytes - 1.0)  # one byte for the rounding of the sums
    return None if again_s is None else seconds + again_s


def _computing_s(
    costs: StageCosts, recompute: Recompute, forward_unit_launch_s: float, backward_unit_launch_s: float
) -> float:
    """Return seconds that no option's computing is below, waiting for the host included: a sum over segments of the
    longer of two is at least the longer of their sums.
    """
    more_s = costs.launch_again_s(recompute)
    forward_launch_s = sum(costs.forward_launch_s) + forward_unit_launch_s + more_s[0]
    backward_launch_s = sum(costs.backward_launch_s) + backward_unit_launch_s + more_s[1]
    computing_s = sum(costs.forward_s), sum(costs.backward_s) + costs.again_s(recompute, True)
    forward_s, backward_s, _ = launched(*computing_s, forward_launch_s, backward_launch_s)
    return float(forward_s + backward_s)


def _least(
    options: Sequence[tuple[StageDecision, StageOption]],
) -> tuple[int, float, tuple[float, float], list[Recompute]]:
    """Return the least bytes at rest, seconds of the optimizer, and seconds of launching units in forward and backward,
    of any option, and what they recompute.
    """
    rest = min(option.rest for _, option in options)
    optimizer_s = min(option.constants["optimizer_s"] for _, option in options)
    launches = ([sum(of_run) for of_run in zip(*(r.unit_launch_s for r in o.runs), strict=True)] for _, o in options)
    forward_s, backward_s = map(min, zip(*launches, strict=True))
    return rest, optimizer_s, (forward_s, backward_s), sorted({option.recompute for _, option in options})
