"""The uniform configurations with which plans are compared, under the same cost model.

DDP replicates everything (`planner.cost.ddp`; as units where torch's DDP cannot run the model),
ZeRO-2 keeps gathered parameters to the backward, FSDP gathers twice, HSDP shards inside groups (each
group size is tried).  Each is taken without recomputation, with every block recomputed and with every block recomputed
selectively, and at its own best micro-batch.  All but DDP wrap block by block, as their users do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from planner.cost.peak_memory import peak_memory
from planner.cost.stage_costs import StageCosts
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.model.fsdp_units import can_hold
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import Options, as_run, fixed
from planner.search.ceiling import computing_s
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.model_graph import Recompute

NAMES = ("DDP", "ZeRO-2", "FSDP", "HSDP")
"""Common names of configurations in which all operators take one strategy (`StrategySpec.baseline`)."""
ROUNDING = 1e-9
"""Relative rounding of sums."""


@dataclass(frozen=True)
class Baseline:
    """One uniform configuration at its best micro-batch, or at the one that needs least memory."""

    name: str
    """E.g. `FSDP`."""
    strategy: Strategy
    recompute: Recompute
    feasible: bool
    """Whether it fits at any micro-batch."""
    load: Workload
    """The best micro-batch and accumulation (infeasible: those that need least memory)."""
    options: tuple[StageCandidate, ...]
    peak_memory_bytes: int
    samples_per_s: float
    """Predicted; of a configuration that does not fit, the speed with enough memory."""


def uniform(space: Space, load: Workload, strategy: Strategy, recompute: Recompute) -> tuple[StageCandidate, ...]:
    """Return the options of a model with one strategy everywhere."""
    choices = tuple(
        StageDecision((strategy,) * len(stage.operators), stage.allowed(recompute)) for stage in space.model.stages
    )
    return fixed(space, load, choices, strategy if space.model.spanning else None)


def _options(space: Space, load: Workload, strategy: Strategy, recompute: Recompute) -> tuple[Options, float]:
    """Return the options of a configuration at one workload, and the bytes that they need."""
    options = uniform(space, load, strategy, recompute)
    if strategy.spec.by_ddp:
        options = as_run(options, strategy, None, space, load, limit_bytes=float("inf"))
    return options, peak_memory(options, load).total_bytes


def _sizes(
    space: Space, loads: Sequence[Workload], strategy: Strategy, recompute: Recompute, limit_bytes: float, floor: float
) -> list[Baseline]:
    """Return a configuration at its best micro-batch and others, if that has more than `floor` samples per second; if
    it fits nowhere, at that of least memory and others."""
    held = dict[int, tuple[Options, float]]()

    def fits(place: int) -> bool:
        if place not in held:
            held[place] = _options(space, loads[place], strategy, recompute)
        return held[place][1] <= limit_bytes

    @cache
    def at(place: int) -> Baseline:
        feasible, load, (options, peak) = fits(place), loads[place], held[place]
        speed = load.samples_per_step / step_time(options, load).total_s
        return Baseline(strategy.spec.baseline, strategy, recompute, feasible, load, options, round(peak), speed)

    accumulating = sum(load.accumulation > 1 for load in loads)  # those come first
    # More samples at once never need less memory.
    alone = range(accumulating, len(loads))
    fitting, found = _first(alone, lambda place: not fits(place)), [at(place) for place in alone[:1]]
    bounds = [(_most_samples_per_s(space, loads[place], recompute), place) for place in range(fitting)]
    for bound, place in sorted(bounds, reverse=True):
        if bound <= floor:
            break
        smaller = max((other for other in held if other < place), default=None)
        if smaller is not None and not strategy.spec.by_ddp and _takes_no_less(space, loads, place, smaller, recompute):
            ratio = loads[place].samples_per_step / loads[smaller].samples_per_step
            if (1 + ROUNDING) * at(smaller).samples_per_s * ratio <= floor:
                continue
        found.append(at(place))
        floor = max(floor, at(place).samples_per_s if at(place).feasible else 0.0)
    return found


def _first(places: range, holds: Callable[[int], bool]) -> int:
    """Return the first place at which something holds that then holds to the end, or the end.

    Few are looked at if it is one of the first, as it often is.
    """
    step = 1
    while step <= len(places) and not holds(places[step - 1]):
        step *= 2
    return places.start + bisect_left(places[: step - 1], True, lo=step // 2, key=holds)


def _most_samples_per_s(space: Space, load: Workload, recompute: Recompute) -> float:
    """Return samples per second that no configuration exceeds, whatever it sends."""
    of_class = [
        computing_s(space.stage_costs(stage_class, load), space.model.stages[example].allowed(recompute))
        for stage_class, example in enumerate(space.examples)
    ]
    step_s = load.accumulation * sum(of_class[stage_class] for stage_class in space.stage_classes)
    return (1 + ROUNDING) * load.samples_per_step / step_s if step_s else float("inf")


def _takes_no_less(space: Space, loads: Sequence[Workload], place: int, smaller: int, recompute: Recompute) -> bool:
    """Whether a step of units takes no less time at one workload than at one of a smaller micro-batch: where all that
    is computed takes as long or longer, so does the step, which is a sum of maxima.  Measured times may be shorter.
    """
    this, other = loads[place], loads[smaller]
    if this.accumulation != other.accumulation or this.waits != other.waits:
        return False
    for stage_class, example in enumerate(space.examples):
        again = space.model.stages[example].allowed(recompute)
        longer, shorter = (_seconds(space.stage_costs(stage_class, load), again) for load in (this, other))
        if any(one < another for one, another in zip(longer, shorter, strict=True)):
            return False
    return True


def _seconds(costs: StageCosts, recompute: Recompute) -> Iterator[float]:
    """Yield all seconds that computing a stage, and launching that, is made of."""
    yield from (*costs.forward_s, *costs.backward_s, *costs.forward_launch_s, *costs.backward_launch_s)
    yield from (costs.again_s(recompute, is_whole) for is_whole in (False, True))


def baselines(
    space: Space, loads: tuple[Workload, ...], limit_bytes: float, *, offloaded: bool = False
) -> tuple[Baseline, ...]:
    """Return every baseline under every kind of recomputation; `loads` by growing micro-batch.

    Libraries that run these do not offload what blocks are handed: that is a kind of its own.
    """
    found = []
    operators = space.graph.operators
    kinds = set[Recompute]().union(*(stage.recomputations for stage in space.model.stages))
    again = sorted(kinds & {Recompute.OFFLOADED} if offloaded else kinds - {Recompute.OFFLOADED})
    strategies = [strategy for strategy in strategies_on(loads[0].cluster) if not strategy.offload]
    strategies = [strategy for strategy in strategies if all(can_hold(one, strategy) for one in operators)]
    for name in NAMES:
        group = [strategy for strategy in strategies if strategy.spec.baseline == name]
        for recompute in again if group else ():
            sizes, fastest = list[Baseline](), None
            for strategy in group:
                floor = fastest.samples_per_s if fastest else 0.0
                sizes += _sizes(space, loads, strategy, recompute, limit_bytes, floor)
                fastest = max((b for b in sizes if b.feasible), key=lambda b: b.samples_per_s, default=None)
            found.append(fastest or min(sizes, key=lambda b: b.peak_memory_bytes))
    return tuple(found)
