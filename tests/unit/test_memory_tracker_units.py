"""Predicted peak memory of what only plan files name, against PyTorch's own FSDP2 code on fake tensors.

As `test_memory_tracker`, for secondary copies and for linear operators in slices, wrapped unit by unit
as `planner.units` forms them.  Slices' costs are upper bounds, and so is what is held at once by blocks
of several units: seen from 0 to 10 % above what is held.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from synthetic import cluster
from test_memory_tracker import graph_of, source
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from tracker_harness import fake_world, meshes, step

from planner.memory import peak_memory
from planner.plan import Plan, make_plan, options_of, space_of
from planner.space import Choice, Space
from planner.stage import cut
from planner.strategy import Strategy, parse_choice
from planner.units import Unit, units_of
from planner.workload import Workload
from profiler.graph import ModelGraph
from profiler.source import ModelSource
from runtime.memory_tracker import LiveBytes
from runtime.split import split_linear

MACHINE = cluster(1, 8)


def plan_of(graph: ModelGraph, changes: Mapping[str, str], load: Workload, recompute: bool) -> Plan:
    """Everything sharded but for operators whose name ends as given."""
    space, shard = Space(graph), Strategy("shard", 8)
    choices = tuple(
        Choice((shard,) * len(stage.operators), recompute and stage.block is not None) for stage in space.model.stages
    )
    plan = make_plan(space.fixed(load, choices, None), None, space, load, limit_bytes=1, gap=0.0)
    for operator in graph.operators:
        for end, choice in changes.items():
            if operator.name.endswith(end):
                plan.choices[operator.name] = choice
    return plan


def wrap(model: torch.nn.Module, graph: ModelGraph, units: tuple[Unit, ...],
         mesh_of: Mapping[Strategy, DeviceMesh]) -> None:  # fmt: skip
    """Wrap each unit by itself, and the root."""
    for unit in units:
        paths = [path for operator in unit.operators for path in graph.operators[operator].modules]
        if unit.slice is not None:
            paths = [f"{paths[0]}.slices.{unit.slice[0]}"]
        elif unit.whole_block is not None:
            paths = [graph.blocks[unit.whole_block].name]
        modules = [model.get_submodule(path) for path in paths]
        with unset_fake_temporarily():  # an integer makes a mesh, of real tensors
            fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh_of[unit.strategy],
                        reshard_after_forward=unit.strategy.reshard_after_forward)  # fmt: skip
    fully_shard(model, mesh=mesh_of[units[0].strategy])


def tracked_bytes(model_source: ModelSource, graph: ModelGraph, plan: Plan, load: Workload) -> int:
    """Return the peak of a training step (the second: the first makes optimizer states)."""
    choices = {index: parse_choice(plan.choices[o.name], MACHINE) for index, o in enumerate(graph.operators)}
    units, live = units_of(cut(graph), choices), LiveBytes()
    with fake_world(MACHINE.world_size), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh_of = meshes({unit.strategy for unit in units}, MACHINE.world_size)
        with FakeTensorMode(), live:
            model = model_source.build()
            for index, slices in choices.items():
                if len(slices) > 1:
                    split_linear(model, graph.operators[index].modules[0], len(slices))
            for name in plan.recomputed_blocks:
                block = model.get_submodule(name)
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
            wrap(model, graph, units, mesh_of)
            assert isinstance(model, FSDPModule)
            optimizer = torch.optim.Adam(model.parameters(), foreach=True)
            for _ in range(2):
                live.reset_peak()
                step(model, model_source, optimizer, load, live)
            del model, optimizer
    return live.peak.total_bytes


def relative_error(changes: Mapping[str, str], vocabulary: int, length: int, recompute: bool) -> float:
    graph = graph_of("llama", vocabulary, length, "fp32")
    load = Workload(MACHINE, "adam", "fp32", 1)
    plan = plan_of(graph, changes, load, recompute)
    options, _ = options_of(plan, space_of(plan, graph, MACHINE), load)
    tracked = tracked_bytes(source("llama", vocabulary, length), graph, plan, load)
    return (peak_memory(options, load).total_bytes - tracked) / tracked


@pytest.mark.parametrize(
    ("changes", "vocabulary", "length", "recompute"),
    [
        ({"": "secondary_shard:2"}, 512, 64, False),
        ({"": "secondary_shard:4"}, 512, 256, False),
        ({"": "secondary_shard:2"}, 512, 256, True),
        ({"lm_head": "split(4*shard)"}, 50257, 64, False),
        ({"query": "split(2*shard)"}, 512, 64, False),
    ],
)
def test_prediction_is_what_fsdp2_holds(changes: dict[str, str], vocabulary: int, length: int,
                                        recompute: bool) -> None:  # fmt: skip
    assert -0.001 <= relative_error(changes, vocabulary, length, recompute) <= 0.005


@pytest.mark.parametrize(
    ("changes", "vocabulary", "length", "recompute"),
    [
        ({"up": "split(2*shard)", "down": "split(4*shard)", "lm_head": "split(2*shard)"}, 512, 64, False),
        ({"query": "split(2*shard)"}, 512, 256, True),
        ({"up": "secondary_shard:4", "down": "secondary_shard:2"}, 512, 256, False),
    ],
)
def test_prediction_is_an_upper_bound(changes: dict[str, str], vocabulary: int, length: int,
                                      recompute: bool) -> None:  # fmt: skip
    assert -0.001 <= relative_error(changes, vocabulary, length, recompute) <= 0.1
