"""The uniform configurations with which plans are compared, under the same cost model.

DDP replicates everything (`planner.cost.ddp`; as units where torch's DDP cannot run the model),
ZeRO-2 keeps gathered parameters to the backward, FSDP gathers twice, HSDP shards inside groups (each
group size is tried).  Each is taken without recomputation, with every block recomputed and with every block recomputed
selectively, and at its own best micro-batch.  All but DDP wrap block by block, as their users do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from planner.cost.peak_memory import peak_memory
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.model.fsdp_units import can_hold
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import as_run, fixed
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


def _at(space: Space, load: Workload, strategy: Strategy, recompute: Recompute, limit_bytes: float) -> Baseline:
    """Return a configuration at one workload."""
    options = uniform(space, load, strategy, recompute)
    if strategy.spec.by_ddp:
        options = as_run(options, strategy, None, space, load, limit_bytes=float("inf"))
    peak, time = peak_memory(options, load).total_bytes, step_time(options, load)
    fits, speed = peak <= limit_bytes, load.samples_per_step / time.total_s
    return Baseline(strategy.spec.baseline, strategy, recompute, fits, load, options, round(peak), speed)


def _sizes(
    space: Space, loads: Sequence[Workload], strategy: Strategy, recompute: Recompute, limit_bytes: float, floor: float
) -> list[Baseline]:
    """Return a configuration at its best micro-batch and others, if that has more than `floor` samples per second; if
    it fits nowhere, at that of least memory and others."""
    at = cache(lambda place: _at(space, loads[place], strategy, recompute, limit_bytes))
    accumulating = sum(load.accumulation > 1 for load in loads)  # those come first
    # More samples at once never need less memory.
    alone = range(accumulating, len(loads))
    fitting, found = _first(alone, lambda place: not at(place).feasible), [at(place) for place in alone[:1]]
    bounds = [(_most_samples_per_s(space, loads[place], recompute), place) for place in range(fitting)]
    for bound, place in sorted(bounds, reverse=True):
        if bound <= floor:
            break
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


def baselines(space: Space, loads: tuple[Workload, ...], limit_bytes: float) -> tuple[Baseline, ...]:
    """Return every baseline under every kind of recomputation; `loads` by growing micro-batch."""
    found = []
    operators = space.graph.operators
    again = sorted(set[Recompute]().union(*(stage.recomputations for stage in space.model.stages)))
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
