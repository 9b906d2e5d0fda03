"""Peak memory of a plan: the maximum over the moments of a step.

With stages j in execution order, at a moment of stage i that holds `local` bytes (`planner.cost.stage_option`)

    forward    sum_j (S + OPT + W)_j + [M > 1] sum_j SG_j + sum_(j<i) (saved - held + kept)_j + local
    backward   sum_j (S + OPT + W)_j + sum_(j<i) (saved + kept)_j + sum_(j>i) SG_j  (M > 1: all j) + local
               + sum_(j>i) L_j, the parameters and gradients of units that wait for the end
    optimizer  sum_j (S + OPT + W + SG + TMP)_j

`held` is what the model's own forward holds of `saved`: its moments have that.  M > 1 means gradient accumulation,
where the sharded gradients of earlier micro-batches stay.
The reserve of the device (context, communicators, workspaces), and parameters that no unit holds, are added to every
moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.stage_memory import Moment
from planner.cost.stage_option import StageCandidate
from planner.cost.workload import Workload


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


def neighbour_bytes(moment: Moment, reduce_input: int, below: StageCandidate | None) -> float:
    """Return the buffers of other stages that are alive at a moment: of the last reduction, and of the one below."""
    total = reduce_input if moment.neighbours.above else 0
    if moment.neighbours.below and below:
        total += below.gather_output if moment.phase == "forward" else below.prefetched
    if moment.neighbours.gathers_below and below:
        total += below.prefetch_temporary
    return total


def beside(option: StageCandidate, is_above: bool) -> tuple[int, StageCandidate | None]:
    """Return the arguments of `neighbour_bytes` for one neighbour alone: the stage above, or the one below."""
    return (option.reduce_input if option.reduces else 0, None) if is_above else (0, option)


def peak_memory(options: Sequence[StageCandidate], load: Workload) -> MemoryPeak:
    """Return the peak of a plan, one option per stage in execution order."""
    accumulates, sharing = load.accumulation > 1, shared_by(options)
    resting = float(sum(option.rest for option in options))
    gradients = float(sum(option.gradients for option in options))
    best = optimizer_moment(options, load)
    highest = best.total_bytes - load.fixed_bytes - resting
    found: tuple[int, Moment, float, float] | None = None
    reductions, gathers = _reductions_above(options), _gathers_below(options)
    before, held, after, waiting = 0.0, 0.0, gradients, float(sum(option.reduced_after_backward for option in options))
    for index, option in enumerate(options):
        after -= option.gradients
        waiting -= option.reduced_after_backward
        for moment in () if _is_inside(options, index) else option.moments:
            below = gathers[index][moment.phase == "forward"]
            reduced = gradients if accumulates else 0.0 if moment.phase == "forward" else after
            reduced += 0.0 if moment.phase == "forward" else waiting
            beside_it = neighbour_bytes(moment, reductions[index], below)
            kept = before - held if moment.phase == "forward" else before
            total = kept + reduced + option.bytes_at(moment) + beside_it
            if total > highest:
                highest, found = total, (index, moment, reduced, beside_it)
        before += _saved(option, sharing) + option.kept
        held += option.held
    return best if found is None else _peak_at(options, *found, load)


def _is_inside(options: Sequence[StageCandidate], index: int) -> bool:
    """Return whether a stage is inside a run of the same option, so that its neighbours see the same as it does.

    Along such a run what is held changes by as much from each stage to the next, so it is highest at an end.
    """
    option = options[index]
    return 2 <= index < len(options) - 2 and all(options[index + step] is option for step in (-1, 1, -2, 2))


def shared_by(options: Sequence[StageCandidate]) -> set[int]:
    """Return the blocks that keep what others take that are recomputed."""
    return {block for option in options for block in option.takes}


def _saved(option: StageCandidate, sharing: set[int]) -> float:
    """Return what a stage keeps, given the blocks that keep what recomputed ones take."""
    return option.saved if option.block in sharing else option.saved - option.shared


def _reductions_above(options: Sequence[StageCandidate]) -> list[int]:
    """Return, for each stage, the reduce-scatter input left by stages above."""
    found = [0]
    for option in reversed(options[1:]):
        found.append(option.reduce_input if option.reduces else found[-1])
    return found[::-1]


def _gathers_below(options: Sequence[StageCandidate]) -> list[tuple[StageCandidate | None, StageCandidate | None]]:
    """Return, for each stage, the nearest below with gathers in backward and in forward, past strategy `owner`."""
    found: list[tuple[StageCandidate | None, StageCandidate | None]] = [(None, None)]
    for option in options[:-1]:
        in_backward, in_forward = found[-1]
        found.append((option if option.prefetches else in_backward, option if option.gathers else in_forward))
    return found


def optimizer_moment(options: Sequence[StageCandidate], load: Workload) -> MemoryPeak:
    """Return the memory of the optimizer step."""
    gradients = float(sum(option.stepped for option in options))
    windows = float(sum(option.window for option in options))
    categories = {
        "parameters": float(sum(option.parameters for option in options)) + load.outside_bytes,
        "optimizer": float(sum(option.optimizer for option in options)),
        "gradients": gradients,
        **({"communication_buffers": windows} if windows else {}),
        "optimizer_temporaries": float(sum(option.updates for option in options)),
        "reserve": load.cluster.reserve_bytes,
    }
    return MemoryPeak("optimizer", None, None, categories)


def _peak_at(
    options: Sequence[StageCandidate], index: int, moment: Moment, reduced: float, beside_it: float, load: Workload
) -> MemoryPeak:
    before, option, sharing = options[:index], options[index], shared_by(options)
    is_forward, around = moment.phase == "forward", option.ambient
    categories = {
        "parameters": float(sum(option.parameters for option in options)) + load.outside_bytes,
        "optimizer": float(sum(option.optimizer for option in options)),
        "gradients": reduced + moment.gradients + (0 if is_forward else around.gradients),
        "unsharded_parameters": moment.unsharded
        + (around.forward if is_forward else around.backward)
        + sum(o.kept for o in before),
        "communication_buffers": moment.buffers + beside_it + sum(o.window for o in options),
        "activations": moment.activations + sum(_saved(o, sharing) - (o.held if is_forward else 0.0) for o in before),
        "reserve": load.cluster.reserve_bytes,
    }
    return MemoryPeak(moment.phase, index, moment.operator, categories)
