"""The search space: for each class of stages, its options with their memory and time.

`planner.options.candidates` enumerates the choices of a stage, `planner.options.pareto` drops those that no plan needs.
All spanning operators take one strategy.

Choices with split operators are priced in a variant of the model in which one stage's operators are sliced; a whole
plan is then priced in the model with all its slices (`planner.pricing`).  Ranks differ by the operators that each of
them owns whole.  In a `CandidateSet` each rank owns 1/N of them: the mean over ranks never exceeds what the fullest
rank holds, so bounds stay valid; a whole plan is priced on the fullest rank.  Where spanning operators are owned, the
set has the same options on the rank that owns the largest of them beside, as if other ranks owned all else: the fullest
rank holds no less than that either, and where it owns no more, that is all it holds.  `Space.owning` has plans by the
most that the operators owned in a stage give to one rank, in bytes or in its host's seconds, with that rank beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product

import numpy as np

from planner.cost.ddp import Replica, ReplicatedParameters
from planner.cost.peak_memory import MemoryPeak
from planner.cost.stage_costs import MeanUnitCosts, StageCosts, StageFrame, UnitCosts
from planner.cost.stage_option import Ambient, StageCandidate, StageOption, StageParts, StageUnits, ambient
from planner.cost.workload import Workload
from planner.model.fsdp_units import can_hold
from planner.model.operator_split import slice_operators, slice_starts
from planner.model.stages import StagedModel, cut
from planner.options.candidate_set import CandidateSet, Owned, Spanning, owned_ranges
from planner.options.candidates import MANY_CLASSES, StageDecision, choices_of, first_and_least, light_stages, modes_of
from planner.options.option_columns import OptionList
from planner.options.option_table import OptionTable
from planner.options.pareto import undominated, unit_numbers
from planner.problem import NO_PINS, Pins
from planner.strategies.owner_assignment import least_of_fullest
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Operator, Recompute

Away = frozenset[int] | None
"""Operators that other ranks own; None: on the mean over ranks."""

NOWHERE: Away = frozenset()

Splits = Mapping[int, int] | None
Priced = tuple[tuple[StageDecision, ...], tuple[OptionList, ...]]
"""Choices of a class of stages, and the option of each on every rank that is looked at."""


class Space:
    """The options of a model on a cluster, cached over workloads.

    `counts` gives the number of slices of operators that are split; `model` has the slices in their place.
    `pins` restrict the search; they need a space in which nothing is split yet.
    """

    def __init__(
        self, graph: ModelGraph, counts: Splits = None, pins: Pins = NO_PINS, leaves_out: bool = False
    ) -> None:
        self.graph, self.counts, self.pins = graph, dict(counts or {}), pins
        self.model: StagedModel = cut(*slice_operators(graph, self.counts), leaves_out=leaves_out)
        self._check_pins()
        again = [None if stage.block is None else pins.recompute.get(stage.block) for stage in self.model.stages]
        taken = [tuple(map(pins.strategies.get, stage.operators)) for stage in self.model.stages]
        names = list(zip((stage.stage_class for stage in self.model.stages), taken, again, strict=True))
        order = {name: position for position, name in enumerate(dict.fromkeys(names))}
        self.stage_classes = tuple(order[name] for name in names)
        self.examples = [self.stage_classes.index(stage_class) for stage_class in range(len(order))]
        self._units: dict[tuple[object, ...], UnitCosts] = {}
        self._clusters: list[Cluster] = []
        self._loads: dict[tuple[object, ...], Workload] = {}
        self._offers: dict[tuple[object, ...], tuple[StageDecision, ...]] = {}
        self._modes: dict[tuple[object, ...], tuple[Recompute, ...]] = {}
        self.with_slices = cache(self._with_slices)
        self._first_loads: dict[tuple[object, ...], Workload] = {}
        self._first_load = cache(self._find_first_load)
        self._offered_of = cache(self._find_spanning_offered)
        self._frame = cache(self._make_frame)
        self.costs = cache(lambda c, counts, load: StageCosts(self._frame(c, counts, self._first_load(load)), load))
        self._variant = cache(self._make_variant)
        self._made_once = cache(self._make_at_any_batch)
        self._parts = cache(StageParts)
        self._staged_units = lru_cache(1)(self._make_staged_units)  # choices that differ in recomputation come together
        self._all = cache(self._make_all)
        self._all_of = cache(lambda c, takes, load: [pair for take in takes for pair in self._all(c, take, load, None)])
        self._table = cache(lambda *key: OptionTable(self._all(*key)))
        self._alone = cache(self._make_alone)
        self.option = cache(self._option)
        self._worthwhile = cache(self._make_worthwhile)
        self.candidates = cache(self._candidates)
        self.owned = cache(self._find_owned)
        self._rows_owning = cache(self._find_rows_owning)
        self.relaxed_candidates = cache(self._relaxed_candidates)
        self._replicated = dict[tuple[object, ...], ReplicatedParameters]()
        self.replica = cache(self._make_replica)

    @cached_property
    def _every_operator(self) -> frozenset[int]:
        return frozenset(range(len(self.model.graph.operators)))

    @cached_property
    def light(self) -> frozenset[int]:
        """Stages whose strategies hardly matter; spaces that only price plans never ask."""
        return light_stages(self.model.stages, self.model.graph)

    @cached_property
    def of_least_step(self) -> Space | None:
        """The same of the step that takes least, if that leaves out some calls; only plans are priced in it."""
        kinds = {call.occasional for call in self.model.graph.calls}
        return Space(self.graph, self.counts, leaves_out=True) if len(kinds) > 1 else None

    # --- pins ---

    def _check_pins(self) -> None:
        for operator in (*self.model.spanning, *self.model.idle):
            if len(self.pins.strategies.get(operator, ())) > 1:
                what = f"operator {self.graph.operators[operator].name} cannot be split by the search"
                expected = "one strategy, as it is called in several stages or never"
                raise OsdpError(what, got="a pin with several slices", expected=expected)

    def idle_strategies(self, cluster: Cluster) -> tuple[Strategy, ...]:
        """Return the strategies of operators that are never called: pinned ones, else those of least memory."""
        if not self.model.idle:
            return ()
        least = max(strategies_on(cluster), key=lambda strategy: strategy.group)
        return tuple(self.pins.strategies.get(o, (least,))[0] for o in self.model.idle)

    # --- options ---

    def known_load(self, load: Workload) -> Workload:
        """Return the first workload that equalled this one: the caches here compare workloads by identity."""
        cluster, known = load.cluster, self._clusters
        place = next((i for i, one in enumerate(known) if one is cluster or one == cluster), len(known))
        known[place:] = known[place:] or [cluster]
        settings = (load.optimizer_name, load.precision, load.micro_batch, load.accumulation)
        return self._loads.setdefault((place, *settings, load.waits, load.for_uneven), load)

    def _make_variant(self, stage_class: int, counts: tuple[int, ...]) -> tuple[StagedModel, dict[int, int]]:
        """Return the model with one example's operators split, and for each of its operators the one of this model."""
        operators = self.model.stages[self.examples[stage_class]].operators
        split = {o: count for o, count in zip(operators, counts, strict=True) if count > 1}
        wholes = [o for o in range(len(self.graph.operators)) for _ in range(split.get(o, 1))]
        return cut(*slice_operators(self.graph, split)), dict(enumerate(wholes))

    def spanning_choices(self, spanning: Spanning) -> dict[int, Strategy]:
        """Return the strategy of every spanning operator."""
        if spanning is None:
            return {}
        if isinstance(spanning, Strategy):
            return dict.fromkeys(self.model.spanning, spanning)
        return dict(zip(self.model.spanning, spanning, strict=True))

    def _option(
        self, stage_class: int, choice: StageDecision, spanning: Spanning, load: Workload, elsewhere: Away = NOWHERE
    ) -> StageCandidate:
        here = self.model.stages[self.examples[stage_class]].spanning
        option = self._alone(stage_class, choice, spanning if here else None, load, elsewhere)
        return option.around(self._ambient(stage_class, spanning, load))

    def _ambient(self, stage_class: int, spanning: Spanning, load: Workload) -> Ambient:
        around = self.spanning_choices(spanning)
        return ambient(self.model, self.examples[stage_class], around, self._unit_costs(load))

    def _make_alone(
        self, stage_class: int, choice: StageDecision, spanning: Spanning, load: Workload, elsewhere: Away
    ) -> StageCandidate:
        """Return the option without spanning operators that are called in other stages only."""
        option = self._at_any_batch(stage_class, choice, spanning, load, elsewhere)
        return option.at(self.costs(stage_class, choice.counts, load))

    def _at_any_batch(
        self, stage_class: int, choice: StageDecision, spanning: Spanning, load: Workload, elsewhere: Away
    ) -> StageOption:
        offloads = any(strategy.offload for strategy in (*choice.strategies, *self.spanning_choices(spanning).values()))
        return self._made_once(stage_class, choice, spanning, self._first_load(load, offloads), elsewhere)

    def _make_at_any_batch(
        self, stage_class: int, choice: StageDecision, spanning: Spanning, load: Workload, elsewhere: Away
    ) -> StageOption:
        staged = self._staged_units(stage_class, choice.strategies, choice.counts, spanning, load, elsewhere)
        option = staged.option(choice.recompute)
        if choice.counts:
            option = option.renumbered(self._variant(stage_class, choice.counts)[1])
        if self.model.idle and self.examples[stage_class] == 0:
            idle = dict(zip(self.model.idle, self.idle_strategies(load.cluster), strict=True))
            more = self.resting_bytes(idle, load, elsewhere or frozenset(), mean=elsewhere is None)
            constants = {**option.constants, "parameters": option.constants["parameters"] + more}
            return replace(option, constants=constants)
        return option

    def _make_staged_units(
        self,
        stage_class: int,
        strategies: tuple[Strategy, ...],
        counts: tuple[int, ...],
        spanning: Spanning,
        load: Workload,
        elsewhere: Away,
    ) -> StageUnits:
        around, away, mean = self.spanning_choices(spanning), elsewhere or frozenset(), elsewhere is None
        frame = self._frame(stage_class, counts, load)
        if not counts:
            return StageUnits(self._parts(frame, self._unit_costs(load, mean)), strategies, around, away)
        model, wholes = self._variant(stage_class, counts)
        numbers = {whole: o for o, whole in reversed(wholes.items())}
        spans = {numbers[o]: strategy for o, strategy in around.items()}
        units = self._unit_costs(load, mean, (stage_class, counts), model)
        parts_away = frozenset(o for o, whole in wholes.items() if whole in away)
        return StageUnits(self._parts(frame, units), strategies, spans, parts_away)

    def stage_costs(self, stage_class: int, load: Workload) -> StageCosts:
        """Return the costs of the calls of a class of stages."""
        return self.costs(stage_class, (), load)

    def _find_first_load(self, load: Workload, offloads: bool = True) -> Workload:
        """Return the first workload that differed from this one in the micro-batch and its waiting alone.

        Where nothing is offloaded, of which the host sums the gradients, it may differ in how many more micro-batches a
        step has than one.
        """
        repeats = load.accumulation if offloads else min(load.accumulation, 2)
        settings = id(load.cluster), load.precision, load.optimizer_name, repeats, load.offers_uneven, offloads
        return self._first_loads.setdefault(settings, load)

    def _make_frame(self, stage_class: int, counts: tuple[int, ...], load: Workload) -> StageFrame:
        model = self._variant(stage_class, counts)[0] if counts else self.model
        return StageFrame(model, self.examples[stage_class], load)

    def resting_bytes(
        self, idle: Mapping[int, Strategy], load: Workload, elsewhere: frozenset[int] = frozenset(), mean: bool = False
    ) -> int:
        """Return the bytes of operators that are never called; of those that other steps call, with all that rests."""
        costs, sums = self._unit_costs(load, mean), load.accumulation > 1
        units = {o: costs((o,), strategy, o in elsewhere)[0] for o, strategy in idle.items()}
        states = (units[o].optimizer + sums * units[o].gradients for o in self.model.idle_now & units.keys())
        return sum(states) + sum(unit.parameters + unit.window for unit in units.values())

    def _unit_costs(
        self, load: Workload, mean: bool = False, variant: object = None, model: StagedModel | None = None
    ) -> UnitCosts:
        # The costs refer to `load`, so the cluster lives as long as its id is a key.
        key = id(load.cluster), load.precision, load.optimizer_name, mean, variant
        if key not in self._units:
            costs = self._units[key] = (MeanUnitCosts if mean else UnitCosts)(model or self.model, load)
            if mean:
                costs.known = self._unit_costs(load, False, variant, model).known
        return self._units[key]

    def _make_replica(self, load: Workload) -> Replica:
        """Return the model under DistributedDataParallel."""
        key = id(load.cluster), load.precision, load.optimizer_name
        if key not in self._replicated:
            self._replicated[key] = ReplicatedParameters(self.model, load)
        costs = [self.stage_costs(stage_class, load) for stage_class in self.stage_classes]
        return Replica(self.model, self._replicated[key], costs, load)

    # --- candidate sets ---

    @property
    def is_diverse(self) -> bool:
        """Whether the stages have so many classes that mixes and splits are left out."""
        return len(self.examples) > MANY_CLASSES

    def choices(self, stage_class: int, load: Workload) -> tuple[StageDecision, ...]:
        """Return the choices of a class of stages, without those that no plan needs at any micro-batch."""
        example, uneven = self.examples[stage_class], load.offers_uneven
        key = (example, id(load.cluster), load.precision, load.optimizer_name, uneven)
        if key not in self._offers:
            stage = self.model.stages[example]
            strategies = self._fitting(stage.operators, strategies_on(load.cluster, uneven))
            if self.pins.strategies.keys().isdisjoint(stage.operators):
                strategies = self._offered(stage.operators, strategies, load)
            light = example in self.light
            whole = light or self.is_diverse
            strategies = first_and_least(strategies, light) if whole else strategies
            modes = self.modes(stage_class, load)
            self._offers[key] = tuple(choices_of(stage, self.model.graph, strategies, modes, self.pins, whole))
        return self._offers[key]

    def modes(self, stage_class: int, load: Workload) -> tuple[Recompute, ...]:
        """Return what may run again of a class of stages, as it is offered."""
        key = stage_class, id(load.cluster), load.precision
        if key not in self._modes:
            stage, alike = self.model.stages[self.examples[stage_class]], self.stage_classes.count(stage_class)
            self._modes[key] = modes_of(stage, alike, load, partial(self.stage_costs, stage_class))
        return self._modes[key]

    def _fitting(self, operators: Sequence[int], strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """Return the strategies that can hold all of the operators."""
        held = [self.graph.operators[operator] for operator in operators]
        return tuple(strategy for strategy in strategies if all(can_hold(one, strategy) for one in held))

    def _offered(
        self, operators: Sequence[int], strategies: Sequence[Strategy], load: Workload, alone: bool = False
    ) -> tuple[Strategy, ...]:
        """Return the strategies that no other dominates if all the operators take the same one.

        `alone` makes each operator a unit of its own, as `owner` always does.
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
        """Return the strategies of the spanning operators that the search tries."""
        return self._offered_of(self._first_load(load))

    def _find_spanning_offered(self, load: Workload) -> tuple[Spanning, ...]:
        spanning = self.model.spanning
        strategies = self._fitting(spanning, strategies_on(load.cluster, load.offers_uneven))
        if not spanning:
            return (None,)
        if self.pins.strategies.keys().isdisjoint(spanning):
            return self._offered(spanning, strategies, load, alone=True)
        return tuple(dict.fromkeys(tuple(self.pins.strategies.get(o, (s,))[0] for o in spanning) for s in strategies))

    def largest_owned(self, spanning: Spanning) -> int | None:
        """Return the largest of the spanning operators that one rank owns, if there is one."""
        owned = [o for o, strategy in self.spanning_choices(spanning).items() if strategy.spec.has_owner]
        parameters = {o: sum(p.numel for p in self.model.graph.operators[o].parameters) for o in owned}
        return max(parameters, key=parameters.__getitem__, default=None)

    def _make_worthwhile(
        self,
        stage_class: int,
        spanning: Spanning,
        load: Workload,
        syncs: bool,
        elsewhere: tuple[Away, ...],
        owned: Owned | None = None,
    ) -> Priced:
        """Return the undominated choices of a class of stages and their options, as `_make_all` has them.

        They leave out the memory of spanning operators called only elsewhere: it is the same for all of them, so it
        does not affect dominance.  `elsewhere` has what others own, of each rank that is looked at; given `owned`, no
        choice gives more to one rank.
        """
        first = self._first_load(load)
        table, *others = (self._table(stage_class, spanning, first, away) for away in elsewhere)
        rows = None if owned is None else self._rows_owning(stage_class, first, owned)
        return table.worthwhile(lambda counts: self.costs(stage_class, counts, load), load, syncs, others, rows)

    def _make_all(
        self, stage_class: int, spanning: Spanning, load: Workload, elsewhere: Away
    ) -> list[tuple[StageDecision, StageOption]]:
        """Return the choices of a class of stages and their options, if ranks differ on the mean rank or on one of
        which others own these operators."""
        others, found = {*self.spanning_choices(spanning).values(), *self.idle_strategies(load.cluster)}, []
        for choice in self.choices(stage_class, load):
            differ = any(strategy.spec.has_owner for strategy in (*choice.strategies, *others))
            option = self._at_any_batch(stage_class, choice, spanning, load, elsewhere if differ else NOWHERE)
            found.append((choice, option))
        return found

    def offered(self, stage_class: int, load: Workload) -> Sequence[tuple[StageDecision, StageOption]]:
        """Return the choices of a class of stages and their options, whatever the spanning operators take."""
        takes = self.spanning_offered(load) if self.model.stages[self.examples[stage_class]].spanning else (None,)
        return self._all_of(stage_class, takes, self._first_load(load))

    def _ranks(self, spanning: Spanning) -> tuple[Away, ...]:
        """Return what others own of the mean rank, and of the one that owns the largest spanning operator."""
        owned = self.largest_owned(spanning)
        return (None,) if owned is None else (None, self._every_operator - {owned})

    def _candidates(self, load: Workload, spanning: Spanning, syncs: bool = True) -> CandidateSet:
        """Return the options of every stage under given strategies of the spanning operators.

        With `syncs`, plans are charged as if ranks waited for each other in every micro-batch, as most do.  Without,
        only options with which ranks wait once per step are kept, and charged so.  Every plan is in one of the two
        sets at its own price, and in the other, if at all, at no lower one.  Where ranks differ, costs are those of the
        mean rank.
        """
        return self._candidates_of((spanning,), load, syncs, self._ranks(spanning))

    def owned_ranges(self, load: Workload, *, in_seconds: bool) -> Iterator[Owned]:
        """Yield ranges of the most that a stage's option gives to one rank; each plan is in one of them."""
        first = self._first_load(load)
        sizes = [
            {self.owned(stage_class, choice, first, in_seconds)[0] for choice in self.choices(stage_class, load)}
            for stage_class in range(len(self.examples))
        ]
        least = max(map(min, sizes))
        return owned_ranges(in_seconds, (size for size in set().union(*sizes) if size >= least))

    def owning(self, load: Workload, spanning: Spanning, syncs: bool, owned: Owned) -> CandidateSet:
        """Return candidates for the plans of a range, and perhaps of earlier ones, under given strategies of the
        spanning operators, or whatever they take.

        Some rank owns what the option of one stage gives to it.  It holds, and its host takes, that and at least what a
        rank does that owns nothing.
        """
        is_open = spanning is None and bool(self.model.spanning)
        takes = self.spanning_offered(load) if is_open else (spanning,)
        ranks: tuple[Away, ...] = (None,) if is_open else self._ranks(spanning)
        if owned.least:
            found = self._candidates_of(takes, load, syncs, (*ranks, self._every_operator), owned)
            *others, own = found.on_owners
            own = replace(own, owned_s=owned.least) if owned.in_seconds else replace(own, owned_bytes=owned.least)
            found = replace(found, on_owners=(*others, own))
        else:
            found = self._candidates_of(takes, load, syncs, ranks, owned)
        return found.without_dominated() if is_open else found

    def waiting_s(self, load: Workload, choices: Sequence[StageDecision]) -> float:
        """Return by how much the longest that any rank steps what it owns in one stage is above the mean of all."""
        first = self._first_load(load)
        owned = [self.owned(c, choice, first, True) for c, choice in zip(self.stage_classes, choices, strict=True)]
        return max(most for most, _ in owned) - sum(mean for _, mean in owned)

    def _find_owned(
        self, stage_class: int, choice: StageDecision, load: Workload, in_seconds: bool
    ) -> tuple[float, float]:
        """Return the most that a choice gives to one rank at least, however ranks share its operators, and what it
        gives to the mean rank: bytes at rest, or seconds in which its host steps."""
        variant = self._variant(stage_class, choice.counts)[0] if choice.counts else None
        units = self._unit_costs(load, False, (stage_class, choice.counts) if variant else None, variant)
        stage = self._frame(stage_class, choice.counts, load).stage
        sizes, ranks = list[float](), load.cluster.world_size
        for operator, strategy in zip(stage.operators, choice.strategies, strict=True):
            if strategy.spec.has_owner:
                mine, other = (units((operator,), strategy, elsewhere)[0] for elsewhere in (False, True))
                if in_seconds:
                    sizes.append(load.optimizer_s(0.0, mine.offloaded) - load.optimizer_s(0.0))
                else:
                    sizes.append(mine.parameters + mine.optimizer - other.parameters - other.optimizer)
        return least_of_fullest(sizes, ranks), sum(sizes) / ranks

    def _find_rows_owning(self, stage_class: int, load: Workload, owned: Owned) -> list[int]:
        """Return the places of the choices of a class that give no more to one rank."""
        choices = self.choices(stage_class, load)
        given = [self.owned(stage_class, choice, load, owned.in_seconds)[0] for choice in choices]
        return [k for k, most in enumerate(given) if most <= owned.most]

    def _relaxed_candidates(self, load: Workload, syncs: bool = True) -> CandidateSet:
        """Return candidates that cost no plan more than its price, whatever strategy the spanning operators take."""
        takes = self.spanning_offered(load)
        if len(takes) == 1:
            return self.candidates(load, takes[0], syncs)
        return self._candidates_of(takes, load, syncs, (None,)).without_dominated()

    def _candidates_of(
        self,
        takes: Sequence[Spanning],
        load: Workload,
        syncs: bool,
        elsewhere: tuple[Away, ...],
        owned: Owned | None = None,
    ) -> CandidateSet:
        """Return candidates for whichever of `takes` the spanning operators take, on the first rank, and on the others
        beside; `elsewhere` and `owned` as in `_make_worthwhile`.

        Stages that call them choose among all of these independently; elsewhere the operators hold the least.
        """
        choices, options = list[tuple[StageDecision, ...]](), list[list[OptionList]]()
        for stage_class, example in enumerate(self.examples):
            held = [self._ambient(stage_class, take, load) for take in takes]
            around = list(zip(takes, held, strict=True))
            if not self.model.stages[example].spanning:
                around = [(None, Ambient(*map(min, zip(*held, strict=True))))]
            found = [(*self._worthwhile(stage_class, take, load, syncs, elsewhere, owned), at) for take, at in around]
            choices.append(tuple(choice for some, *_ in found for choice in some))
            by_rank = zip(*([some.around(at) for some in on_ranks] for _, on_ranks, at in found), strict=True)
            options.append([OptionList.joined(parts) for parts in by_rank])
        own, *others = zip(*options, strict=True)
        taken = takes[0] if len(takes) == 1 else None
        first = CandidateSet(load, taken, self.stage_classes, own, tuple(choices), syncs)
        return replace(first, on_owners=tuple(replace(first, options=other) for other in others))

    def _with_slices(self, counts: tuple[tuple[int, int], ...]) -> Space:
        """Return the space of the model with operators split, with pins of operators that the search never splits."""
        starts, alone = slice_starts(self.graph, dict(counts)), {*self.model.spanning, *self.model.idle}
        pins = {starts[o]: slices for o, slices in self.pins.strategies.items() if o in alone}
        return Space(self.graph, dict(counts), Pins(pins))

    def operator_at(self, peak: MemoryPeak) -> Operator | None:
        """Return the operator at which a plan peaks; None in the optimizer step.

        Options are made for one example of each class of stages, and so name the example's operators.
        """
        return self.operator_named_at(peak.stage, peak.operator)

    def operator_named_at(self, index: int | None, operator: int | None) -> Operator | None:
        """Return the operator that a moment of stage `index` names by one of the example's; None without a stage."""
        if index is None or operator is None:
            return None
        stage, example = self.model.stages[index], self.model.stages[self.examples[self.stage_classes[index]]]
        position = [call.operator for call in example.calls].index(operator)
        return self.model.graph.operators[stage.calls[position].operator]
