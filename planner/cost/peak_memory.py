"""Peak memory of a plan: the maximum over the moments of a step.

With stages j in execution order, at a moment of stage i that holds `local` bytes (`planner.cost.stage_option`)

    forward    sum_j (S + OPT + W)_j + [M > 1] sum_j SG_j + sum_(j<i) (saved - held + kept)_j + local
    backward   sum_j (S + OPT + W)_j + sum_(j<i) (saved + kept)_j + sum_(j>i) SG_j  (M > 1: all j) + local
               + sum_(j>i) L_j, the parameters and gradients of units that wait for the end
    optimizer  sum_j (S + OPT + W + SG)_j + max(sum_j TMP_j, TMP1)

`held` is what the model's own forward holds of `saved`: its moments have that.  M > 1 means gradient accumulation,
where the sharded gradients of earlier micro-batches stay.
The reserve of the device (context, communicators, workspaces), parameters that no unit holds, and activations that
outlive a step are added to every moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.cost.option_runs import counted
from planner.cost.stage_memory import Moment
from planner.cost.stage_option import StageCandidate
from planner.cost.unit_memory import two_largest
from planner.cost.workload import Workload

Runs = Sequence[tuple[StageCandidate, int]]
"""Options in execution order, with how many stages each stands for (`counted`)."""
HeldMoment = tuple[float, int, Moment, float, float]
"""Bytes that are held at a moment beyond what rests, the index of its run, the moment, reduced gradients, and the
buffers of other stages.  A tuple, because searches make millions of them."""
CATEGORIES = ("parameters", "optimizer", "gradients", "unsharded_parameters", "communication_buffers", "activations")
"""Of the moments of forward and backward, beside the reserve."""


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
    sees_above, sees_below, sees_gather_below = moment.neighbours
    total = reduce_input if sees_above else 0
    if sees_below and below:
        total += below.gather_output if moment.phase == "forward" else below.prefetched
    if sees_gather_below and below:
        total += below.prefetch_temporary
    return total


def beside(option: StageCandidate, is_above: bool) -> tuple[int, StageCandidate | None]:
    """Return the arguments of `neighbour_bytes` for one neighbour alone: the stage above, or the one below."""
    return (option.reduce_input if option.reduces else 0, None) if is_above else (0, option)


def peak_memory(options: Sequence[StageCandidate], load: Workload) -> MemoryPeak:
    """Return the peak of a plan, one option per stage in execution order."""
    runs = counted(options)
    best = _optimizer_moment(runs, load)
    highest = best.total_bytes - load.fixed_bytes - float(sum(times * option.rest for option, times in runs))
    found: HeldMoment | None = None
    for held in held_moments(runs, load):
        if held[0] > highest:
            highest, found = held[0], held
    return best if found is None else peak_at(runs, found, load)


def held_moments(runs: Runs, load: Workload) -> Iterator[HeldMoment]:
    """Yield the moments of forward and backward, stage by stage in execution order."""
    accumulates = load.accumulation > 1
    sharing = shared_by(option for option, _ in runs)
    gradients = float(sum(times * option.gradients for option, times in runs))
    reductions, gathers = _reductions_above(runs), _gathers_below(runs)
    before, held, after = 0.0, 0.0, gradients
    waiting = float(sum(times * option.reduced_after_backward for option, times in runs))
    for place, (option, times) in enumerate(runs):
        after -= times * option.gradients
        waiting -= times * option.reduced_after_backward
        if times == 1:  # inside a run it is no higher than at an end
            in_backward = before, (gradients if accumulates else after) + waiting, option.ambient.bytes_in(False)
            in_forward = before - held, gradients if accumulates else 0.0, option.ambient.bytes_in(True)
            for moment in option.moments:  # of each `bytes_at`, with what is the same for all asked once
                is_forward = moment.phase == "forward"
                kept, reduced, around = in_forward if is_forward else in_backward
                beside_it = neighbour_bytes(moment, reductions[place], gathers[place][is_forward])
                yield kept + reduced + (moment.total_bytes + around) + beside_it, place, moment, reduced, beside_it
        before += times * (_saved(option, sharing) + option.kept)
        held += times * option.held


def shared_by(options: Iterable[StageCandidate]) -> set[int]:
    """Return the blocks that keep what others take that are recomputed."""
    return {block for option in options for block in option.takes}


def _saved(option: StageCandidate, sharing: set[int]) -> float:
    """Return what a stage keeps, given the blocks that keep what recomputed ones take."""
    return option.saved if option.block in sharing else option.saved - option.shared


def _reductions_above(runs: Runs) -> list[int]:
    """Return, for each stage, the reduce-scatter input left by stages above."""
    found = [0]
    for option, _ in reversed(runs[1:]):
        found.append(option.reduce_input if option.reduces else found[-1])
    return found[::-1]


def _gathers_below(runs: Runs) -> list[tuple[StageCandidate | None, StageCandidate | None]]:
    """Return, for each stage, the nearest below with gathers in backward and in forward, past strategy `owner`."""
    found: list[tuple[StageCandidate | None, StageCandidate | None]] = [(None, None)]
    for option, _ in runs[:-1]:
        in_backward, in_forward = found[-1]
        found.append((option if option.prefetches else in_backward, option if option.gathers else in_forward))
    return found


def optimizer_moment(options: Sequence[StageCandidate], load: Workload) -> MemoryPeak:
    """Return the memory of the optimizer step."""
    return _optimizer_moment(counted(options), load)


def _optimizer_moment(runs: Runs, load: Workload) -> MemoryPeak:
    gradients = float(sum(times * option.stepped for option, times in runs))
    windows = float(sum(times * option.window for option, times in runs))
    categories = {
        "parameters": float(sum(times * option.parameters for option, times in runs)) + load.outside_bytes,
        "optimizer": float(sum(times * option.optimizer for option, times in runs)),
        "gradients": gradients,
        **({"communication_buffers": windows} if windows else {}),
        **({"activations": load.left_bytes} if load.left_bytes else {}),
        "optimizer_temporaries": max(
            float(sum(times * option.updates for option, times in runs)), _stepped_apart(runs)
        ),
        "reserve": load.cluster.reserve_bytes,
    }
    return MemoryPeak("optimizer", None, None, categories)


def _stepped_apart(runs: Runs) -> float:
    """Return TMP1: two tensors of the largest one's size, beside one of a tensor that was stepped before."""
    sizes = [size for option, times in runs for size in (option.largest, option.second) * min(times, 2)]
    largest, second = two_largest([0, 0, *sizes])
    return float(2 * largest + second)


def peak_at(runs: Runs, held: HeldMoment, load: Workload) -> MemoryPeak:
    """Return a moment by category."""
    _, place, moment, *_ = held
    categories = dict.fromkeys(CATEGORIES, 0.0)
    for holding in holdings_at(runs, held, load):
        categories[holding.category] += holding.size_bytes
    stage = sum(times for _, times in runs[:place])
    return MemoryPeak(moment.phase, stage, moment.operator, categories | {"reserve": load.cluster.reserve_bytes})


# --- what is held at a moment ------------------------------------------------------------------


class Holding(NamedTuple):
    """Bytes of one category that one run of stages holds at a moment."""

    category: str
    place: int | None
    """Of the run that holds it; None: the parameters outside all stages, what outlives a step, and what the optimizer
    makes."""
    is_passing: bool
    """Whether it is what the moment itself takes, beside what stays for longer."""
    size_bytes: float


def holdings_at(runs: Runs, held: HeldMoment, load: Workload) -> Iterator[Holding]:
    """Yield what is held at a moment of forward or backward, but the reserve."""
    _, at, moment, _, beside_it = held
    is_forward, (option, _), sharing = moment.phase == "forward", runs[at], shared_by(one for one, _ in runs)
    around = option.ambient
    yield from _resting(runs, load)
    for place, (other, times) in enumerate(runs):
        if load.accumulation > 1 or (place > at and not is_forward):
            yield Holding("gradients", place, False, times * other.gradients)
        if place > at and not is_forward:
            yield Holding("gradients", place, True, times * other.reduced_after_backward)
        if place < at:
            yield Holding("unsharded_parameters", place, False, times * other.kept)
            saved = _saved(other, sharing) - (other.held if is_forward else 0.0)
            yield Holding("activations", place, False, times * saved)
    yield Holding("gradients", at, True, moment.gradients + (0 if is_forward else around.gradients))
    unsharded = moment.unsharded + (around.forward if is_forward else around.backward)
    yield Holding("unsharded_parameters", at, True, unsharded)
    yield Holding("communication_buffers", at, True, moment.buffers + beside_it)
    yield Holding("activations", at, True, moment.activations)


def optimizer_holdings(runs: Runs, load: Workload) -> Iterator[Holding]:
    """Yield what is held in the optimizer step, but the reserve."""
    yield from _resting(runs, load)
    for place, (option, times) in enumerate(runs):
        yield Holding("gradients", place, False, times * option.stepped)
    temporaries = _optimizer_moment(runs, load).categories["optimizer_temporaries"]
    yield Holding("optimizer_temporaries", None, True, temporaries)


def _resting(runs: Runs, load: Workload) -> Iterator[Holding]:
    """Yield what is held throughout a step."""
    yield Holding("parameters", None, False, load.outside_bytes)
    yield Holding("activations", None, False, load.left_bytes)
    for place, (option, times) in enumerate(runs):
        yield Holding("parameters", place, False, times * option.parameters)
        yield Holding("optimizer", place, False, times * option.optimizer)
        yield Holding("communication_buffers", place, False, times * option.window)
