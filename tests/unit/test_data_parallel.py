"""DistributedDataParallel in the planner: its buckets, memory, time and search, against torch and brute force."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsals import graph_of, source
from synthetic import chain, cluster, options_of, transformer
from thoroughness import draws, some
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from planner.cost.ddp import buckets, reductions
from planner.cost.peak_memory import peak_memory
from planner.cost.simulator import simulated_s
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.pricing import as_run, make_plan, runs_by_ddp
from planner.problem import Task
from planner.search.baselines import uniform
from planner.search.ddp_search import fastest_replicated
from planner.search.search import search
from planner.strategies.replicate import BUCKET_BYTES, COPY, FIRST_BUCKET_BYTES
from planner.strategies.spec import Strategy
from profiler.model_graph import ModelGraph, Recompute
from runtime.observe.live_bytes import LiveBytes

MIB = 2**20


# --- buckets and time ------------------------------------------------------------------------


@pytest.mark.parametrize("has_idle", [False, True])
def test_buckets_are_those_that_torch_assigns(has_idle: bool) -> None:
    graph = transformer(6, 512, vocabulary=16384)
    if has_idle:
        graph = replace(graph, operators=(*graph.operators, replace(graph.operators[3], name="idle")))
    parameters = [p for operator in graph.operators for p in operator.parameters]
    if not has_idle:
        parameters.reverse()
    with torch.device("meta"):
        tensors = [torch.empty(p.shape) for p in parameters]
    assigned, _ = dist._compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET_BYTES, BUCKET_BYTES])
    expected = [tuple(parameters[i].name for i in indices) for indices in assigned]
    found = buckets(graph)
    assert [bucket.parameters for bucket in found] == (expected[::-1] if has_idle else expected)
    assert len(found) > 2
    assert sum(bucket.size_bytes for bucket in found) == 4 * graph.numel


def test_reductions_queue_under_the_backward_that_goes_on() -> None:
    # From the top: 3 s of reduction are ready after call 2; call 1 hides 2 of them and adds 4; call 0
    # hides 1 of the 5 that wait, adds nothing, and 4 s are left.
    assert reductions([1.0, 2.0, 5.0], [0.0, 4.0, 3.0], overlaps=True) == [4.0, 1.0, 2.0]
    assert reductions([1.0, 2.0, 5.0], [0.0, 4.0, 3.0], overlaps=False) == [0.0, 4.0, 3.0]


@settings(max_examples=draws(15), deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.booleans(), st.booleans(), st.floats(1e9, 1e11))
def test_step_time_is_that_of_two_queues(
    layers: int, accumulation: int, overlaps: bool, recompute: bool, rate: float
) -> None:
    graph = transformer(layers, 768)
    machine = cluster(1, 4, intra=rate, overlaps=overlaps)
    load = Workload(machine, "adam", "fp32", 1, accumulation)
    ddp = Space(graph).replica(load)
    again = Recompute.EVERYTHING if recompute else Recompute.NOTHING
    options = ddp.options([stage.allowed(again) for stage in ddp.stages])
    time = step_time(options, load)
    # Played by hand: backward from the top, each bucket when its last gradient is there and the one before is sent.
    forward_s = [load.compute_s(call.forward) for call in graph.calls]
    backward_s = [load.compute_s(call.backward) for call in graph.calls]
    if recompute:
        for block in graph.blocks:
            backward_s[block.last_call - 1] += sum(forward_s[block.first_call : block.last_call])
    done_s: dict[int, float] = {}
    clock = 0.0
    for index in reversed(range(len(graph.calls))):
        clock += backward_s[index]
        done_s[graph.calls[index].operator] = clock
    free_s, sent_s = 0.0, 0.0
    for bucket in buckets(graph):
        ready_s = max(done_s[operator] for operator in bucket.operators)
        seconds = 2 * (3 * 20e-6 + 3 / 4 * bucket.size_bytes / rate)
        free_s, sent_s = max(free_s, ready_s) + seconds, sent_s + seconds
    last_s = max(clock, free_s) if overlaps else clock + sent_s
    expected_s = accumulation * sum(forward_s) + (accumulation - 1) * clock + last_s
    expected_s += sum(option.optimizer_s for option in options)
    assert time.total_s == pytest.approx(expected_s, rel=1e-9)
    assert time.exposed_communication_s + time.hidden_communication_s == pytest.approx(sent_s, rel=1e-9)
    assert simulated_s(options, load) == pytest.approx(time.total_s, rel=1e-9)


# --- memory ----------------------------------------------------------------------------------


@contextmanager
def world_of_one() -> Iterator[None]:
    """Be the only rank of a group: what is held does not depend on how many there are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def tracked_bytes(family: str, vocabulary: int, load: Workload, recompute: bool, length: int) -> int:
    """Return the peak of the third training step; the second moves gradients to new buckets."""
    made, live = source(family, vocabulary, length), LiveBytes()
    graph = graph_of(family, vocabulary, length, "fp32")
    optimizers: dict[str, Any] = {"adam": partial(torch.optim.Adam, foreach=True), "sgd": torch.optim.SGD}
    with world_of_one(), warnings.catch_warnings(), live:
        warnings.simplefilter("ignore")
        model = made.build()
        for block in graph.blocks if recompute else ():
            part = model.get_submodule(block.name)
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
        runner = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = optimizers[load.optimizer_name](model.parameters())
        for _ in range(3):
            gc.collect()
            live.reset_peak()
            step(runner, made, model, optimizer, load)
        del runner, model, optimizer
    return live.peak_bytes


def step(runner: Any, made: Any, model: nn.Module, optimizer: torch.optim.Optimizer, load: Workload) -> None:
    """Run one step of training."""
    for micro_batch in range(load.accumulation):
        args, kwargs = made.example_inputs(model, load.micro_batch)
        runner.require_backward_grad_sync = micro_batch == load.accumulation - 1
        loss = runner(*args, **kwargs)
        loss.backward()
        del loss, args, kwargs
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("family", "vocabulary", "batch", "accumulation", "optimizer", "recompute"),
    some(
        [
            ("gpt2", 8192, 1, 1, "adam", False),
            ("gpt2", 512, 2, 1, "adam", False),
            ("gpt2", 512, 2, 1, "sgd", False),
            ("gpt2", 512, 2, 3, "sgd", False),
            ("gpt2", 512, 2, 2, "adam", False),
            ("gpt2", 512, 4, 1, "sgd", True),
            ("llama", 512, 4, 2, "adam", True),
            ("llama", 512, 4, 3, "sgd", True),
            ("llama", 4096, 1, 1, "adam", False),
            ("uneven", 512, 2, 1, "sgd", False),
            ("bert", 4096, 1, 2, "adam", False),
        ],
        3,
    ),
)
def test_prediction_is_what_ddp_holds(
    family: str, vocabulary: int, batch: int, accumulation: int, optimizer: str, recompute: bool
) -> None:
    length = 128
    load = Workload(cluster(1, 8), optimizer, "fp32", batch, accumulation)
    ddp = Space(graph_of(family, vocabulary, length, "fp32")).replica(load)
    again = Recompute.EVERYTHING if recompute else Recompute.NOTHING
    options = ddp.options([stage.allowed(again) for stage in ddp.stages])
    tracked = tracked_bytes(family, vocabulary, load, recompute, length)
    assert -0.001 <= (peak_memory(options, load).total_bytes - tracked) / tracked <= 0.005


# --- who runs it, and the search -------------------------------------------------------------


def test_planner_and_runtime_decide_alike() -> None:
    graph, machine = transformer(4, 512), cluster(1, 4)
    space, load = Space(graph), Workload(machine, "adam", "fp32", 2)
    units = uniform(space, load, COPY, recompute=Recompute.NOTHING)
    peak = peak_memory(as_run(units, COPY, None, space, load, float("inf")), load).total_bytes
    enough = ceil(peak)
    for limit_bytes, fits in ((enough, True), (enough - 1, False)):
        plan = make_plan(units, COPY, space, load, limit_bytes=limit_bytes, gap=0.0)
        assert runs_by_ddp(plan, graph, machine) is fits
        # What a file says of figures does not matter, only what it decides.
        wrong = replace(plan, predicted=replace(plan.predicted, peak_memory_bytes=0))
        assert runs_by_ddp(wrong, graph, machine) is fits
        options, _ = options_of(plan, space, load)
        assert plan.predicted.peak_memory_bytes == round(peak_memory(options, load).total_bytes)
        assert (plan.predicted.memory_by_category.get("unsharded_parameters") == 0) is fits
    sharded = replace(plan, choices=plan.choices | {"norm": "shard"}, limit_bytes=enough)
    assert not runs_by_ddp(sharded, graph, machine)
    halved = replace(plan, limit_bytes=enough, model=replace(plan.model, precision="bf16"))
    assert not runs_by_ddp(halved, graph, machine)


def test_idle_operators_are_sharded_so_that_units_run_them() -> None:
    used = chain([(2048, 1024)], gflops=[1], saved_mb=[1])
    idle = replace(used.operators[0], name="idle", modules=("idle",))
    graph = replace(used, operators=(used.operators[0], idle))
    space, load = Space(graph), Workload(cluster(1, 4), "adam", "fp32", 1)
    units = uniform(space, load, COPY, recompute=Recompute.NOTHING)
    assert as_run(units, None, None, space, load, float("inf")) == units
    assert as_run(units, None, (COPY,), space, load, float("inf")) != units
    assert fastest_replicated(space, (load,), float("inf"), 0.0)[0] is None


def test_a_model_that_ends_with_a_block_bounds_what_replicas_can_hold() -> None:
    """Its own peak is not among what the knapsack counts; without it ever larger micro-batches would seem to fit."""
    graph = transformer(6, 256, tied=False, selective=0.5)
    graph = replace(
        graph,
        calls=graph.calls[:-2],
        operators=graph.operators[:-2],
        edges=tuple(edge for edge in graph.edges if max(edge) < len(graph.calls) - 2),
    )
    machine = cluster(1, 4, launch_s=1e-3)
    space, batches = Space(graph), (1, 2, 4, 8, 64, 512)
    loads = [Workload(machine, "adam", "fp32", batch) for batch in batches]
    everything = [stage.allowed(Recompute.EVERYTHING) for stage in space.model.stages]
    peaks = [peak_memory(space.replica(load).options(everything), load).total_bytes for load in loads]
    limit_bytes = peaks[2] * 1.01
    assert peaks[3] > limit_bytes
    plan, top = fastest_replicated(space, loads, limit_bytes, 0.0)
    assert plan is not None
    assert plan.load.micro_batch == 4
    # The host launches so slowly that more samples at once cost nothing: twice as many would be twice as fast.
    assert top < 1.9 * plan.samples_per_s


@settings(max_examples=draws(8), deadline=None)
@given(
    st.integers(2, 4),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    st.floats(0.0, 1.0),
    st.floats(0.1, 0.9),
    st.booleans(),
    st.sampled_from([0.0, 3e-4, 3e-3]),
)
def test_search_of_replicas_equals_brute_force(
    layers: int,
    accumulation: int,
    overlaps: bool,
    tied: bool,
    fraction: float,
    selective: float,
    few: bool,
    launch_s: float,
) -> None:
    graph = transformer(layers, 512, tied=tied, distinct=True, selective=selective)
    space = Space(graph)
    loads = tuple(
        Workload(cluster(1, 4, overlaps=overlaps, launch_s=launch_s), "adam", "fp32", b, accumulation)
        for b in (1, 2, 3)
    )
    every = [
        (load.samples_per_step / step_time(options, load).total_s, peak_memory(options, load).total_bytes)
        for load in loads
        for pattern in product(Recompute, repeat=layers)
        for again in [[Recompute.NOTHING if s.block is None else pattern[s.block] for s in space.model.stages]]
        for options in [space.replica(load).options(again)]
    ]
    peaks = [peak for _, peak in every]
    limit = min(peaks) + fraction * (max(peaks) - min(peaks))
    best = max(speed for speed, peak in every if peak <= limit)
    with patch("planner.search.ddp_search.FEW_PLANS", 3**layers if few else 1):
        found, bound = fastest_replicated(space, loads, limit, 0.0)
    assert found is not None
    if few:
        assert found.samples_per_s == bound == pytest.approx(best, rel=1e-9)
    assert peak_memory(found.options, found.load).total_bytes <= limit
    assert bound >= best * (1 - 1e-9)
    assert best * (1 - 0.02) <= found.samples_per_s <= best * (1 + 1e-9)
    assert found.samples_per_s <= bound * (1 + 1e-9)


def test_a_model_that_fits_whole_is_planned_as_ddp() -> None:
    graph = transformer(4, 256)
    found = search(Task(graph, cluster(1, 4, latency_s=1e-3, intra=1e9, overlaps=False), 1 << 30, micro_batch=4))
    assert {s for option in found.options for s in option.strategies} == {COPY}
    assert found.spanning == COPY
    plan = make_plan(found.options, found.spanning, found.space, found.load, limit_bytes=1 << 30, gap=found.gap)
    assert runs_by_ddp(plan, graph, found.load.cluster)
    assert plan.predicted.samples_per_s == pytest.approx(found.samples_per_s)
    # 5 MB of gradients: two buckets of four ranks, six steps round the ring each.
    assert len(buckets(graph)) == 2
    expected_s = 2 * (2 * 3 * 1e-3) + 2 * 0.75 * 4 * graph.numel / 1e9
    assert plan.predicted.time_by_term["exposed_communication_s"] == pytest.approx(expected_s)
    ddp = next(b for b in found.baselines if b.name == "DDP" and not b.recompute)
    assert ddp.samples_per_s <= found.samples_per_s
    assert ddp.strategy == Strategy("replicate", 1)


def test_more_operators_than_blocks_change_nothing() -> None:
    """A chain without blocks has nothing to recompute: the one plan either fits or does not."""
    graph: ModelGraph = chain([(1024, 1024)] * 3, [1.0] * 3, [4.0] * 3)
    space, load = Space(graph), Workload(cluster(1, 2), "sgd", "fp32", 1)
    # 12 MiB of weights and as much of gradients; 12 MiB saved, 2 more at the top's backward.
    fitting, _ = fastest_replicated(space, (load,), 38 * MIB, 0.0)
    assert fitting is not None
    assert fitting.load is load
    assert fastest_replicated(space, (load,), 38 * MIB - 1, 0.0)[0] is None
