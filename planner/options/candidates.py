"""The choices of one stage in the search: strategies, mixes of two, splits, and recomputation.

    whole     all operators of the stage take one strategy: one unit
    mixed     the operators before a cut take one strategy, the others another: two units.  A cut lies
              where a large operator begins (small ones, such as norms, go with the next large one)
    split     the stage's large linear operators are cut into k slices each, of which the first j
              take the strategy of the rest of the stage, and the others another

Each without recomputation and, if the stage is a block, with each kind that is offered.  Pinned operators and blocks
have the user's choice in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cost.stage_costs import StageCosts
from planner.cost.stragglers import NO_WAITS
from planner.cost.workload import Workload
from planner.model.fsdp_units import check_split
from planner.model.stages import JOIN_NUMEL, Stage
from planner.problem import NO_PINS, Pins
from planner.strategies.spec import Strategy
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute

LIGHT, LIGHT_TOGETHER = 1 / 256, 1 / 16
"""A stage is light if it has less than the first fraction of the model's parameters and all such stages together have
at most the second: their strategies hardly matter, but would take as long to search as the others'."""
LIGHT_STRATEGIES = 2
"""A light stage has the first so many strategies (a copy and a shard) and the one that needs least memory."""
LARGE = 0.5
"""An operator is large if it has at least this fraction of the parameters of the stage's largest."""
SLICE_COUNTS = (2, 4, 8)
"""Numbers of slices that are tried."""
SLICE_STEPS = 4
"""How many different numbers of slices of the first strategy are tried, up to all of them."""
SLICE_NUMEL = JOIN_NUMEL // 2
"""Least parameters of a slice: the latency of smaller ones outweighs the memory that they free."""
MIXED_STRATEGIES = 5
"""Strategies that are mixed: the first undominated ones of the registry.  The number of pairs, and so the time of a
search, grows with the square."""
SPLIT_STRATEGIES = 3
"""The same for the slices of split operators."""
MANY_CLASSES, DIVERSE_STRATEGIES = 24, 5
"""A model with more classes of stages than the first, hardly two of them alike, gets no mixes and no splits, and only
the first so many strategies and the one that needs least memory.  With all choices, 100 distinct layers
(`scripts/bench/planner.py --child 100 distinct`) took 80 s of CPU to search, instead of 4, on two cores of 2026-11-21,
for a plan that is 0.15 % faster."""


MANY_BLOCKS = 4
"""Of so many alike blocks, none has to be recomputed with its input on the device where all copies are hidden:
offloaded, all hold less, and one is at most an input worse.  With both kinds, a search near the smallest limit used up
its labels and ended with a gap of 8 % (llama-7b, bf16, a100-80g-8, 16 GiB)."""
FEWEST_AND_MOST = (1, 4096)
"""Samples of a micro-batch between which the share of a forward that a copy takes only grows or only falls, as both are
affine in them where times are not measured."""


@dataclass(frozen=True)
class StageDecision:
    """A stage's strategies by operator and what of it is recomputed."""

    strategies: tuple[Strategy, ...]
    """One per operator, and per slice where `counts` says that there are slices."""
    recompute: Recompute = Recompute.NOTHING
    counts: tuple[int, ...] = ()
    """Into how many slices each operator is cut; empty: none is."""

    @property
    def is_whole(self) -> bool:
        """Whether all operators take one strategy, unsplit."""
        return len(set(self.strategies)) <= 1 and not self.counts


def modes_of(
    stage: Stage, alike: int, load: Workload, costs_of: Callable[[Workload], StageCosts]
) -> tuple[Recompute, ...]:
    """Return what a search offers to run again of a stage, of which there are so many `alike`."""
    found = stage.offered(load.cluster)
    if Recompute.OFFLOADED in found and alike >= MANY_BLOCKS and load.cluster.measured is None:
        sizes = (costs_of(replace(load, micro_batch=size, waits=NO_WAITS)) for size in FEWEST_AND_MOST)
        if not any(any(costs.copy_waits_s(Recompute.OFFLOADED, is_whole=True)) for costs in sizes):
            return tuple(mode for mode in found if mode is not Recompute.EVERYTHING)
    return found


Slices = tuple[tuple[Strategy, ...], ...]
"""For each operator of a stage, the strategies of its slices, one if it is whole."""


def light_stages(stages: Sequence[Stage], graph: ModelGraph) -> frozenset[int]:
    """Return the indices of light stages, whose strategies hardly matter."""
    sizes = [sum(graph.operators[o].numel for o in stage.operators) for stage in stages]
    light = [index for index, size in enumerate(sizes) if size < LIGHT * graph.numel]
    together = sum(sizes[index] for index in light)
    return frozenset(light) if together <= LIGHT_TOGETHER * graph.numel else frozenset()


def first_and_least(strategies: Sequence[Strategy], light: bool) -> tuple[Strategy, ...]:
    """Return the first strategies, for a light stage or a diverse model, and the one that needs least memory."""
    count = LIGHT_STRATEGIES if light else DIVERSE_STRATEGIES
    least = max(strategies, key=lambda strategy: (strategy.offload, strategy.spec.joins, strategy.group))
    return tuple(dict.fromkeys((*strategies[:count], least)))


def choices_of(
    stage: Stage,
    graph: ModelGraph,
    strategies: Sequence[Strategy],
    modes: Sequence[Recompute],
    pins: Pins = NO_PINS,
    whole: bool = False,
) -> list[StageDecision]:
    """Return the choices of a stage; `strategies` by falling preference for mixes, `modes` what may run again of it.

    `whole` leaves out mixes and splits.
    """
    is_whole = whole or not stage.operators
    offered = _wholes(stage, strategies) if is_whole else _assignments(stage, graph, strategies)
    pinned = [pins.strategies.get(operator) for operator in stage.operators]
    taken = dict.fromkeys(tuple(p or part for p, part in zip(pinned, slices, strict=True)) for slices in offered)
    is_pinned = stage.block is not None and stage.block in pins.recompute
    again = [pins.recompute[stage.block]] if stage.block is not None and is_pinned else modes
    found = dict.fromkeys(
        _choice(slices, mode) for slices in taken for mode in (again if is_pinned else _beside(slices, again))
    )
    return [one for one in found if not (one.counts and one.recompute is Recompute.SELECTIVE)]


def _beside(slices: Slices, modes: Sequence[Recompute]) -> list[Recompute]:
    """Return what is offered beside strategies: inputs stay where parameters are on the host, as both take its link."""
    if not any(strategy.offload for parts in slices for strategy in parts):
        return [*modes]
    return [min(mode, Recompute.EVERYTHING) for mode in modes]


def _choice(slices: Slices, recompute: Recompute) -> StageDecision:
    counts = tuple(len(parts) for parts in slices)
    flat = tuple(strategy for parts in slices for strategy in parts)
    return StageDecision(flat, recompute, counts if len(flat) > len(slices) else ())


def _wholes(stage: Stage, strategies: Sequence[Strategy]) -> Iterator[Slices]:
    yield from (((strategy,),) * len(stage.operators) for strategy in strategies)


def _assignments(stage: Stage, graph: ModelGraph, strategies: Sequence[Strategy]) -> Iterator[Slices]:
    yield from _wholes(stage, strategies)
    count, mixed = len(stage.operators), strategies[:MIXED_STRATEGIES]
    for cut in cuts(stage, graph):
        for before in mixed:
            yield from (((before,),) * cut + ((after,),) * (count - cut) for after in mixed if after != before)
    yield from _splits(stage, graph, strategies)


def cuts(stage: Stage, graph: ModelGraph) -> list[int]:
    """Return where a block's operators may change strategy: how many come before."""
    if stage.block is None:
        return []
    sizes = [graph.operators[o].numel for o in stage.operators]
    large = [position for position, size in enumerate(sizes) if size >= LARGE * max(sizes)]
    return [previous + 1 for previous in large[:-1]]


def _splits(stage: Stage, graph: ModelGraph, strategies: Sequence[Strategy]) -> Iterator[Slices]:
    gathered = [s for s in strategies if s.spec.worth_splitting(s)]
    for most in gathered[:1]:
        others = [s for s in strategies if s != most][: SPLIT_STRATEGIES - 1]
        for count in SLICE_COUNTS:
            parts = splittable(stage, graph, count)
            step = -(-count // SLICE_STEPS)
            for sharded in range(step, count + 1, step) if parts else ():
                for other in others if sharded < count else others[:1]:
                    slices = (most,) * sharded + (other,) * (count - sharded)
                    yield tuple(slices if o in parts else (most,) for o in stage.operators)


def splittable(stage: Stage, graph: ModelGraph, count: int) -> frozenset[int]:
    """Return the large linear operators of a stage, if each is large enough for this many slices; else none."""
    largest = max(graph.operators[o].numel for o in stage.operators)
    large = [o for o in stage.operators if graph.operators[o].numel >= LARGE * largest]
    linear = [o for o in large if _can_split(graph, o, count)]
    worth = all(graph.operators[o].numel >= count * SLICE_NUMEL for o in linear)
    return frozenset(linear) if worth else frozenset()


def _can_split(graph: ModelGraph, operator: int, count: int) -> bool:
    try:
        check_split(graph.operators[operator], count)
    except OsdpError:
        return False
    return True
