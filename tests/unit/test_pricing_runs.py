"""Short cuts in the pricing of whole plans change no price: runs of alike stages, ranks that exceed the limit."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from random import Random

import pytest
from synthetic import cluster, transformer

from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import fixed, fullest
from planner.strategies.registry import strategies_on


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_runs_of_alike_stages_cost_what_their_stages_cost_one_by_one(seed: int, accumulation: int) -> None:
    draw, machine, graph = Random(seed), cluster(2, 2), transformer(9, 256, tied=seed % 2 == 1)
    space, load = Space(graph), Workload.of(graph, machine, "adam", 2, accumulation)
    offered = [[c for c in space.choices(stage_class, load) if not c.counts] for stage_class in space.stage_classes]
    found = 0
    for _ in range(20):
        drawn = {
            stage_class: draw.choices(some, k=2) for stage_class, some in zip(space.stage_classes, offered, strict=True)
        }
        cut = draw.randrange(len(offered))
        choices = [drawn[stage_class][index < cut] for index, stage_class in enumerate(space.stage_classes)]
        spanning = draw.choice(space.spanning_offered(load))
        options = fixed(space, load, choices, spanning)
        found += any(one is other for one, other in pairwise(options))
        apart = [replace(option) for option in options]  # equal, but none is another: every moment is looked at
        peak, looked_at = peak_memory(options, load), peak_memory(apart, load)
        assert peak.categories == pytest.approx(looked_at.categories)
        assert (peak.stage, peak.phase, peak.operator) == (looked_at.stage, looked_at.phase, looked_at.operator)
        assert asdict(step_time(options, load)) == pytest.approx(asdict(step_time(apart, load)), rel=1e-12, abs=1e-12)
    assert found


def test_a_rank_over_the_limit_is_found_without_the_others() -> None:
    machine, graph = cluster(1, 4), transformer(5, 256, tied=False)
    space, load = Space(graph), Workload.of(graph, machine, "adam", 1, 1)
    owner = next(strategy for strategy in strategies_on(machine) if strategy.spec.has_owner)
    choices = [StageDecision((owner,) * len(stage.operators)) for stage in space.model.stages]
    rank, options = fullest(space, load, choices, None)
    most_bytes = peak_memory(options, load).total_bytes
    assert fullest(space, load, choices, None, limit_bytes=most_bytes) == (rank, options)
    _, over = fullest(space, load, choices, None, limit_bytes=1.0)
    assert 1.0 < peak_memory(over, load).total_bytes <= most_bytes
