"""The plans that the search looks at: for each kind of stage, its options.

A stage takes one strategy for all its operators, so that they are gathered and reduced together,
and a block may be recomputed.  Spanning operators share one strategy.  Plans that are not the
search's may mix strategies as they like, split operators and use every strategy (`Space.fixed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from planner.memory import MemoryPeak, peak_memory
from planner.option import Option, StageCosts, UnitCosts, ambient, make_option
from planner.slices import slice_operators
from planner.stage import StagedModel, cut
from planner.strategy import Strategy, strategies_on
from planner.units import owners_of, units_of
from planner.workload import Workload
from profiler.cluster import Cluster
from profiler.graph import ModelGraph, Operator

Spanning = Strategy | tuple[Strategy, ...] | None
"""Strategies of the spanning operators: one for all, one for each, or None if there are none."""


@dataclass(frozen=True)
class Choice:
    """A stage's strategies by operator and whether it is recomputed."""

    strategies: tuple[Strategy, ...]
    recompute: bool = False


@dataclass(frozen=True)
class Menu:
    """For one workload and one strategy of the spanning operators: the options of every stage."""

    load: Workload
    spanning: Strategy | None
    """Strategy of the spanning operators; None if there are none."""
    kinds: tuple[int, ...]
    """For each stage in execution order, its index into `options`."""
    options: tuple[tuple[Option, ...], ...]
    """The options of each kind of stage."""

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return (kind, length) of maximal runs of alike stages in execution order."""
        return tuple((kind, len(list(run))) for kind, run in groupby(self.kinds))


def idle_strategy(cluster: Cluster) -> Strategy:
    """Return what operators that are never called take: as little memory as can be."""
    return max(strategies_on(cluster), key=lambda strategy: strategy.group)


def _around(option: Option, unsharded: int, gradients: int) -> Option:
    """Return an option with what spanning operators elsewhere hold."""
    if not unsharded and not gradients:
        return option
    return replace(option, ambient_unsharded=unsharded, ambient_gradients=gradients)


class Space:
    """The options of a model on a cluster; a cache over workloads.

    `counts` says into how many slices operators are split; `model` has slices in place of these.
    """

    def __init__(self, graph: ModelGraph, counts: Mapping[int, int] | None = None) -> None:
        self.graph, self.counts = graph, dict(counts or {})
        self.model: StagedModel = cut(*slice_operators(graph, self.counts))
        order = dict.fromkeys(stage.kind for stage in self.model.stages)
        self._position = {kind: position for position, kind in enumerate(order)}
        self._examples = [next(i for i, stage in enumerate(self.model.stages) if stage.kind == kind) for kind in order]
        self.kinds = tuple(self._position[stage.kind] for stage in self.model.stages)
        self._units: dict[tuple[int, str, str], UnitCosts] = {}
        self.stage_costs = cache(self._stage_costs)
        self._alone = cache(self._make_alone)
        self.option = cache(self._option)

    def _stage_costs(self, kind: int, load: Workload) -> StageCosts:
        return StageCosts(self.model, self._examples[kind], load)

    def spanning_choices(self, spanning: Spanning) -> dict[int, Strategy]:
        """Return the strategy of every spanning operator."""
        if spanning is None:
            return {}
        if isinstance(spanning, Strategy):
            return dict.fromkeys(self.model.spanning, spanning)
        return dict(zip(self.model.spanning, spanning, strict=True))

    def _option(self, kind: int, choice: Choice, spanning: Spanning, load: Workload,
                elsewhere: frozenset[int] = frozenset()) -> Option:  # fmt: skip
        here = self.model.stages[self._examples[kind]].spanning
        option = self._alone(kind, choice, spanning if here else None, load, elsewhere)
        return _around(option, *self._ambient(kind, spanning, load)) if spanning else option

    def _ambient(self, kind: int, spanning: Spanning, load: Workload) -> tuple[int, int]:
        around = self.spanning_choices(spanning)
        return ambient(self.model, self._examples[kind], around, self._unit_costs(load))

    def _make_alone(self, kind: int, choice: Choice, spanning: Spanning, load: Workload,
                    elsewhere: frozenset[int]) -> Option:  # fmt: skip
        """Return the option without what spanning operators elsewhere hold."""
        around = self.spanning_choices(spanning)
        costs, units = self.stage_costs(kind, load), self._unit_costs(load)
        option = make_option(costs, units, choice.strategies, choice.recompute, around, elsewhere)
        if self.model.idle and self._examples[kind] == 0:
            resting = self._resting(dict.fromkeys(self.model.idle, idle_strategy(load.cluster)), load)
            return replace(option, parameters=option.parameters + resting)
        return option

    def _resting(self, idle: Mapping[int, Strategy], load: Workload, elsewhere: frozenset[int] = frozenset()) -> int:
        """Return the bytes of operators that are never called: parameters, and never a gradient."""
        units = self._unit_costs(load)
        return sum(units((o,), strategy, o in elsewhere)[0].parameters for o, strategy in idle.items())

    def _unit_costs(self, load: Workload) -> UnitCosts:
        key = (id(load.cluster), load.precision, load.optimizer_name)
        if key not in self._units:
            # It refers to `load`, so the cluster lives as long as its id is a key.
            self._units[key] = UnitCosts(self.model, load)
        return self._units[key]

    def choices(self, kind: int, strategies: tuple[Strategy, ...]) -> Iterator[Choice]:
        """Yield the choices of a kind of stage."""
        stage = self.model.stages[self._examples[kind]]
        count = len(stage.operators)
        for strategy in strategies if count else strategies[:1]:
            yield Choice((strategy,) * count)
            if stage.block is not None:
                yield Choice((strategy,) * count, recompute=True)

    def spanning_strategies(self, cluster_strategies: tuple[Strategy, ...]) -> tuple[Strategy | None, ...]:
        """Return what the spanning operators may take."""
        return cluster_strategies if self.model.spanning else (None,)

    def menu(self, load: Workload, spanning: Strategy | None) -> Menu:
        """Return the options of every stage under one strategy of the spanning operators."""
        strategies = strategies_on(load.cluster)
        options = tuple(
            tuple(self.option(kind, choice, spanning, load) for choice in self.choices(kind, strategies))
            for kind in range(len(self._examples))
        )
        return Menu(load, spanning, self.kinds, options)

    def relaxed_menu(self, load: Workload) -> Menu:
        """Return a menu that costs no plan more than it does, whatever the spanning operators take.

        Stages that call them offer all their strategies, each for itself; elsewhere they hold the least.
        """
        strategies = strategies_on(load.cluster)
        takes = self.spanning_strategies(strategies)
        if len(takes) == 1:
            return self.menu(load, takes[0])
        options = []
        for kind, example in enumerate(self._examples):
            choices = tuple(self.choices(kind, strategies))
            if self.model.stages[example].spanning:
                options.append(tuple(self.option(kind, choice, take, load) for take in takes for choice in choices))
                continue
            held = [self._ambient(kind, take, load) for take in takes if take]
            least = min(unsharded for unsharded, _ in held), min(gradients for _, gradients in held)
            options.append(
                tuple(_around(self._alone(kind, choice, None, load, frozenset()), *least) for choice in choices)
            )
        return Menu(load, None, self.kinds, tuple(options))

    def operator_at(self, peak: MemoryPeak) -> Operator | None:
        """Return the operator that a peak names; None in the optimizer step.

        Options are made for one example of each kind of stage, and so name the example's operators.
        """
        if peak.stage is None or peak.operator is None:
            return None
        stage, example = self.model.stages[peak.stage], self.model.stages[self._examples[self.kinds[peak.stage]]]
        position = [call.operator for call in example.calls].index(peak.operator)
        return self.model.graph.operators[stage.calls[position].operator]

    def fixed(self, load: Workload, choices: tuple[Choice, ...], spanning: Spanning,
              idle: tuple[Strategy, ...] | None = None) -> tuple[Option, ...]:  # fmt: skip
        """Return the options of a whole plan on the rank that holds most, one choice per stage.

        `idle` gives the strategies of operators that are never called, as little as can be if None.
        Ranks differ by the operators of strategy `owner` that they own.
        """
        if idle is None:
            idle = (idle_strategy(load.cluster),) * len(self.model.idle)
        resting = dict(zip(self.model.idle, idle, strict=True))
        owners = self._owners(choices, self.spanning_choices(spanning) | resting, load.cluster)
        ranks = [
            self._on_rank(load, choices, spanning, resting, frozenset(o for o in owners if owners[o] != rank))
            for rank in sorted(set(owners.values())) or [0]
        ]
        return ranks[0] if len(ranks) == 1 else max(ranks, key=lambda options: peak_memory(options, load).total_bytes)

    def _owners(self, choices: tuple[Choice, ...], others: Mapping[int, Strategy], cluster: Cluster) -> dict[int, int]:
        """Return the owning rank of every operator of strategy `owner`."""
        taken = dict(others)
        for stage, choice in zip(self.model.stages, choices, strict=True):
            taken |= zip(stage.operators, choice.strategies, strict=True)
        if all(strategy.kind.wrapping != "owner" for strategy in taken.values()):
            return {}
        units = units_of(self.model, {operator: (strategy,) for operator, strategy in taken.items()})
        owners = owners_of(units, self.model.graph, cluster.world_size)
        return {units[position].operators[0]: rank for position, rank in owners.items()}

    def _on_rank(self, load: Workload, choices: tuple[Choice, ...], spanning: Spanning, idle: Mapping[int, Strategy],
                 elsewhere: frozenset[int]) -> tuple[Option, ...]:  # fmt: skip
        """Return the options of a whole plan where another rank owns the operators in `elsewhere`."""
        options = []
        for kind, stage, choice in zip(self.kinds, self.model.stages, choices, strict=True):
            # Options are made for one example of each kind of stage; spanning operators are everywhere the same.
            alike = zip(stage.operators, self.model.stages[self._examples[kind]].operators, strict=True)
            others = frozenset(mine for operator, mine in alike if operator in elsewhere)
            others |= elsewhere & set(stage.spanning)
            options.append(self.option(kind, choice, spanning, load, others))
        if idle:
            least = self._resting(dict.fromkeys(idle, idle_strategy(load.cluster)), load)
            resting = self._resting(idle, load, elsewhere)
            options[0] = replace(options[0], parameters=options[0].parameters + resting - least)
        return tuple(options)
