"""Memory over a step: every part once forward and once backward, and no higher than the peak."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from synthetic import cluster, transformer

from planner.cost.memory_over_step import highest_of_stages
from planner.cost.peak_memory import optimizer_moment, peak_memory
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.pricing import fixed


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_highest_moment_is_the_peak_of_any_plan(seed: int, accumulation: int) -> None:
    draw, graph = Random(seed), transformer(7, 256, tied=seed % 2 == 1)
    space, load = Space(graph), Workload.of(graph, cluster(2, 2), "adam", 2, accumulation)
    for _ in range(20):
        choices = [
            draw.choice([choice for choice in space.choices(stage_class, load) if not choice.counts])
            for stage_class in space.stage_classes
        ]
        options = fixed(space, load, choices, draw.choice(space.spanning_offered(load)))
        found = highest_of_stages(options, load)
        highest, peak = max(found, key=lambda moment: moment.total_bytes), peak_memory(options, load)
        assert highest.total_bytes == pytest.approx(peak.total_bytes)
        assert (highest.phase, highest.stage, highest.operator) == (peak.phase, peak.stage, peak.operator)
        assert found[-1] == optimizer_moment(options, load)
        stages = list(range(len(options)))
        assert [moment.stage for moment in found[:-1]] == [*stages, *reversed(stages)]
        assert [moment.phase == "forward" for moment in found[:-1]] == [True] * len(stages) + [False] * len(stages)


def test_activations_grow_in_forward_and_fall_in_backward() -> None:
    """With everything replicated and nothing recomputed, each block adds what it saves and frees it again."""
    graph = transformer(6, 128, tied=False)
    space, load = Space(graph), Workload.of(graph, cluster(1, 2), "adam", 4)
    choices = [
        next(c for c in space.choices(one, load) if not c.recompute and {str(s) for s in c.strategies} == {"replicate"})
        for one in space.stage_classes
    ]
    found = highest_of_stages(fixed(space, load, choices, None), load)
    blocks = [index for index, stage in enumerate(space.model.stages) if stage.block is not None]
    first = graph.blocks[0]
    saved = sum(call.saved_bytes(4) for call in graph.calls[first.first_call : first.last_call])
    held = {(moment.phase == "forward", moment.stage): moment.categories["activations"] for moment in found[:-1]}
    for lower, upper in itertools.pairwise(blocks):
        for in_forward in (True, False):
            assert held[in_forward, upper] - held[in_forward, lower] == pytest.approx(saved)
