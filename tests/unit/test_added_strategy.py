"""A strategy that the planner does not know yet: with one `StrategySpec` it is priced, pinned and searched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from synthetic import cluster, transformer

from planner.cost.unit_communication import unit_traffic
from planner.cost.unit_memory import unit_bytes
from planner.optimizers import OPTIMIZERS
from planner.pins import parse_pin, resolve
from planner.pricing import decisions_of, make_plan, space_of
from planner.problem import Task
from planner.search.search import search
from planner.strategies.notation import parse_strategy
from planner.strategies.registry import known_strategies, register, strategies_on
from planner.strategies.spec import SPECS, Strategy, StrategySpec
from planner.strategies.unit_collectives import unit_collectives
from profiler.byte_sizes import GIB
from profiler.cluster.cluster import Cluster
from profiler.model_graph import Parameter

WEIGHT = Parameter("w", (1000, 300))


@dataclass(frozen=True)
class EverySecond(StrategySpec):
    """A shard over every second rank."""

    def groups(self, cluster: Cluster) -> tuple[int, ...]:
        return (cluster.world_size // 2,) if cluster.world_size > 2 and cluster.world_size % 2 == 0 else ()


@pytest.fixture
def every_second() -> Iterator[StrategySpec]:
    spec = EverySecond("every_second", 45, "split over every second rank", stride=2)
    register(spec)
    yield spec
    del SPECS[spec.name]


def test_it_takes_its_place(every_second: StrategySpec) -> None:
    machine = cluster(1, 8)
    names = list(dict.fromkeys(strategy.name for strategy in known_strategies(machine)))
    assert names.index("every_second") == names.index("group_shard") + 1
    assert parse_strategy("every_second+offload", machine) == Strategy("every_second", 4, offload=True)
    assert Strategy("every_second", 4) in strategies_on(machine)


def test_it_is_priced(every_second: StrategySpec) -> None:
    strategy, machine = Strategy("every_second", 4), cluster(2, 4)
    sent = unit_collectives([WEIGHT], strategy, "fp32", machine)
    assert [(c.operation, c.ranks, c.stride, c.size_bytes, c.phase) for c in sent] == [
        ("all_gather", 4, 2, 1_200_000, "forward"),
        ("all_gather", 4, 2, 1_200_000, "backward"),
        ("reduce_scatter", 4, 2, 1_200_000, "reduce"),
        ("all_reduce", 2, 1, 300_000, "step"),
    ]
    traffic = unit_traffic([WEIGHT], strategy, "fp32", machine)
    # Ranks 0, 2, 4, 6: two on each node, which drive the network together.
    assert traffic.forward_gather_s == sent[0].time_s(machine)
    assert traffic.step_reduce_s == sent[3].time_s(machine)
    alike = unit_bytes([WEIGHT], Strategy("group_shard", 4), "fp32", OPTIMIZERS["adam"])
    assert unit_bytes([WEIGHT], strategy, "fp32", OPTIMIZERS["adam"]) == alike


def test_it_is_planned_by_a_pin_and_read_back(every_second: StrategySpec) -> None:
    graph, machine = transformer(2, 64), cluster(1, 4)
    pins = resolve([parse_pin("*=every_second")], graph, machine)
    found = search(Task(graph, machine, 8 * GIB, pins=pins))
    plan = make_plan(found.options, found.spanning, found.space, found.load, limit_bytes=8 * GIB, gap=found.gap)
    assert set(plan.choices.values()) == {"every_second"}
    space = space_of(plan, graph, machine)
    options = decisions_of(plan, space, machine).options(space, found.load, plan.usable_bytes)
    assert options == found.options


def test_it_is_gone_again() -> None:
    assert "every_second" not in {strategy.name for strategy in known_strategies(cluster(1, 8))}
