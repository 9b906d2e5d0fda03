"""Explains a plan: the memory and step time of the alternatives to each of its choices.

For a set of stages T and another choice c, with everything else kept,

    delta(T, c) = prediction(plan with T -> c) - prediction(plan)        `alternatives`

term by term in time, and in peak memory.  A part of the plan is bound

    by memory       if some c is faster and none of the faster ones fits the limit
    by time         if no c is faster
    by a pin        if a faster c fits but the user fixed another
    by nothing      if a faster c fits: the plan can be improved there          `Part.binds`

All figures come from the cost functions of the search; nothing is searched again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost.simulator import simulated_s
from planner.cost.workload import Workload
from planner.model.operator_split import slice_starts
from planner.name_patterns import matches, unknown_name
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pins import parse_pin, resolve
from planner.plan import Plan, Prediction, check_model
from planner.pricing import Decisions, decisions_of, predict, space_of
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.model_graph import ModelGraph, Recompute
from profiler.path_labels import path_label

NO_CHANGE = 1e-9
"""Relative changes of the step time below this are rounding of sums."""
TIED = "tied"
"""Label of the part with the operators that run in several stages."""


@dataclass(frozen=True)
class OpenPlan:
    """A plan with the model, workload and decisions from which its prediction is computed."""

    plan: Plan
    space: Space
    load: Workload
    decided: Decisions
    prediction: Prediction
    """Recomputed from the choices, not read from the plan file."""

    @cached_property
    def step_with_host_ahead_s(self) -> float:
        """Seconds of a step in which the host gets ahead while the device is busy: at most the predicted."""
        options = self.decided.options(self.space, self.load, self.plan.usable_bytes)
        return simulated_s(options, self.load, host_gets_ahead=True)

    @property
    def spanning(self) -> str:
        """Strategies of the operators that run in several stages, in words; empty if there are none."""
        return " and ".join(_distinct(self.decided.spanning))

    def label_of(self, stage: int) -> str:
        """Return the class of a block, or the operators of a stage outside blocks."""
        graph, found = self.space.model.graph, self.space.model.stages[stage]
        if found.block is not None:
            return graph.blocks[found.block].kind
        return ", ".join(path_label(graph.operators[index].name) for index in found.operators)


@dataclass(frozen=True)
class Target:
    """The stages whose choice is varied."""

    stages: frozenset[int] = frozenset()
    """Indices of stages, changed together."""
    spanning: bool = False
    """Whether the operators that run in several stages change too."""


@dataclass(frozen=True)
class Alternative:
    """The plan with another choice for a target."""

    strategy: str
    """Of every operator of the target."""
    recompute: Recompute | None
    """Of every block of the target; None if it has none."""
    step_time_s: float
    delta_by_term_s: dict[str, float]
    """Change of each term of the step time; hidden communication is not part of the sum."""
    delta_s: float
    """Change of the step time; negative is faster."""
    peak_bytes: int
    delta_bytes: int
    """Change of the peak."""
    excess_bytes: int
    """Peak less the limit without the headroom; positive if it does not fit."""
    phase: str
    """Where the new peak is."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.excess_bytes <= 0

    @property
    def faster(self) -> bool:
        """Whether the step is shorter, beyond rounding."""
        return self.delta_s < -NO_CHANGE * self.step_time_s

    @property
    def as_fast(self) -> bool:
        """Whether the step takes equally long, up to rounding."""
        return abs(self.delta_s) <= NO_CHANGE * self.step_time_s


@dataclass(frozen=True)
class Part:
    """Stages with the same label and choice, and the best alternatives for one of them."""

    label: str
    """Class of the blocks, names of the operators, or `TIED`."""
    stages: tuple[int, ...]
    strategies: tuple[str, ...]
    """Distinct strategies of its operators."""
    recompute: Recompute | None
    """None where it is no block."""
    tempting: Alternative | None
    """The fastest faster one that does not fit."""
    better: Alternative | None
    """The fastest faster one that fits."""
    cheapest: Alternative | None
    """Of those that are not faster and fit, the one that costs least time."""
    pinned: bool = False
    """Whether the user fixed some of its choices."""

    @property
    def binds(self) -> str:
        """What prevents a faster choice: `memory`, `time`, `pin` or `nothing`."""
        if self.better:
            return "pin" if self.pinned else "nothing"
        return "memory" if self.tempting else "time"


def open_plan(plan: Plan, graph: ModelGraph, cluster: Cluster) -> OpenPlan:
    """Return a plan with its prediction recomputed from the model and the cluster.

    Raises OsdpError if the plan is not for this model, or its strategies not for this cluster.
    """
    check_model(plan, graph)
    space = space_of(plan, graph, cluster)
    load = Workload.of(graph, cluster, plan.optimizer, plan.micro_batch, plan.accumulation, plan.waits)
    decided = decisions_of(plan, space, cluster)
    prediction = predict(decided.options(space, load, plan.usable_bytes), space, load)
    return OpenPlan(plan, space, load, decided, prediction)


def find_target(view: OpenPlan, name: str) -> Target:
    """Return the stages that `name` matches: an operator, a block, a module around them, or a pattern such as `h.*`.

    Raises OsdpError with the closest names.
    """
    names = _places(view)
    if name in names:
        return names[name]
    found = [place for known, place in names.items() if matches(known, name)]
    if not found:
        raise unknown_name(name, names, "the plan has no such operator or block")
    return Target(frozenset().union(*(place.stages for place in found)), any(place.spanning for place in found))


def _places(view: OpenPlan) -> dict[str, Target]:
    """Return the target of every operator's and block's name."""
    model = view.space.model
    operators = model.graph.operators
    names: dict[str, Target] = {}
    for index, stage in enumerate(model.stages):
        if stage.block is not None:
            names[stage.name] = Target(frozenset({index}))
        for operator in stage.operators:
            for name in {operators[operator].name, *operators[operator].modules}:
                # Slices of one operator may be in several stages.
                names[name] = Target(names.get(name, Target()).stages | {index})
    for tied in (operators[index] for index in model.spanning):
        names |= dict.fromkeys((*tied.modules, tied.name), Target(spanning=True))
    return names


def alternatives(view: OpenPlan, target: Target) -> list[Alternative]:
    """Return the alternatives for a target, the fastest first."""
    stages = [view.space.model.stages[index] for index in target.stages]
    strategies = strategies_on(view.load.cluster, view.load.offers_uneven)
    if not target.spanning and not any(stage.operators for stage in stages):
        strategies = strategies[:1]  # Nothing to shard; only recomputation is left.
    modes = sorted(set[Recompute]().union(*(stage.offered(view.load.cluster) for stage in stages)))
    recomputes = modes if len(modes) > 1 else (None,)
    found = [
        _alternative(view, strategy, recompute, decided)
        for strategy in strategies
        for recompute in recomputes
        if (decided := _decided(view, target, strategy, recompute or Recompute.NOTHING)) != view.decided
    ]
    return sorted(found, key=lambda other: (other.delta_s, other.peak_bytes))


def _decided(view: OpenPlan, target: Target, strategy: Strategy, recompute: Recompute) -> Decisions:
    """Return the plan's decisions with the target's replaced."""
    choices, spanning = list(view.decided.choices), view.decided.spanning
    for index in target.stages:
        stage = view.space.model.stages[index]
        choices[index] = StageDecision((strategy,) * len(stage.operators), stage.allowed(recompute))
    tied = (strategy,) * len(spanning) if target.spanning else spanning
    return replace(view.decided, choices=tuple(choices), spanning=tied)


def _alternative(view: OpenPlan, strategy: Strategy, recompute: Recompute | None, decided: Decisions) -> Alternative:
    options = decided.options(view.space, view.load, view.plan.usable_bytes)
    before, after = view.prediction, predict(options, view.space, view.load)
    return Alternative(
        strategy=str(strategy),
        recompute=recompute,
        step_time_s=after.step_time_s,
        delta_by_term_s={term: after.time_by_term[term] - seconds for term, seconds in before.time_by_term.items()},
        delta_s=after.step_time_s - before.step_time_s,
        peak_bytes=after.peak_memory_bytes,
        delta_bytes=after.peak_memory_bytes - before.peak_memory_bytes,
        excess_bytes=after.peak_memory_bytes - view.plan.usable_bytes,
        phase=after.peak_phase,
    )


def parts(view: OpenPlan, *, sampled: bool = False) -> list[Part]:
    """Return the parts of a plan in execution order, each with the best changes of one of its stages.

    If `sampled`, of the stage in its middle: what is tried takes a time that does not grow with the model.
    """
    groups: dict[tuple[str, StageDecision], list[int]] = {}
    for index, choice in enumerate(view.decided.choices):
        if choice.strategies or choice.recompute:
            groups.setdefault((view.label_of(index), choice), []).append(index)
    operators, blocks = _pinned(view)
    found = []
    for (label, choice), stages in groups.items():
        members = [view.space.model.stages[index] for index in stages]
        tried = [stages[len(stages) // 2]] if sampled else stages
        changes = [other for index in tried for other in alternatives(view, Target(frozenset({index})))]
        recompute = choice.recompute if members[0].block is not None else None
        pinned = any(not operators.isdisjoint(stage.operators) or stage.block in blocks for stage in members)
        found.append(Part(label, tuple(stages), _distinct(choice.strategies), recompute, *best_of(changes), pinned))
    if view.decided.spanning:
        changes = alternatives(view, Target(spanning=True))
        pinned = not operators.isdisjoint(view.space.model.spanning)
        found.append(Part(TIED, (), _distinct(view.decided.spanning), None, *best_of(changes), pinned))
    return found


def _distinct(strategies: Iterable[Strategy]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(str, strategies)))


def _pinned(view: OpenPlan) -> tuple[frozenset[int], frozenset[int]]:
    """Return the operators of the space and the blocks that the user pinned."""
    graph = view.space.graph
    pins = resolve([parse_pin(pin) for pin in view.plan.asked.pins], graph, view.load.cluster)
    starts = slice_starts(graph, view.space.counts)
    operators = {part for index in pins.strategies for part in range(starts[index], starts[index + 1])}
    return frozenset(operators), frozenset(pins.recompute)


def best_of(changes: Iterable[Alternative]) -> tuple[Alternative | None, Alternative | None, Alternative | None]:
    """Return the most tempting, the best and the cheapest change; see `Part`."""
    ordered = sorted(changes, key=lambda other: (other.delta_s, other.peak_bytes))
    tempting = next((other for other in ordered if other.faster and not other.fits), None)
    better = next((other for other in ordered if other.faster and other.fits), None)
    cheapest = next((other for other in ordered if not other.faster and other.fits), None)
    return tempting, better, cheapest
