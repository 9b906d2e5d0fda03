"""Memory over a step: the highest moment of each stage's forward and backward, and the optimizer's step.

The highest of them is the peak of `planner.cost.peak_memory`, whose sums these are.
"""

from collections.abc import Sequence

from planner.cost.peak_memory import HeldMoment, MemoryPeak, held_moments, optimizer_moment, peak_at
from planner.cost.stage_option import StageCandidate
from planner.cost.workload import Workload


def memory_over_step(options: Sequence[StageCandidate], load: Workload) -> tuple[MemoryPeak, ...]:
    """Return the highest moments in the order of a step, given one option per stage in execution order.

    Forward by growing stage, backward by falling stage (a recomputed block's second forward is part of its backward),
    then the optimizer.
    """
    runs = [(option, 1) for option in options]
    highest: dict[tuple[bool, int], HeldMoment] = {}
    for held in held_moments(runs, load):
        size_bytes, stage, moment, *_ = held
        key = moment.phase == "forward", stage
        if key not in highest or size_bytes > highest[key][0]:
            highest[key] = held
    stages = range(len(options))
    order = [*((True, stage) for stage in stages), *((False, stage) for stage in reversed(stages))]
    found = (peak_at(runs, highest[key], load) for key in order if key in highest)
    return (*found, optimizer_moment(options, load))
