"""Simple plans: against every plan of their form, and when they are taken."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
from rich.console import Console
from synthetic import chain, cluster, transformer
from thoroughness import THOROUGH, some

from osdp.cli.reports.plan import Circumstances, print_plan
from osdp.cli.reports.verdict import verdict
from osdp.planning.request import BEST, MATERIAL_GAIN, SIMPLE, Planned, Request, plan_graph, preferred
from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pins import parse_pin
from planner.plan import read_choices
from planner.pricing import fixed
from planner.problem import Task
from planner.search.least_memory import smallest_of
from planner.search.search import loads_of
from planner.search.simple_plan import FROM_SIZE, ODD_GAIN, WHOLE_MULTIPLE, simplest
from planner.strategies.notation import parse_strategy
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute

GRAPH, MACHINE = transformer(4, 512, vocabulary=4096), cluster(gpus=4)
COMMON = ("replicate", "shard", "shard_grad", "group_shard:2")


def every_speed(
    graph: ModelGraph, machine: Cluster, limit_bytes: int, sizes: range
) -> dict[tuple[int, str, str], float]:
    """Return the speed of every simple plan that fits, with as few of the first blocks recomputed as possible."""
    space, found = Space(graph), {}
    for size, inside, outside in product(sizes, COMMON, COMMON):
        load = Workload(machine, "adam", "fp32", size)
        pair = parse_strategy(inside, machine), parse_strategy(outside, machine)
        blocks = len(graph.blocks)
        modes = sorted(set(Recompute) if graph.blocks[0].selective_rerun else {Recompute.NOTHING, Recompute.EVERYTHING})
        for (above, below), count in product(combinations(modes, 2), range(blocks + 1)):
            choices = [
                StageDecision((pair[0],) * len(stage.operators), below if stage.block < count else above)
                if stage.block is not None
                else StageDecision((pair[1],) * len(stage.operators))
                for stage in space.model.stages
            ]
            options = fixed(space, load, choices, (pair[1],) if space.model.spanning else None)
            if peak_memory(options, load).total_bytes <= limit_bytes:
                speed = load.samples_per_step / step_time(options, load).total_s
                found[size, inside, outside] = max(speed, found.get((size, inside, outside), 0.0))
    return found


LIMITS = [(1.02, None), (1.2, None), (1.6, None), (2.5, None), (1.3, 0.6), (1.8, 0.3), (2.5, 0.6)]
"""In smallest limits, and what selective recomputation keeps."""


@pytest.mark.parametrize(("factor", "selective"), some(LIMITS, 3))
def test_no_plan_of_the_form_is_noticeably_faster(factor: float, selective: float | None) -> None:
    graph = transformer(4 if THOROUGH else 2, 512, vocabulary=4096, selective=selective)
    space = Space(graph)
    task = Task(graph, MACHINE, 10 * GIB)
    loads = loads_of(task, space)
    limit_bytes = round(factor * smallest_of(space, loads, 10 * GIB).peak.total_bytes)
    every = every_speed(graph, MACHINE, limit_bytes, range(1, 17))
    fastest = max(every, key=lambda form: every[form], default=None)
    if fastest is None:
        assert simplest(space, loads, limit_bytes, loads[0]) is None
        return
    found = simplest(space, loads, limit_bytes, loads[fastest[0] - 1])
    assert found is not None
    assert found.peak.total_bytes <= limit_bytes
    if found.load.micro_batch <= 16:
        assert (1 - ODD_GAIN / 10) * every[fastest] <= found.samples_per_s <= every[fastest] * 1.5  # 1.5: run by DDP


def test_large_micro_batches_are_multiples_of_eight() -> None:
    planned = plan_graph(GRAPH, MACHINE, Request(20 * GIB, style=SIMPLE))
    assert planned.plan.micro_batch > FROM_SIZE
    assert planned.plan.micro_batch % WHOLE_MULTIPLE == 0


@cache
def planned_within_700(style: str) -> Planned:
    """Return a plan of 700 MiB."""
    return plan_graph(GRAPH, MACHINE, Request(700 * MIB, style=style))


def test_the_simple_plan_is_taken_where_the_best_gains_little() -> None:
    limit_bytes = 700 * MIB
    best, usual, simple = map(planned_within_700, (BEST, "", SIMPLE))
    assert simple.found.simple is not None
    gain = best.found.samples_per_s / simple.found.samples_per_s - 1
    assert gain >= 0
    assert usual.plan.choices == (best.plan if gain >= MATERIAL_GAIN else simple.plan).choices
    for factor, is_simple in ((1.019, True), (1.021, False)):
        made = replace(simple.found, samples_per_s=factor * simple.found.samples_per_s, options=())
        assert bool(preferred(made, Request(limit_bytes)).options) == is_simple
        assert preferred(made, Request(limit_bytes, style=SIMPLE)).options
    # Nothing known is faster than the bound that it stopped at.
    assert best.found.samples_per_s <= usual.found.bound_samples_per_s * (1 + 1e-9)
    inside = {simple.plan.choices[o.name] for o in GRAPH.operators if o.block is not None}
    outside = {simple.plan.choices[o.name] for o in GRAPH.operators if o.block is None}
    assert len(inside) == len(outside) == 1
    again = simple.plan.recomputed_blocks
    assert again == [block.name for block in GRAPH.blocks][: len(again)]


def test_pins_are_kept() -> None:
    pins = tuple(map(parse_pin, ("blocks.1.*=shard_grad", "blocks.2=recompute", "blocks.0=keep")))
    plan = plan_graph(GRAPH, MACHINE, Request(2 * GIB, pins=pins, style=SIMPLE)).plan
    pinned = [o.name for o in GRAPH.operators if o.name.startswith("blocks.1.")]
    assert pinned
    assert {plan.choices[name] for name in pinned} == {"shard_grad"}
    assert "blocks.2" in plan.recomputed_blocks
    assert "blocks.0" not in plan.recomputed_blocks
    read_choices(plan, GRAPH, MACHINE)
    # Uniform configurations know no pins, so that it is not looked for near one of them.
    best = plan_graph(GRAPH, MACHINE, Request(2 * GIB, pins=pins, style=BEST)).plan
    assert best.micro_batch > 2
    assert best.predicted.samples_per_s * 0.9 <= plan.predicted.samples_per_s <= best.predicted.samples_per_s * 1.01


def test_no_simple_plan_is_refused_by_name() -> None:
    space = Space(GRAPH)
    least_bytes = smallest_of(space, loads_of(Task(GRAPH, MACHINE, GIB), space), GIB).peak.total_bytes
    with pytest.raises(OsdpError, match="no simple plan fits"):
        plan_graph(GRAPH, MACHINE, Request(round(least_bytes), style=SIMPLE))


def test_the_verdict_is_what_the_plan_says() -> None:
    planned = plan_graph(
        GRAPH, MACHINE, Request(2 * GIB, micro_batch=2, pins=(parse_pin("*=shard"), parse_pin("blocks.0=recompute")))
    )
    predicted, best = planned.plan.predicted, planned.best_baseline
    assert best is not None
    again = len(planned.plan.recomputed_blocks)
    text = verdict(planned)
    assert text.startswith(f"FSDP on all 4 blocks, {again} of the 4 recomputed, micro-batch 2: ")
    assert f"{predicted.peak_memory_bytes / GIB:.2f} of 2 GiB" in text


def test_the_report_does_not_say_more_of_a_simple_plan_than_was_proven() -> None:
    """Asked for, it may be far from the fastest."""
    for style, said in ((SIMPLE, "This is a simple plan; --best"), (BEST, None)):
        target = Console(file=io.StringIO(), width=200)
        print_plan(target, planned_within_700(style), Circumstances(1.0))
        assert isinstance(target.file, io.StringIO)
        assert ("simple" in target.file.getvalue()) == (said is not None)
        assert said is None or said in target.file.getvalue()


def test_a_model_without_blocks_has_a_simple_plan_only_if_it_fits() -> None:
    graph = chain([(1024, 1024)] * 3, gflops=[1.0] * 3, saved_mb=[4.0] * 3)
    space = Space(graph)
    loads = loads_of(Task(graph, MACHINE, 10 * GIB), space)
    smallest_bytes = round(smallest_of(space, loads, 10 * GIB).peak.total_bytes)
    for limit_bytes, fits in ((3 * smallest_bytes, True), (smallest_bytes // 2, False)):
        assert (simplest(space, loads, limit_bytes, loads[0]) is not None) is fits
