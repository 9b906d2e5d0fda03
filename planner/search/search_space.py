"""The plans that the search looks at: for each kind of stage, its options.

`planner.search.candidates` says what a stage may take, `planner.search.pareto` what of it no plan needs.  Spanning
operators share one strategy.  Plans that are not the search's may mix strategies as they like and
split every linear operator (`Space.fixed`).

Choices with split operators are priced in a variant of the model in which one stage's operators are
sliced; a whole plan is then priced in the model with all its slices (`Space.settled`), as a plan that
is read from a file is.  Ranks differ by the operators of strategy `owner` that they own.  In menus
each rank owns 1/N of them: at no moment is the mean over ranks more than what the fullest rank holds,
so bounds hold; a settled plan is priced on the fullest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate, groupby, product

import numpy as np

from planner.cost.peak_memory import MemoryPeak, peak_memory
from planner.cost.stage_costs import StageCosts, UnitCosts
from planner.cost.stage_option import StageCandidate, ambient, make_option
from planner.cost.stragglers import NO_WAITS, Waits
from planner.cost.unit_communication import UnitTraffic
from planner.cost.unit_memory import UnitBytes
from planner.cost.workload import Workload
from planner.model.fsdp_units import owners_of, units_of
from planner.model.operator_split import slice_operators
from planner.model.stages import StagedModel, cut
from planner.search.candidates import (
    DIVERSE_STRATEGIES,
    LIGHT_STRATEGIES,
    MANY_KINDS,
    NO_PINS,
    Pins,
    StageDecision,
    choices_of,
    first_and_least,
    light_stages,
)
from planner.search.pareto import option_numbers, undominated, unit_numbers
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Operator

__all__ = ["NO_PINS", "CandidateSet", "Pins", "Settled", "Space", "Spanning", "StageDecision", "idle_strategy"]

NOWHERE: frozenset[int] = frozenset()
"""No operator is owned by another rank."""

Spanning = Strategy | tuple[Strategy, ...] | None
"""Strategies of the spanning operators: one for all, one for each, or None if there are none."""


@dataclass(frozen=True)
class CandidateSet:
    """For one workload and one strategy of the spanning operators: the options of every stage."""

    load: Workload
    spanning: Spanning
    """Strategies of the spanning operators; None if there are none, or all are offered."""
    kinds: tuple[int, ...]
    """For each stage in execution order, its index into `options`."""
    options: tuple[tuple[StageCandidate, ...], ...]
    """The options of each kind of stage."""
    choices: tuple[tuple[StageDecision, ...], ...]
    """The choice behind each option."""
    meets: bool = True
    """Whether its plans are charged the waiting of ranks that meet in every micro-batch (`planner.cost.step_time`)."""

    @property
    def is_empty(self) -> bool:
        """Whether some stage has no option."""
        return not all(self.options)

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return (kind, length) of maximal runs of alike stages in execution order."""
        return tuple((kind, len(list(run))) for kind, run in groupby(self.kinds))

    def only(self, kept: Sequence[Sequence[int]]) -> CandidateSet:
        """Return the menu with some options of each kind of stage."""
        options = tuple(tuple(self.options[kind][k] for k in rows) for kind, rows in enumerate(kept))
        choices = tuple(tuple(self.choices[kind][k] for k in rows) for kind, rows in enumerate(kept))
        return replace(self, options=options, choices=choices)

    def without_dominated(self) -> CandidateSet:
        """Return the menu without the options that no plan needs."""
        return self.only([undominated(option_numbers(options, self.load, self.meets)) for options in self.options])

    def chosen(self, picks: Sequence[int]) -> tuple[StageDecision, ...]:
        """Return the choices of a plan, given the index of every stage's option."""
        return tuple(self.choices[kind][k] for kind, k in zip(self.kinds, picks, strict=True))


@dataclass(frozen=True)
class Settled:
    """A whole plan, priced as a plan that is read from a file is."""

    space: Space
    """With the operators split that the plan splits."""
    choices: tuple[StageDecision, ...]
    """One per stage of that space."""
    options: tuple[StageCandidate, ...]


class _MeanCosts(UnitCosts):
    """Costs of units on the mean over ranks, rounded down."""

    def __call__(
        self, operators: tuple[int, ...], strategy: Strategy, elsewhere: bool = False
    ) -> tuple[UnitBytes, UnitTraffic]:
        mine, traffic = super().__call__(operators, strategy, elsewhere)
        if not strategy.spec.has_owner or elsewhere:
            return mine, traffic
        other, _ = super().__call__(operators, strategy, elsewhere=True)
        ranks = strategy.group
        mean = [(getattr(mine, f.name) + (ranks - 1) * getattr(other, f.name)) // ranks for f in fields(UnitBytes)]
        return UnitBytes(*mean), traffic


def idle_strategy(cluster: Cluster) -> Strategy:
    """Return what operators that are never called take: as little memory as can be."""
    return max(strategies_on(cluster), key=lambda strategy: strategy.group)


def _around(option: StageCandidate, unsharded: int, gradients: int) -> StageCandidate:
    """Return an option with what spanning operators elsewhere hold."""
    if not unsharded and not gradients:
        return option
    return replace(option, ambient_unsharded=unsharded, ambient_gradients=gradients)


def _columns(
    found: Sequence[Sequence[tuple[StageDecision, StageCandidate]]],
) -> tuple[tuple[tuple[StageCandidate, ...], ...], tuple[tuple[StageDecision, ...], ...]]:
    """Return the options and the choices of each kind of stage."""
    options = tuple(tuple(option for _, option in pairs) for pairs in found)
    return options, tuple(tuple(choice for choice, _ in pairs) for pairs in found)


class Space:
    """The options of a model on a cluster; a cache over workloads.

    `counts` says into how many slices operators are split; `model` has slices in place of these.
    `pins` are for the search, in a space where nothing is split yet.
    """

    def __init__(self, graph: ModelGraph, counts: Mapping[int, int] | None = None, pins: Pins = NO_PINS) -> None:
        self.graph, self.counts, self.pins = graph, dict(counts or {}), pins
        self.model: StagedModel = cut(*slice_operators(graph, self.counts))
        self._check_pins()
        names = [(stage.kind, self._pinned(stage.operators, stage.block)) for stage in self.model.stages]
        order = {name: position for position, name in enumerate(dict.fromkeys(names))}
        self.kinds = tuple(order[name] for name in names)
        self._examples = [self.kinds.index(kind) for kind in range(len(order))]
        self._units: dict[tuple[object, ...], UnitCosts] = {}
        self._variants: dict[tuple[int, tuple[int, ...]], tuple[StagedModel, dict[int, int]]] = {}
        self._loads: dict[tuple[object, ...], Workload] = {}
        self.light = light_stages(self.model.stages, self.model.graph)
        self._offers: dict[tuple[object, ...], tuple[StageDecision, ...]] = {}
        self._sliced: dict[tuple[tuple[int, int], ...], Space] = {}
        self.stage_costs = cache(self._stage_costs)
        self._variant_costs = cache(self._make_variant_costs)
        self._alone = cache(self._make_alone)
        self.option = cache(self._option)
        self._worthwhile = cache(self._make_worthwhile)
        self.menu = cache(self._menu)
        self.relaxed_menu = cache(self._relaxed_menu)

    # --- pins ---

    def _pinned(self, operators: tuple[int, ...], block: int | None) -> tuple[object, ...]:
        again = None if block is None else self.pins.recompute.get(block)
        return (*(self.pins.strategies.get(o) for o in operators), again)

    def _check_pins(self) -> None:
        for operator in (*self.model.spanning, *self.model.idle):
            if len(self.pins.strategies.get(operator, ())) > 1:
                raise OsdpError(
                    f"operator {self.graph.operators[operator].name} is not split by the search",
                    got="a pin of several slices",
                    expected="one strategy, as it runs in several stages or is never called",
                )

    @property
    def has_pins(self) -> bool:
        """Whether the user decided anything."""
        return bool(self.pins.strategies or self.pins.recompute)

    def idle_strategies(self, cluster: Cluster) -> tuple[Strategy, ...]:
        """Return what the search gives operators that are never called."""
        least = idle_strategy(cluster)
        return tuple(self.pins.strategies.get(o, (least,))[0] for o in self.model.idle)

    def spanning_strategies(self, cluster_strategies: Sequence[Strategy]) -> tuple[Spanning, ...]:
        """Return what the spanning operators may take."""
        spanning, pinned = self.model.spanning, self.pins.strategies
        if not spanning:
            return (None,)
        if pinned.keys().isdisjoint(spanning):
            return tuple(cluster_strategies)
        return tuple(dict.fromkeys(tuple(pinned.get(o, (s,))[0] for o in spanning) for s in cluster_strategies))

    # --- options ---

    def workload(
        self,
        cluster: Cluster,
        optimizer: str,
        precision: str,
        micro_batch: int,
        accumulation: int = 1,
        waits: Waits = NO_WAITS,
    ) -> Workload:
        """Return a workload, the same object for the same figures: caches go by it, so searches share them."""
        key = (id(cluster), optimizer, precision, micro_batch, accumulation, waits)
        if key not in self._loads:
            self._loads[key] = Workload(cluster, optimizer, precision, micro_batch, accumulation, waits)
        return self._loads[key]

    def _stage_costs(self, kind: int, load: Workload) -> StageCosts:
        return StageCosts(self.model, self._examples[kind], load)

    def _make_variant_costs(self, kind: int, counts: tuple[int, ...], load: Workload) -> StageCosts:
        return StageCosts(self._variant(kind, counts)[0], self._examples[kind], load)

    def _variant(self, kind: int, counts: tuple[int, ...]) -> tuple[StagedModel, dict[int, int]]:
        """Return the model with one example's operators split, and the operator of this model behind each one."""
        if (kind, counts) not in self._variants:
            operators = self.model.stages[self._examples[kind]].operators
            split = {o: count for o, count in zip(operators, counts, strict=True) if count > 1}
            model = cut(*slice_operators(self.graph, split))
            wholes = [o for o in range(len(self.graph.operators)) for _ in range(split.get(o, 1))]
            self._variants[kind, counts] = model, dict(enumerate(wholes))
        return self._variants[kind, counts]

    def spanning_choices(self, spanning: Spanning) -> dict[int, Strategy]:
        """Return the strategy of every spanning operator."""
        if spanning is None:
            return {}
        if isinstance(spanning, Strategy):
            return dict.fromkeys(self.model.spanning, spanning)
        return dict(zip(self.model.spanning, spanning, strict=True))

    def _option(
        self,
        kind: int,
        choice: StageDecision,
        spanning: Spanning,
        load: Workload,
        elsewhere: frozenset[int] | None = NOWHERE,
    ) -> StageCandidate:
        here = self.model.stages[self._examples[kind]].spanning
        option = self._alone(kind, choice, spanning if here else None, load, elsewhere)
        return _around(option, *self._ambient(kind, spanning, load)) if spanning else option

    def _ambient(self, kind: int, spanning: Spanning, load: Workload) -> tuple[int, int]:
        around = self.spanning_choices(spanning)
        return ambient(self.model, self._examples[kind], around, self._unit_costs(load))

    def _make_alone(
        self, kind: int, choice: StageDecision, spanning: Spanning, load: Workload, elsewhere: frozenset[int] | None
    ) -> StageCandidate:
        """Return the option without what spanning operators elsewhere hold; `elsewhere` None: on the mean rank."""
        around, mean = self.spanning_choices(spanning), elsewhere is None
        if choice.counts:
            model, wholes = self._variant(kind, choice.counts)
            numbers = {whole: o for o, whole in reversed(wholes.items())}
            spans = {numbers[o]: strategy for o, strategy in around.items()}
            units = self._unit_costs(load, mean, (kind, choice.counts), model)
            costs = self._variant_costs(kind, choice.counts, load)
            option = make_option(costs, units, choice.strategies, choice.recompute, spans)
            moments = tuple(replace(moment, operator=wholes[moment.operator]) for moment in option.moments)
            option = replace(option, moments=moments)
        else:
            costs, units = self.stage_costs(kind, load), self._unit_costs(load, mean)
            option = make_option(costs, units, choice.strategies, choice.recompute, around, elsewhere or NOWHERE)
        if self.model.idle and self._examples[kind] == 0:
            idle = dict(zip(self.model.idle, self.idle_strategies(load.cluster), strict=True))
            return replace(option, parameters=option.parameters + self._resting(idle, load, mean=mean))
        return option

    def _resting(
        self, idle: Mapping[int, Strategy], load: Workload, elsewhere: frozenset[int] = frozenset(), mean: bool = False
    ) -> int:
        """Return the bytes of operators that are never called: parameters, and never a gradient."""
        units = self._unit_costs(load, mean)
        return sum(units((o,), strategy, o in elsewhere)[0].parameters for o, strategy in idle.items())

    def _unit_costs(
        self, load: Workload, mean: bool = False, variant: object = None, model: StagedModel | None = None
    ) -> UnitCosts:
        key = (id(load.cluster), load.precision, load.optimizer_name, mean, variant)
        if key not in self._units:
            # It refers to `load`, so the cluster lives as long as its id is a key.
            self._units[key] = (_MeanCosts if mean else UnitCosts)(model or self.model, load)
        return self._units[key]

    # --- menus ---

    @property
    def is_diverse(self) -> bool:
        """Whether so few stages are alike that mixes and splits are left out."""
        return len(self._examples) > MANY_KINDS

    def choices(self, kind: int, load: Workload) -> tuple[StageDecision, ...]:
        """Return the choices of a kind of stage, those left out that no plan needs at any micro-batch."""
        uneven = load.waits.are_uneven
        key = (kind, id(load.cluster), load.precision, load.optimizer_name, uneven)
        if key not in self._offers:
            stage, strategies = self.model.stages[self._examples[kind]], strategies_on(load.cluster, uneven)
            if self.pins.strategies.keys().isdisjoint(stage.operators):
                strategies = self._offered(stage.operators, strategies, load)
            light = self._examples[kind] in self.light
            if light or self.is_diverse:
                strategies = first_and_least(strategies, LIGHT_STRATEGIES if light else DIVERSE_STRATEGIES)
            whole = light or self.is_diverse
            self._offers[key] = tuple(choices_of(stage, self.model.graph, strategies, self.pins, whole))
        return self._offers[key]

    def _offered(
        self, operators: Sequence[int], strategies: Sequence[Strategy], load: Workload, alone: bool = False
    ) -> tuple[Strategy, ...]:
        """Return the strategies that no other dominates if all the operators take the same one.

        `alone` says that each of the operators is a unit of its own, as it is under `owner` in any case.
        """
        if not operators:
            return tuple(strategies)
        units, kept = self._unit_costs(load, mean=True), list[Strategy]()
        for joins, offload in product((True, False), repeat=2):
            alike = [s for s in strategies if s.spec.joins == joins and s.offload == offload]
            groups = [tuple(operators)] if joins and not alone else [(o,) for o in operators]
            rows = [[n for group in groups for n in unit_numbers(*units(group, s), s)] for s in alike]
            kept += [alike[k] for k in undominated(np.array(rows))] if rows else []
        return tuple(strategy for strategy in strategies if strategy in kept)

    def spanning_offered(self, load: Workload) -> tuple[Spanning, ...]:
        """Return what the spanning operators take in the search."""
        strategies = strategies_on(load.cluster, load.waits.are_uneven)
        if self.pins.strategies.keys().isdisjoint(self.model.spanning):
            strategies = self._offered(self.model.spanning, strategies, load, alone=True)
        return self.spanning_strategies(strategies)

    def _menu_options(
        self, kind: int, spanning: Spanning, load: Workload
    ) -> list[tuple[StageDecision, StageCandidate]]:
        """Return the choices of a kind of stage and an option of each, on the mean rank if ranks differ."""
        others = {*self.spanning_choices(spanning).values(), *self.idle_strategies(load.cluster)}
        found = []
        for choice in self.choices(kind, load):
            differ = any(strategy.spec.has_owner for strategy in (*choice.strategies, *others))
            found.append((choice, self._alone(kind, choice, spanning, load, None if differ else NOWHERE)))
        return found

    def _make_worthwhile(
        self, kind: int, spanning: Spanning, load: Workload, meets: bool
    ) -> list[tuple[StageDecision, StageCandidate]]:
        """Return those that no others dominate, without what spanning operators elsewhere hold.

        What these hold is the same for all, so it changes nothing of who dominates whom.
        """
        found = [pair for pair in self._menu_options(kind, spanning, load) if meets or not pair[1].meets]
        return [found[k] for k in undominated(option_numbers([option for _, option in found], load, meets))]

    def _menu(self, load: Workload, spanning: Spanning, meets: bool = True) -> CandidateSet:
        """Return the options of every stage under given strategies of the spanning operators.

        With `meets` plans are charged for ranks that meet in every micro-batch, as all but a few do.
        Without, only options are offered that meet once per step, and they are charged so.  Every plan
        is in one of the two menus as it is priced, and in the other, if at all, at no less.
        """
        found = []
        for kind, example in enumerate(self._examples):
            pairs = self._worthwhile(kind, spanning if self.model.stages[example].spanning else None, load, meets)
            held = self._ambient(kind, spanning, load) if spanning else (0, 0)
            found.append([(choice, _around(option, *held)) for choice, option in pairs])
        return CandidateSet(load, spanning, self.kinds, *_columns(found), meets)

    def _relaxed_menu(self, load: Workload, meets: bool = True) -> CandidateSet:
        """Return a menu that costs no plan more than it does, whatever the spanning operators take.

        Stages that call them offer all their strategies, each for itself; elsewhere they hold the least.
        """
        takes = self.spanning_offered(load)
        if len(takes) == 1:
            return self.menu(load, takes[0], meets)
        found = []
        for kind, example in enumerate(self._examples):
            held = [self._ambient(kind, take, load) for take in takes]
            if self.model.stages[example].spanning:
                each = zip(takes, held, strict=True)
                found.append(
                    [
                        (choice, _around(option, *around))
                        for take, around in each
                        for choice, option in self._worthwhile(kind, take, load, meets)
                    ]
                )
                continue
            least = min(unsharded for unsharded, _ in held), min(gradients for _, gradients in held)
            pairs = self._worthwhile(kind, None, load, meets)
            found.append([(choice, _around(option, *least)) for choice, option in pairs])
        return CandidateSet(load, None, self.kinds, *_columns(found), meets).without_dominated()

    # --- whole plans ---

    def settled(self, load: Workload, choices: Sequence[StageDecision], spanning: Spanning) -> Settled:
        """Return a plan of the search as it is priced and written down."""
        counts: dict[int, int] = {}
        for stage, choice in zip(self.model.stages, choices, strict=True):
            if choice.counts:
                counts |= {o: n for o, n in zip(stage.operators, choice.counts, strict=True) if n > 1}
        flat = tuple(replace(choice, counts=()) for choice in choices)
        space = self._with_slices(counts) if counts else self
        return Settled(space, flat, space.fixed(load, flat, spanning, self.idle_strategies(load.cluster)))

    def _with_slices(self, counts: Mapping[int, int]) -> Space:
        key = tuple(sorted(counts.items()))
        if key not in self._sliced:
            starts = [0, *accumulate(counts.get(index, 1) for index in range(len(self.graph.operators)))]
            alone = {*self.model.spanning, *self.model.idle}
            pins = {starts[o]: slices for o, slices in self.pins.strategies.items() if o in alone}
            self._sliced[key] = Space(self.graph, counts, Pins(pins))
        return self._sliced[key]

    def operator_at(self, peak: MemoryPeak) -> Operator | None:
        """Return the operator that a peak names; None in the optimizer step.

        Options are made for one example of each kind of stage, and so name the example's operators.
        """
        if peak.stage is None or peak.operator is None:
            return None
        stage, example = self.model.stages[peak.stage], self.model.stages[self._examples[self.kinds[peak.stage]]]
        position = [call.operator for call in example.calls].index(peak.operator)
        return self.model.graph.operators[stage.calls[position].operator]

    def fixed(
        self,
        load: Workload,
        choices: tuple[StageDecision, ...],
        spanning: Spanning,
        idle: tuple[Strategy, ...] | None = None,
    ) -> tuple[StageCandidate, ...]:
        """Return the options of a whole plan on the rank that holds most, one choice per stage; see `fullest`."""
        return self.fullest(load, choices, spanning, idle)[1]

    def fullest(
        self,
        load: Workload,
        choices: tuple[StageDecision, ...],
        spanning: Spanning,
        idle: tuple[Strategy, ...] | None = None,
    ) -> tuple[int, tuple[StageCandidate, ...]]:
        """Return the rank that holds most under a whole plan, one choice per stage, and its options.

        `idle` gives the strategies of operators that are never called, as little as can be if None.
        Ranks differ by the operators of strategy `owner` that they own.
        """
        if idle is None:
            idle = self.idle_strategies(load.cluster)
        resting = dict(zip(self.model.idle, idle, strict=True))
        owners = self._owners(choices, self.spanning_choices(spanning) | resting, load.cluster)
        ranks = {
            rank: self._on_rank(load, choices, spanning, resting, frozenset(o for o in owners if owners[o] != rank))
            for rank in sorted(set(owners.values())) or [0]
        }
        if len(ranks) == 1:
            return next(iter(ranks.items()))
        return max(ranks.items(), key=lambda rank: peak_memory(rank[1], load).total_bytes)

    def _owners(
        self, choices: tuple[StageDecision, ...], others: Mapping[int, Strategy], cluster: Cluster
    ) -> dict[int, int]:
        """Return the owning rank of every operator of strategy `owner`."""
        taken = dict(others)
        for stage, choice in zip(self.model.stages, choices, strict=True):
            taken |= zip(stage.operators, choice.strategies, strict=True)
        if not any(strategy.spec.has_owner for strategy in taken.values()):
            return {}
        units = units_of(self.model, {operator: (strategy,) for operator, strategy in taken.items()})
        owners = owners_of(units, self.model.graph, cluster.world_size)
        return {units[position].operators[0]: rank for position, rank in owners.items()}

    def _on_rank(
        self,
        load: Workload,
        choices: tuple[StageDecision, ...],
        spanning: Spanning,
        idle: Mapping[int, Strategy],
        elsewhere: frozenset[int],
    ) -> tuple[StageCandidate, ...]:
        """Return the options of a whole plan where another rank owns the operators in `elsewhere`."""
        options = []
        for kind, stage, choice in zip(self.kinds, self.model.stages, choices, strict=True):
            # Options are made for one example of each kind of stage; spanning operators are everywhere the same.
            alike = zip(stage.operators, self.model.stages[self._examples[kind]].operators, strict=True)
            others = frozenset(mine for operator, mine in alike if operator in elsewhere)
            others |= elsewhere & set(stage.spanning)
            options.append(self.option(kind, choice, spanning, load, others))
        if idle:
            least = self._resting(dict(zip(idle, self.idle_strategies(load.cluster), strict=True)), load)
            resting = self._resting(idle, load, elsewhere)
            options[0] = replace(options[0], parameters=options[0].parameters + resting - least)
        return tuple(options)
