"""Peak memory of a plan: the maximum over the moments of a step.

With stages j in execution order, at a moment of stage i that holds `local` bytes (`planner.option`)

    forward    sum_j (S + OPT)_j + [M > 1] sum_j SG_j + sum_(j<i) (saved + kept)_j + local
    backward   sum_j (S + OPT)_j + sum_(j<i) (saved + kept)_j + sum_(j>i) SG_j  (M > 1: all j) + local
               + sum_(j>i) late_j, the parameters and gradients of units that wait for the end
    optimizer  sum_j (S + OPT + SG)_j + temporaries of the optimizer (foreach Adam: one more SG)

M > 1 means gradient accumulation, where the sharded gradients of earlier micro-batches stay.
The reserve of the device (context, communicators, workspaces) is added to every moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.option import Moment, Option
from planner.workload import Workload


@dataclass(frozen=True)
class MemoryPeak:
    """The highest moment of a step, by category; the categories sum to `total_bytes`."""

    phase: str
    """`forward`, `recompute`, `backward`, `reduce` or `optimizer`."""
    stage: int | None
    """Index of the stage, None for the optimizer step."""
    operator: int | None
    """Index of the operator, None for the optimizer step."""
    categories: dict[str, float]
    """Bytes by category."""

    @property
    def total_bytes(self) -> float:
        """Bytes at the peak, reserve included."""
        return sum(self.categories.values())


def neighbour_bytes(moment: Moment, above: Option | None, below: Option | None) -> float:
    """Return the buffers of neighbouring stages that are alive at a moment."""
    total = above.reduce_input if moment.above and above else 0
    if moment.below and below:
        total += below.gather_output if moment.phase == "forward" else below.prefetched
    return total


def peak_memory(options: Sequence[Option], load: Workload) -> MemoryPeak:
    """Return the peak of a plan, one option per stage in execution order."""
    accumulates = load.accumulation > 1
    resting = float(sum(option.rest for option in options))
    gradients = float(sum(option.gradients for option in options))
    best = optimizer_moment(options, load)
    highest = best.total_bytes - load.cluster.reserve_bytes - resting
    found: tuple[int, Moment, float] | None = None
    before, after, late = 0.0, gradients, float(sum(option.late for option in options))
    for index, option in enumerate(options):
        after -= option.gradients
        late -= option.late
        above = options[index + 1] if index + 1 < len(options) else None
        below = options[index - 1] if index else None
        for moment in option.moments:
            reduced = gradients if accumulates else 0.0 if moment.phase == "forward" else after
            reduced += 0.0 if moment.phase == "forward" else late
            total = before + reduced + option.bytes_at(moment) + neighbour_bytes(moment, above, below)
            if total > highest:
                highest, found = total, (index, moment, reduced)
        before += option.saved + option.kept
    return best if found is None else _peak_at(options, *found, load)


def optimizer_moment(options: Sequence[Option], load: Workload) -> MemoryPeak:
    """Return the memory of the optimizer step."""
    parameters = float(sum(option.parameters for option in options))
    return MemoryPeak("optimizer", None, None, {
        "parameters": parameters,
        "optimizer": float(sum(option.optimizer for option in options)),
        "gradients": float(sum(option.gradients for option in options)),
        "optimizer_temporaries": load.optimizer.temporaries * float(sum(option.gradients for option in options)),
        "reserve": load.cluster.reserve_bytes,
    })  # fmt: skip


def _peak_at(options: Sequence[Option], index: int, moment: Moment, reduced: float, load: Workload) -> MemoryPeak:
    before, option = options[:index], options[index]
    waiting = 0 if moment.phase == "forward" else option.ambient_gradients
    above = options[index + 1] if index + 1 < len(options) else None
    below = options[index - 1] if index else None
    return MemoryPeak(moment.phase, index, moment.operator, {
        "parameters": float(sum(option.parameters for option in options)),
        "optimizer": float(sum(option.optimizer for option in options)),
        "gradients": reduced + moment.gradients + waiting,
        "unsharded_parameters": moment.unsharded + option.ambient_unsharded + sum(o.kept for o in before),
        "communication_buffers": moment.buffers + neighbour_bytes(moment, above, below),
        "activations": moment.activations + sum(o.saved for o in before),
        "reserve": load.cluster.reserve_bytes,
    })  # fmt: skip
