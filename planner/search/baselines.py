"""The uniform configurations with which plans are compared, under the same cost model.

DDP replicates everything (`planner.cost.ddp`; as units where torch's DDP cannot run the model),
ZeRO-2 keeps gathered parameters to the backward, FSDP gathers twice, HSDP shards inside groups (each
group size is tried).  Each is taken without recomputation, with every block recomputed and with every block recomputed
selectively, and at its own best micro-batch.  All but DDP wrap block by block, as their users do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.cost.peak_memory import peak_memory
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.model.fsdp_units import can_hold
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import as_run, fixed
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.model_graph import Recompute

NAMES = ("DDP", "ZeRO-2", "FSDP", "HSDP")
"""Common names of configurations in which all operators take one strategy (`StrategySpec.baseline`)."""


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


def _sizes(
    space: Space, loads: Iterable[Workload], strategy: Strategy, recompute: Recompute, limit_bytes: float
) -> Iterator[Baseline]:
    name = strategy.spec.baseline
    for load in loads:
        options = uniform(space, load, strategy, recompute)
        if strategy.spec.by_ddp:
            options = as_run(options, strategy, None, space, load, limit_bytes=float("inf"))
        peak, time = peak_memory(options, load).total_bytes, step_time(options, load)
        fits, speed = peak <= limit_bytes, load.samples_per_step / time.total_s
        yield Baseline(name, strategy, recompute, fits, load, options, round(peak), speed)
        if not fits and load.accumulation == 1:
            return  # More samples at once never need less memory.


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
            sizes = [b for s in group for b in _sizes(space, loads, s, recompute, limit_bytes)]
            fastest = max((b for b in sizes if b.feasible), key=lambda b: b.samples_per_s, default=None)
            found.append(fastest or min(sizes, key=lambda b: b.peak_memory_bytes))
    return tuple(found)
