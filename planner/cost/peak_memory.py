"""Peak memory of a plan: the maximum over the moments of a step.

With stages j in execution order, at a moment of stage i that holds `local` bytes (`planner.cost.stage_option`)

    forward    sum_j (S + OPT + W)_j + [M > 1] sum_j SG_j + sum_(j<i) (saved - held + kept)_j + local
    backward   sum_j (S + OPT + W)_j + sum_(j<i) (saved + kept)_j + sum_(j>i) SG_j  (M > 1: all j) + local
               + sum_(j>i) L_j, the parameters and gradients of units that wait for the end
    optimizer  sum_j (S + OPT + W + SG)_j + max(sum_j TMP_j, TMP1)

`held` is what the model's own forward holds of `saved`: its moments have that.  M > 1 means gradient accumulation,
where the sharded gradients of earlier micro-batches stay.
The reserve of the device (context, communicators, workspaces), and parameters that no unit holds, are added to every
moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
        for moment in option.moments if times == 1 else ():  # inside a run it is no higher than at an end
            below = gathers[place][moment.phase == "forward"]
            reduced = gradients if accumulates else 0.0 if moment.phase == "forward" else after
            reduced += 0.0 if moment.phase == "forward" else waiting
            beside_it = neighbour_bytes(moment, reductions[place], below)
            kept = before - held if moment.phase == "forward" else before
            yield kept + reduced + option.bytes_at(moment) + beside_it, place, moment, reduced, beside_it
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
    _, place, moment, reduced, beside_it = held
    before, (option, _), sharing = runs[:place], runs[place], shared_by(option for option, _ in runs)
    is_forward, around = moment.phase == "forward", option.ambient
    saved = sum(times * (_saved(o, sharing) - (o.held if is_forward else 0.0)) for o, times in before)
    categories = {
        "parameters": float(sum(times * o.parameters for o, times in runs)) + load.outside_bytes,
        "optimizer": float(sum(times * o.optimizer for o, times in runs)),
        "gradients": reduced + moment.gradients + (0 if is_forward else around.gradients),
        "unsharded_parameters": moment.unsharded
        + (around.forward if is_forward else around.backward)
        + sum(times * o.kept for o, times in before),
        "communication_buffers": moment.buffers + beside_it + sum(times * o.window for o, times in runs),
        "activations": moment.activations + saved,
        "reserve": load.cluster.reserve_bytes,
    }
    return MemoryPeak(moment.phase, sum(times for _, times in before), moment.operator, categories)


# --- over a step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """Bytes of one category that one stage holds at a moment."""

    category: str
    stage: int | None
    """Index of the stage that holds it; None: the parameters outside all stages, and what the optimizer makes."""
    is_passing: bool
    """Whether it is what the moment itself takes, beside what stays for longer."""
    size_bytes: float


@dataclass(frozen=True)
class StepMoment:
    """A moment of a step, with all that is held but the reserve."""

    phase: str
    """As in `MemoryPeak`, and so are `stage` and `operator`."""
    stage: int | None
    operator: int | None
    holdings: tuple[Holding, ...]
    """None of zero bytes; those of a category sum to that of `MemoryPeak.categories`."""

    @property
    def total_bytes(self) -> float:
        """Bytes without the reserve."""
        return sum(holding.size_bytes for holding in self.holdings)


def memory_over_step(options: Sequence[StageCandidate], load: Workload) -> Iterator[StepMoment]:
    """Yield the highest moments of every stage: one micro-batch's forward and backward, then the optimizer step.

    Their highest is `peak_memory` less the reserve.  All micro-batches are alike.
    """
    runs = [(option, 1) for option in options]
    reductions, gathers = _reductions_above(runs), _gathers_below(runs)
    order = range(len(options))
    for is_forward, stages in ((True, order), (False, reversed(order))):
        for stage in stages:
            below = gathers[stage][is_forward]
            around = list(_around(options, stage, is_forward, load))
            for moment in options[stage].moments:
                if (moment.phase == "forward") is is_forward:
                    beside_it = neighbour_bytes(moment, reductions[stage], below)
                    passing = _passing(options[stage], stage, moment, beside_it)
                    yield _moment(moment.phase, stage, moment.operator, (*around, *passing))
    found = _optimizer_moment(runs, load).categories
    holdings = [*_resting(options, load)]
    holdings += [Holding("gradients", stage, False, option.stepped) for stage, option in enumerate(options)]
    holdings.append(Holding("optimizer_temporaries", None, True, found["optimizer_temporaries"]))
    yield _moment("optimizer", None, None, holdings)


def _moment(phase: str, stage: int | None, operator: int | None, holdings: Iterable[Holding]) -> StepMoment:
    return StepMoment(phase, stage, operator, tuple(holding for holding in holdings if holding.size_bytes))


def _resting(options: Sequence[StageCandidate], load: Workload) -> Iterator[Holding]:
    """Yield what is held throughout a step."""
    yield Holding("parameters", None, False, load.outside_bytes)
    for stage, option in enumerate(options):
        yield Holding("parameters", stage, False, option.parameters)
        yield Holding("optimizer", stage, False, option.optimizer)
        yield Holding("communication_buffers", stage, False, option.window)


def _around(options: Sequence[StageCandidate], at: int, is_forward: bool, load: Workload) -> Iterator[Holding]:
    """Yield what is held while stage `at` runs, beside what its own moments take."""
    yield from _resting(options, load)
    sharing = shared_by(options)
    for stage, option in enumerate(options):
        if load.accumulation > 1 or (stage > at and not is_forward):
            yield Holding("gradients", stage, False, option.gradients)
        if stage > at and not is_forward:
            yield Holding("gradients", stage, True, option.reduced_after_backward)
        if stage < at:
            yield Holding("unsharded_parameters", stage, False, option.kept)
            held = option.held if is_forward else 0.0
            yield Holding("activations", stage, False, _saved(option, sharing) - held)


def _passing(option: StageCandidate, stage: int, moment: Moment, beside_it: float) -> Iterator[Holding]:
    """Yield what one moment of a stage takes."""
    is_forward, around = moment.phase == "forward", option.ambient
    gradients = moment.gradients + (0 if is_forward else around.gradients)
    unsharded = moment.unsharded + (around.forward if is_forward else around.backward)
    yield Holding("gradients", stage, True, gradients)
    yield Holding("unsharded_parameters", stage, True, unsharded)
    yield Holding("communication_buffers", stage, True, moment.buffers + beside_it)
    yield Holding("activations", stage, True, moment.activations)
