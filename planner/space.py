"""The plans that the search looks at: for each kind of stage, its options.

A stage takes one strategy for all its operators, so that they are gathered and reduced together,
and a block may be recomputed.  Spanning operators share one strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from planner.memory import MemoryPeak
from planner.option import Option, StageCosts, UnitCosts, ambient, make_option
from planner.stage import StagedModel, cut
from planner.strategy import Strategy, strategies_on
from planner.workload import Workload
from profiler.cluster import Cluster
from profiler.graph import ModelGraph, Operator


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
    """The options of a model on a cluster; a cache over workloads."""

    def __init__(self, graph: ModelGraph) -> None:
        self.model: StagedModel = cut(graph)
        order = dict.fromkeys(stage.kind for stage in self.model.stages)
        self._position = {kind: position for position, kind in enumerate(order)}
        self._examples = [
            next(i for i, stage in enumerate(self.model.stages) if stage.kind == kind) for kind in order
        ]
        self.kinds = tuple(self._position[stage.kind] for stage in self.model.stages)
        self._units: dict[tuple[int, str, str], UnitCosts] = {}
        self._costs = cache(lambda kind, load: StageCosts(self.model, self._examples[kind], load))
        self._alone = cache(self._make_alone)
        self.option = cache(self._option)

    def _option(self, kind: int, choice: Choice, spanning: Strategy | None, load: Workload) -> Option:
        here = self.model.stages[self._examples[kind]].spanning
        option = self._alone(kind, choice, spanning if here else None, load)
        return _around(option, *self._ambient(kind, spanning, load)) if spanning else option

    def _ambient(self, kind: int, spanning: Strategy, load: Workload) -> tuple[int, int]:
        around = dict.fromkeys(self.model.spanning, spanning)
        return ambient(self.model, self._examples[kind], around, self._unit_costs(load))

    def _make_alone(self, kind: int, choice: Choice, spanning: Strategy | None, load: Workload) -> Option:
        """Return the option without what spanning operators elsewhere hold."""
        around = dict.fromkeys(self.model.spanning, spanning) if spanning else {}
        costs, units = self._costs(kind, load), self._unit_costs(load)
        option = make_option(costs, units, choice.strategies, choice.recompute, around)
        if self.model.idle and self._examples[kind] == 0:
            resting, _ = units(self.model.idle, idle_strategy(load.cluster))
            return replace(option, parameters=option.parameters + resting.parameters)
        return option

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
            options.append(tuple(_around(self._alone(kind, choice, None, load), *least) for choice in choices))
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

    def fixed(self, load: Workload, choices: tuple[Choice, ...], spanning: Strategy | None) -> tuple[Option, ...]:
        """Return the options of a whole plan, one choice per stage."""
        return tuple(
            self.option(kind, choice, spanning, load) for kind, choice in zip(self.kinds, choices, strict=True)
        )
