"""What the host takes to launch a step: counted in the trace, by hand in the cost, measured on a lagging device."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import yaml
from clocks import LaggingDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from synthetic import chain, cluster, transformer
from thoroughness import draws
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trace_models import MLP as PLAIN_MLP
from trace_models import language_model, source

from osdp.models.gpt2 import MLP, Block
from osdp.profile.fsdp_overhead import (
    EVENTS,
    FEW_TENSORS,
    NARROW,
    TENSORS,
    UNITS,
    LaunchedStacks,
    UnitLaunch,
    mean_launch,
    unit_launch,
)
from osdp.zoo import load_cluster, load_model
from planner.cost.simulator import simulated_s
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import StepTime, step_time
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.plan import cluster_fingerprint
from planner.pricing import fullest
from planner.strategies.notation import parse_strategy
from profiler.cluster.cluster import Cluster, Host
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CallTimes, Measured, call_key, pass_launch_s
from profiler.cluster.read_cluster import read_cluster
from profiler.model_graph import ModelGraph, Recompute
from profiler.timing import operator_times
from profiler.timing.device_queue import QueueClock
from profiler.timing.host_launches import WARM_UP, host_launches_s, mean_s
from profiler.timing.operator_times import measure_calls, unwatched
from profiler.timing.stopwatch import HostClock, Stopwatch
from profiler.trace.metered_pass import find_loss
from profiler.trace.trace import trace_model
from runtime.meshes import Meshes

LAUNCH_S = 1e-3
UNIT_S, TENSOR_S, STEPPED_TENSOR_S = 4 * LAUNCH_S, LAUNCH_S / 2, LAUNCH_S / 4
"""As `synthetic.cluster` has them."""


def sharded(graph: ModelGraph, load: Workload, recompute: Recompute = Recompute.NOTHING) -> list[StageCandidate]:
    """Return the plan that shards everything and recomputes every block so."""
    space, shard = Space(graph), parse_strategy("shard", load.cluster)
    spanning = shard if space.model.spanning else None
    options = []
    for kind in range(len(space.examples)):
        stage = space.model.stages[space.examples[kind]]
        again = recompute if stage.block is not None else Recompute.NOTHING
        decision = StageDecision((shard,) * len(stage.operators), again)
        options += [space.option(kind, decision, spanning, load)] * space.stage_classes.count(kind)
    return options


def time_of(
    graph: ModelGraph,
    machine: Cluster,
    recompute: Recompute = Recompute.NOTHING,
    batch: int = 1,
    optimizer: str = "adam",
) -> StepTime:
    """Return the time of that plan."""
    load = Workload(machine, optimizer, "fp32", batch)
    return step_time(sharded(graph, load, recompute), load)


def waits_by_hand() -> float:
    """Return how long the device waits in `chain([(1024, 1024)] * 3, ...)`: every layer is a segment of one unit.

    Its forward has two kernels and its backward three (`synthetic.call`); the unit has one tensor, and is gathered in
    both and reduced once.
    """
    total_s, unit_s = 0.0, UNIT_S + TENSOR_S
    for compute_s in (0.001, 0.02, 0.0001):
        total_s += max(0.0, 2 * LAUNCH_S + unit_s - compute_s)
        total_s += max(0.0, 3 * LAUNCH_S + 2 * unit_s - 2 * compute_s)
    return total_s


def test_the_device_waits_as_by_hand() -> None:
    graph, machine = chain([(1024, 1024)] * 3, [10.0, 200.0, 1.0], [20.0] * 3), cluster(1, 2, launch_s=LAUNCH_S)
    time, without = time_of(graph, machine), time_of(graph, replace(machine, launch=None))
    assert without.launch_wait_s == 0.0
    assert time.launch_wait_s == pytest.approx(waits_by_hand())
    assert time.compute_s == pytest.approx(without.compute_s)
    assert time.recompute_s == without.recompute_s == 0.0
    # What is hidden under the longer segments is not exposed any more; the sum is what they take.
    terms = time.compute_s + time.launch_wait_s + time.exposed_communication_s + time.optimizer_s
    assert time.total_s == pytest.approx(terms)
    assert time.exposed_communication_s <= without.exposed_communication_s * (1 + 1e-9)


def test_a_device_that_is_slower_than_its_host_waits_for_nothing() -> None:
    graph, machine = transformer(3, 512), cluster(1, 4, launch_s=1e-9)
    assert time_of(graph, machine) == time_of(graph, replace(machine, launch=None))


def test_recomputation_launches_forwards_again() -> None:
    """A block's forward has two kernels in each of its six operators; nothing here computes for as long as one."""
    graph, machine = transformer(3, 64, selective=0.5), cluster(1, 2, launch_s=LAUNCH_S, flops=1e18)
    kept, whole, selective = (
        time_of(graph, machine, how) for how in (Recompute.NOTHING, Recompute.EVERYTHING, Recompute.SELECTIVE)
    )
    forward_s = 3 * 6 * 2 * LAUNCH_S
    assert whole.total_s - kept.total_s == pytest.approx(forward_s, rel=1e-3)
    # Both forwards pass through a dispatch mode.
    assert selective.total_s - kept.total_s == pytest.approx(3 * forward_s, rel=1e-3)


@pytest.mark.parametrize(("side", "waits"), [(64, True), (8192, False)])
def test_the_optimizer_waits_for_its_launches(side: int, waits: bool) -> None:
    """Three tensors are stepped in a fraction of a millisecond, or in longer than it takes to launch that."""
    graph, machine = chain([(side, side)] * 3, [1.0] * 3, [20.0] * 3), cluster(1, 2, launch_s=LAUNCH_S)
    load = Workload(machine, "fused_adam", "fp32", 1)
    device_s, launches_s = load.optimizer_s(3 * 4 * side**2 / 2), 3 * STEPPED_TENSOR_S
    assert waits == (device_s < launches_s)
    assert time_of(graph, machine, optimizer="fused_adam").optimizer_s == pytest.approx(max(device_s, launches_s))
    assert load.optimizer_s(0.0, tensors=3) == pytest.approx(launches_s), "empty ones take as long to launch"
    assert load.optimizer_s(0.0, tensors=0) == 0.0
    assert machine.launch is not None
    for launch in (None, replace(machine.launch, stepped_tensor_s=None)):
        without = time_of(graph, replace(machine, launch=launch), optimizer="fused_adam")
        assert without.optimizer_s == pytest.approx(device_s)


@pytest.mark.parametrize("offloaded", [0, 1, 3])
def test_the_device_launches_what_it_has(offloaded: int) -> None:
    """Of three operators of one tensor each, some of which the host steps."""
    graph, machine = chain([(64, 64)] * 3, [1.0] * 3, [20.0] * 3), cluster(1, 2, launch_s=LAUNCH_S)
    rate = Figure(1e10, "assumed: for a test")
    machine = replace(machine, host=Host(rate, rate))
    load, space = Workload(machine, "fused_adam", "fp32", 1), Space(graph)
    shard, offload = (parse_strategy(name, machine) for name in ("shard", "shard+offload"))
    choice = StageDecision((offload,) * offloaded + (shard,) * (3 - offloaded), Recompute.NOTHING)
    option = space.option(0, choice, None, load)
    host_s = load.optimizer_s(0.0, offloaded * 4 * 64 * 64 / 2)
    assert option.optimizer_s - host_s == pytest.approx((3 - offloaded) * STEPPED_TENSOR_S)


def test_a_rank_waits_for_the_launches_of_the_one_that_steps_longest() -> None:
    """Two ranks each own one of two layers, and step both, of which one is empty: alike, if the layers are."""
    graph, machine = chain([(64, 64)] * 2, [1.0] * 2, [20.0] * 2), cluster(1, 2, launch_s=LAUNCH_S)
    load, space = Workload(machine, "fused_adam", "fp32", 1), Space(graph)
    owners = tuple(parse_strategy(f"owner@{rank}", machine) for rank in range(2))
    _, options = fullest(space, load, (StageDecision(owners, Recompute.NOTHING),), None)
    device_s = load.optimizer_s(4 * 64 * 64)
    assert device_s < 2 * STEPPED_TENSOR_S
    assert sum(one.optimizer_s for one in options) == pytest.approx(2 * STEPPED_TENSOR_S)
    assert sum(one.optimizer_wait_s for one in options) == pytest.approx(2 * STEPPED_TENSOR_S - device_s)


@pytest.mark.parametrize(("gflops", "hidden"), [(1e4, 1.0), (1e-3, 0.0)])
def test_a_host_that_is_ahead_has_launched_the_optimizer_when_it_begins(gflops: float, hidden: float) -> None:
    """Of eight small tensors, after a backward that takes the device longer than launching them, or hardly any time."""
    graph, machine = chain([(64, 64)] * 8, [gflops] * 8, [1.0] * 8), cluster(1, 2, launch_s=LAUNCH_S)
    load = Workload(machine, "fused_adam", "fp32", 1)
    options = sharded(graph, load)
    waits_s = 8 * STEPPED_TENSOR_S - load.optimizer_s(8 * 4 * 64 * 64 / 2)
    assert sum(one.optimizer_wait_s for one in options) == pytest.approx(waits_s)
    unhidden = [replace(one, optimizer_wait_s=0.0) for one in options]
    never_s, ahead_s = (simulated_s(one, load, host_gets_ahead=True) for one in (unhidden, options))
    # The last reduction, of 0.03 ms, gives any host a lead.
    assert never_s - ahead_s == pytest.approx(hidden * waits_s, abs=5e-5)
    assert simulated_s(options, load) == simulated_s(unhidden, load), "without a lead nothing is hidden"


def test_a_mean_leaves_out_the_extremes() -> None:
    assert mean_s([1.0, 2.0, 9.0]) == 4.0
    assert mean_s([100.0, *range(1, 9), 0.0]) == 4.5


@settings(max_examples=draws(20), deadline=None)
@given(st.floats(0.0, 1e-2), st.integers(1, 8), st.sampled_from(list(Recompute)))
def test_a_slower_host_makes_no_step_shorter(launch_s: float, batch: int, recompute: Recompute) -> None:
    graph = transformer(2, 256, selective=0.5)
    slower, faster = (
        time_of(graph, cluster(1, 4, launch_s=one), recompute, batch).total_s for one in (1.1 * launch_s, launch_s)
    )
    without_s = time_of(graph, cluster(1, 4), recompute, batch).total_s
    assert slower >= faster * (1 - 1e-12) >= without_s * (1 - 1e-9)


def test_measured_calls_have_their_own_launches_whatever_the_micro_batch() -> None:
    graph, machine = chain([(1024, 1024)] * 2, [1.0, 2.0], [20.0] * 2), cluster(1, 2, launch_s=LAUNCH_S)
    key = call_key(graph, graph.calls[0])
    times = CallTimes(key, "first", (1,), (0.5,), (0.7,), (0.0,), forward_launch_s=0.25, backward_launch_s=0.125)
    machine = replace(machine, measured=Measured("2026-01-01", "", 1, calls=(times,)))
    for batch in (1, 16):
        load = Workload(machine, "adam", "fp32", batch)
        assert load.launch_s(graph, graph.calls[0]) == (0.25, 0.125)
        assert load.launch_s(graph, graph.calls[1]) == (2 * LAUNCH_S, 3 * LAUNCH_S)


def test_a_measured_call_that_launches_nothing_takes_what_was_measured() -> None:
    """The modules around others may begin and end without a kernel, but not without Python."""
    graph = chain([(1024, 1024)] * 2, [1.0, 2.0], [20.0] * 2)
    empty = replace(graph.calls[0], forward=replace(graph.calls[0].forward, launches=0))
    graph = replace(graph, calls=(empty, graph.calls[1]))
    times = CallTimes(call_key(graph, empty), "first", (1,), (0.5,), (0.7,), (0.0,), 0.25, 0.125)
    machine = replace(cluster(1, 2, launch_s=LAUNCH_S), measured=Measured("2026-01-01", "", 1, calls=(times,)))
    assert Workload(machine, "adam", "fp32", 1).launch_s(graph, empty) == (0.25, 0.125)


# ---- counted in the trace -------------------------------------------------------------------------


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that write memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        moves_nothing = func.name().startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view"))
        self.count += not (func.is_view or moves_nothing or func.namespace == "prim")
        return out


@pytest.mark.parametrize("model", ["mlp", "language model"])
def test_launches_are_the_operations_that_a_step_runs(model: str) -> None:
    traced = source(lambda: PLAIN_MLP(32, 64, 64, 8), (32,)) if model == "mlp" else language_model()
    graph = trace_model(traced, "fp32", "cpu")
    module = traced.build()
    args, kwargs = traced.example_inputs(module, 2)
    forward, backward = Kernels(), Kernels()  # type: ignore[no-untyped-call]
    with forward:
        loss, _ = find_loss(module(*args, **kwargs))
    with backward:
        loss.backward()  # type: ignore[no-untyped-call]
    counts = (sum(getattr(call, way).launches for call in graph.calls) for way in ("forward", "backward"))
    for counted, run in zip(counts, (forward.count, backward.count), strict=True):
        assert counted == pytest.approx(run, abs=2)  # the gradient of the loss itself


def test_files_and_fingerprints_are_older_than_what_an_optimizer_takes_to_launch(tmp_path: Path) -> None:
    """A file without it is read, and has the fingerprint that it had: a constant, of before there was the figure."""
    machine = cluster(1, 2, launch_s=LAUNCH_S)
    older = asdict(machine)
    del older["launch"]["stepped_tensor_s"]
    (tmp_path / "older.yaml").write_text(yaml.safe_dump(older))
    again = read_cluster(tmp_path / "older.yaml")
    assert again.launch is not None
    assert again.launch.stepped_tensor_s is None
    assert cluster_fingerprint(again) == "5433bf829df62d8d"
    assert cluster_fingerprint(machine) != "5433bf829df62d8d"


def test_keys_and_fingerprints_are_older_than_launches() -> None:
    graph, machine = chain([(1024, 1024)] * 2, [1.0, 2.0], [20.0] * 2), cluster(1, 2)
    other = replace(graph.calls[0].forward, launches=99)
    assert call_key(graph, replace(graph.calls[0], forward=other)) == call_key(graph, graph.calls[0])
    assert cluster_fingerprint(cluster(1, 2, launch_s=LAUNCH_S)) != cluster_fingerprint(machine)


# ---- measured --------------------------------------------------------------------------------------


def test_a_stopwatch_has_what_the_host_took_too() -> None:
    device = LaggingDevice(5e-5)
    watch = Stopwatch(QueueClock(device, lambda: device.now_s), lambda: device.now_s)
    for label, kernels in (("one", 3), ("two", 5), ("one", 2)):
        watch.switch(label)
        for _ in range(kernels):
            device.enqueue(1e-6)
    watch.switch(None)
    assert watch.launches() == pytest.approx({"one": 5 * 5e-5, "two": 5 * 5e-5})
    assert watch.totals() == pytest.approx({"one": 5e-6, "two": 5e-6})


def test_a_cpu_launches_nothing() -> None:
    watch = Stopwatch(HostClock())
    watch.switch("one")
    watch.switch(None)
    assert watch.launches() == {}


class Slow(nn.Module):
    """Sleeps in forward and twice as long in backward, and returns a view."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds
        self.passes, self.views = 0, list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        self.passes += 1
        out: Tensor = self.linear(x)
        self.views.append(out._is_view())
        out.register_hook(lambda gradient: time.sleep(2 * self.seconds))  # type: ignore[no-untyped-call]
        return out.sum()


def test_a_whole_pass_is_timed_as_plans_run_it() -> None:
    module = Slow(5e-3)
    taken_s = host_launches_s(module, ((torch.ones(2, 3, 4),), {}), torch.device("cpu"), repetitions=7)
    assert len(taken_s) == 7
    assert min(taken_s) >= 15e-3
    assert median(taken_s) < 60e-3
    assert module.passes == 7 + WARM_UP
    more_s = host_launches_s(module, ((torch.ones(2, 3, 4),), {}), torch.device("cpu"), repetitions=1, least_s=0.05)
    assert 1 < len(more_s) <= 4, "of 15 ms each"
    assert not any(module.views), "plans have aliases in place of views"
    assert all(parameter.grad is None for parameter in module.parameters())


def test_without_room_for_a_whole_pass_there_is_no_time() -> None:
    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError

    assert host_launches_s(Full(), ((torch.ones(1),), {}), torch.device("cpu"), repetitions=3) == []


def test_calls_take_what_the_whole_pass_takes() -> None:
    def call(key: str, forward_s: float, backward_s: float) -> CallTimes:
        return CallTimes(key, key, (1,), (0.5,), (0.7,), (0.0,), forward_s, backward_s)

    calls = [call("layer", 1.0, 2.0), call("head", 0.5, 0.5)]
    # Two layers and a head were watched for 7 seconds.
    assert unwatched(calls, ["layer", "layer", "head"], 3.5) == [call("layer", 0.5, 1.0), call("head", 0.25, 0.25)]
    for launched_s in (None, 7.0, 20.0):
        assert unwatched(calls, ["layer", "layer", "head"], launched_s) == calls
    assert unwatched([call("none", 0.0, 0.0)], ["none"], 1.0) == [call("none", 0.0, 0.0)]


class OfADevice(HostClock):
    """A clock of a device that is behind its host."""

    is_behind_host = True


def test_the_host_is_timed_at_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change its speed within seconds: before each micro-batch, and at the end, always with the smallest."""
    rows: list[int] = []

    def timed(module: nn.Module, inputs: Any, device: torch.device, repetitions: int, least_s: float) -> list[float]:
        rows.append(len(inputs[0][0]))
        return [1e-9 * len(rows)] * repetitions

    monkeypatch.setattr(operator_times, "host_launches_s", timed)
    source = load_model("gpt2-tiny", sequence_length=8)
    graph, cpu = trace_model(source, "fp32", "cpu"), torch.device("cpu")
    found = measure_calls(source, graph, cpu, (2, 1), repetitions=1, warm_up=0, clock=OfADevice())
    assert rows == [1, 1, 1]
    # Watched passes take longer, so that the mean of the three is what the calls of a pass add up to.
    assert pass_launch_s(graph, found.calls) == pytest.approx(2e-9)


def test_units_take_the_mean_of_what_they_took_at_several_times() -> None:
    assert mean_launch([UnitLaunch(1.0, 0.5, 4.0), UnitLaunch(3.0, 0.0, 6.0)]) == UnitLaunch(2.0, 0.25, 5.0)


def test_stacks_have_as_many_tensors_as_is_reckoned() -> None:
    few, many = MLP(NARROW, 0.02), Block(NARROW)
    assert [len(list(unit.parameters())) for unit in (few, many)] == [FEW_TENSORS, TENSORS]


def _stacks(rank: int) -> list[list[float]]:
    mesh = Meshes("cpu", 1, 2).mesh(2)
    stacks = (LaunchedStacks(mesh, torch.device("cpu"), precision) for precision in ("fp32", "bf16"))
    return [[median(of_stack) for of_stack in zip(*one.rounds(3), strict=True)] for one in stacks]


def test_sharding_takes_time_of_the_host() -> None:
    for rank in run_ranks(_stacks, 2):
        for few_s, few_sharded_s, many_s, many_sharded_s, stepped_s in rank:
            assert 0 < few_s < few_sharded_s
            assert 0 < many_s < many_sharded_s
            assert 0 < stepped_s < many_sharded_s


def test_units_and_their_tensors_are_told_apart() -> None:
    events, unit_s, tensor_s = EVENTS * UNITS, 3e-4, 2e-5
    few, many = (events * (unit_s + tensors * tensor_s) for tensors in (FEW_TENSORS, TENSORS))
    found = unit_launch(0.01, 0.01 + few, 0.02, 0.02 + many, 1e-3)
    assert (found.unit_s, found.tensor_s) == pytest.approx((unit_s, tensor_s))
    assert found.stepped_tensor_s == pytest.approx(1e-3 / (UNITS * TENSORS))
    # Nothing is below zero, whatever the noise.
    assert unit_launch(0.02, 0.01, 0.02, 0.01, 0.0) == UnitLaunch(0.0, 0.0, 0.0)
    assert unit_launch(0.01, 0.03, 0.01, 0.02, 0.0).tensor_s == 0.0


@pytest.mark.parametrize("name", ["titan-rtx-8", "h100-8", "h100-4x8", "h200-1", "a100-2x8"])
def test_presets_of_gpus_have_what_launching_takes(name: str) -> None:
    launch = load_cluster(name).launch
    assert launch is not None
    for figure in (launch.kernel_s, launch.unit_s, launch.unit_tensor_s, launch.stepped_tensor_s):
        assert figure is not None
        assert 1e-6 < figure.value < 1e-2
        assert figure.source.startswith(("measured: ", "assumed: "))


def test_cpus_have_none() -> None:
    assert load_cluster("cpu-gloo").launch is None
