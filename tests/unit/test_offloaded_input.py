"""Blocks whose input is on the host until they run again: what the search makes of them, and how copies are made."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import cluster, transformer
from thoroughness import draws
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from osdp.cli.reports.verdict import verdict
from osdp.planning.named_model import NamedModel, TraceSettings
from osdp.planning.request import Request, plan_graph
from osdp.zoo import load_cluster
from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import decisions_of, fixed, make_plan
from planner.problem import Pins, Task
from planner.search.ceiling import computing_s
from planner.search.search import search
from planner.strategies.spec import Strategy
from profiler.affine import Affine
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute
from runtime.compile_plan import compile_plan
from runtime.strategies import offloaded_input
from runtime.strategies.activation_checkpointing import _with_device
from runtime.strategies.offloaded_input import Offloading

GIB = 1 << 30
LINK = 20e9


def machine(gpus: int = 4, *, link: float = LINK, nvlink: bool = True) -> Any:
    return cluster(1, gpus, host=(link, 1e12), nvlink=nvlink, latency_s=0.0)


# --- time ---


@pytest.mark.parametrize("link", [0.1e9, 1e9, 2e9, LINK])
@pytest.mark.parametrize("nvlink", [True, False])
def test_what_a_copy_is_not_hidden_under_is_waited_for(link: float, nvlink: bool) -> None:
    graph, batch = transformer(2, 512, offloadable=True), 4
    space, load = Space(graph), Workload(machine(link=link, nvlink=nvlink), "adam", "fp32", batch)
    shard, step_s = Strategy("shard", 4), []
    for mode in (Recompute.EVERYTHING, Recompute.OFFLOADED):
        modes = [mode if stage.block == 0 else Recompute.NOTHING for stage in space.model.stages]
        stages = zip(space.model.stages, modes, strict=True)
        choices = [StageDecision((shard,) * len(stage.operators), how) for stage, how in stages]
        options = fixed(space, load, choices, shard)
        step_s.append(step_time(options, load).total_s)
        computed = next(option for option, how in zip(options, modes, strict=True) if how)
    copy_s = 4 * 1024 * 512 * batch / link
    hidden = [sum(getattr(one, name) for one in computed.segments) for name in ("forward_s", "backward_s")]
    waits_s = sum(max(0.0, copy_s - seconds) if nvlink else copy_s for seconds in hidden)
    assert step_s[1] - step_s[0] == pytest.approx(waits_s, rel=1e-6, abs=1e-9)


def test_a_block_waits_for_its_input_where_none_above_has_room_for_it() -> None:
    graph, batch, link = transformer(2, 512, offloadable=True), 4, 2e9
    alone = replace(
        graph, blocks=(graph.blocks[0], replace(graph.blocks[1], offloadable_bytes=Affine(), block_class=1))
    )
    load, waits_s = Workload(machine(link=link), "adam", "fp32", batch), list[tuple[float, float]]()
    for one in (graph, alone):
        space = Space(one)
        at = next(index for index, stage in enumerate(space.model.stages) if stage.block == 0)
        waits_s.append(
            space.stage_costs(space.stage_classes[at], load).copy_waits_s(Recompute.OFFLOADED, is_whole=True)
        )
    copy_s = 4 * 1024 * 512 * batch / link
    assert waits_s[0][1] < waits_s[1][1] == pytest.approx(copy_s)
    assert waits_s[0][0] == waits_s[1][0]


def test_distributed_data_parallel_waits_too() -> None:
    graph, batch, step_s = transformer(2, 256, offloadable=True), 4, list[float]()
    for link in (1e15, 0.1e9):
        space, load = Space(graph), Workload(machine(2, link=link), "adam", "fp32", batch)
        modes = [Recompute.OFFLOADED if stage.block == 0 else Recompute.NOTHING for stage in space.model.stages]
        step_s.append(step_time(space.replica(load).options(modes), load).total_s)
        at = space.stage_classes[next(k for k, stage in enumerate(space.model.stages) if stage.block == 0)]
        waits_s = space.stage_costs(at, load).copy_waits_s(Recompute.OFFLOADED, is_whole=True)
    assert sum(waits_s) > 0
    assert step_s[1] - step_s[0] == pytest.approx(sum(waits_s), rel=1e-6)
    # Its bound, and that of any plan, know of the wait too.
    kinds = Recompute.OFFLOADED, Recompute.EVERYTHING
    number = next(k for k, stage in enumerate(space.model.stages) if stage.block == 0)
    least = [space.replica(load).computing_s(number, kind) for kind in kinds]
    assert least[0] - least[1] == pytest.approx(sum(waits_s), rel=1e-6)
    least = [computing_s(space.stage_costs(at, load), kind) for kind in kinds]
    assert 0 < least[0] - least[1] <= sum(waits_s) * (1 + 1e-9)


# --- search ---


def best_by_trying(graph: ModelGraph, load: Workload, strategies: tuple[Strategy, ...], limit: float) -> float:
    """Return the most samples per second of all plans that give every block one of the strategies, and run again of it
    what is offered.
    """
    space, best = Space(graph), 0.0
    blocks = [stage for stage in space.model.stages if stage.block is not None]
    offered = [space.modes(space.stage_classes[space.model.stages.index(stage)], load) for stage in blocks]
    for modes, taken in product(product(*offered), product(strategies, repeat=len(blocks))):
        decided = dict(zip((stage.block for stage in blocks), zip(modes, taken, strict=True), strict=True))
        choices = [
            StageDecision((own,) * len(stage.operators), how)
            for stage in space.model.stages
            for how, own in [decided.get(stage.block, (Recompute.NOTHING, strategies[0]))]
        ]
        options = fixed(space, load, choices, strategies[0])
        if peak_memory(options, load).total_bytes <= limit:
            best = max(best, load.samples_per_step / step_time(options, load).total_s)
    return best


@settings(max_examples=draws(5), deadline=None)
@given(st.sampled_from([0.2e9, 1e9, LINK]), st.integers(8, 16), st.floats(0.0, 0.9), st.booleans(), st.integers(1, 2))
def test_the_search_finds_no_less_than_trying_all(
    link: float, batch: int, fraction: float, distinct: bool, accumulation: int
) -> None:
    graph = transformer(4, 256, vocabulary=256, selective=0.4, offloadable=True, distinct=distinct)
    load = Workload(machine(link=link), "adam", "fp32", batch, accumulation)
    shard = Strategy("shard", 4)

    def peak(how: Recompute) -> float:
        space = Space(graph)
        choices = [
            StageDecision((shard,) * len(stage.operators), how if stage.block is not None else Recompute.NOTHING)
            for stage in space.model.stages
        ]
        return peak_memory(fixed(space, load, choices, shard), load).total_bytes

    least, most = peak(Recompute.OFFLOADED), peak(Recompute.NOTHING)
    assert least < peak(Recompute.EVERYTHING) < most
    limit = int(least + fraction * (most - least)) + 1
    best = best_by_trying(graph, load, (shard,), limit)
    pins = Pins(dict.fromkeys(range(len(graph.operators)), (shard,)))
    task = Task(graph, load.cluster, limit, micro_batch=batch, global_batch=4 * batch * accumulation, pins=pins)
    found = search(task)
    assert found.load.accumulation == accumulation
    assert peak_memory(found.options, found.load).total_bytes <= limit
    assert best <= found.bound_samples_per_s * (1 + 1e-9)
    assert found.samples_per_s >= best * (1 - found.gap) * (1 - 1e-9)


def test_many_alike_blocks_are_not_recomputed_without_where_copies_are_hidden() -> None:
    everything = [*Recompute]
    hidden = [mode for mode in Recompute if mode is not Recompute.EVERYTHING]
    for blocks, link, expected in ((3, LINK, everything), (4, LINK, hidden), (4, 0.2e9, everything)):
        graph = transformer(blocks, 256, selective=0.4, offloadable=True)
        space, load = Space(graph), Workload(machine(link=link), "adam", "fp32", 1)
        at = next(index for index, stage in enumerate(space.model.stages) if stage.block == 1)
        assert [*space.modes(space.stage_classes[at], load)] == expected
        pinned = Space(graph, pins=Pins({}, {1: Recompute.EVERYTHING}))
        at = next(index for index, stage in enumerate(pinned.model.stages) if stage.block == 1)
        taken = {choice.recompute for choice in pinned.choices(pinned.stage_classes[at], load)}
        assert taken == {Recompute.EVERYTHING}


def test_parameters_on_the_host_go_with_whole_recomputation() -> None:
    graph, on = transformer(5, 256, selective=0.4, offloadable=True), machine()
    space, load = Space(graph), Workload(on, "adam", "fp32", 2)
    at = next(index for index, stage in enumerate(space.model.stages) if stage.block == 1)
    choices = space.choices(space.stage_classes[at], load)
    by_place = {
        on_host: {one.recompute for one in choices if any(s.offload for s in one.strategies) == on_host}
        for on_host in (False, True)
    }
    assert by_place[True] == {Recompute.NOTHING, Recompute.SELECTIVE, Recompute.EVERYTHING}
    assert by_place[False] == {Recompute.NOTHING, Recompute.SELECTIVE, Recompute.OFFLOADED}
    assert len(set(choices)) == len(choices)


def test_where_nothing_can_be_offloaded_all_is_recomputed() -> None:
    graph = transformer(2, 256)
    stage = next(stage for stage in Space(graph).model.stages if stage.block == 0)
    assert stage.allowed(Recompute.OFFLOADED) is Recompute.EVERYTHING


def test_it_is_offered_where_nothing_else_takes_the_link() -> None:
    graph = transformer(2, 512, offloadable=True)
    stage = next(one for one in Space(graph).model.stages if one.block is not None)
    two_nodes = cluster(2, 4, host=(LINK, 1e12), nvlink=True)
    expected = ((machine(), True), (machine(nvlink=False), False), (machine(1, nvlink=False), True))
    for on, offers in (*expected, (cluster(1, 4, nvlink=True), False), (two_nodes, False)):
        assert (Recompute.OFFLOADED in stage.offered(on)) == offers


def test_a_tight_plan_of_the_zoo_offloads_and_says_so() -> None:
    on = load_cluster("h100-8")
    graph = NamedModel("gpt2-1.5b").traced(TraceSettings("bf16", "cuda")).graph
    planned = plan_graph(graph, on, Request(6 * GIB))
    plan = planned.plan
    assert len(plan.offloaded_blocks) > 24
    assert f"the inputs of {len(plan.offloaded_blocks)} in host memory" in verdict(planned)
    blocks = tuple(replace(block, offloadable_bytes=Affine()) for block in graph.blocks)
    without = plan_graph(replace(graph, blocks=blocks), on, Request(6 * GIB))
    assert plan.predicted.samples_per_s > 1.1 * without.plan.predicted.samples_per_s
    schedule = compile_plan(plan, graph, on)
    below = dict(zip(plan.offloaded_blocks[1:], plan.offloaded_blocks, strict=False))
    assert all(schedule.offloaded[name] in (None, lower) for name, lower in below.items())
    assert schedule.offloaded[plan.offloaded_blocks[0]] is None
    assert str(schedule).count("(recomputed, input offloaded)") > 0


def test_a_plan_file_keeps_what_is_offloaded() -> None:
    graph, on = transformer(3, 256, offloadable=True), machine()
    load, space, shard = Workload(on, "adam", "fp32", 2), Space(graph), Strategy("shard", 4)
    choices = [
        StageDecision((shard,) * len(s.operators), Recompute.OFFLOADED if s.block else Recompute.NOTHING)
        for s in space.model.stages
    ]
    made = make_plan(fixed(space, load, choices, shard), shard, space, load, limit_bytes=1 << 40, gap=0.0)
    assert made.offloaded_blocks == ["blocks.1", "blocks.2"]
    assert made.recomputed_blocks == []
    again = [choice.recompute for choice in decisions_of(made, space, on).choices]
    assert again == [choice.recompute for choice in choices]


# --- copies ---


class Layer(nn.Module):
    """A residual branch that may change its input."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: float = 1.0, *, more: Tensor | None = None) -> Tensor:
        if self.in_place:
            x.mul_(2)
        y = x + scale * torch.tanh(self.linear(x))
        return y if more is None else y + more


def run(layers: nn.ModuleList, x: Tensor, offloading: Offloading, *, by_name: bool = False) -> Tensor:
    for index, layer in enumerate(layers):
        args, kwargs = ((), {"x": x, "scale": 0.5}) if by_name else ((x, 0.5), {"more": torch.ones(6)})
        offloaded = offloading.offload(str(index), args, kwargs)
        forward = layer.forward
        if offloaded is not None:
            forward, (args, kwargs) = offloaded.into(forward), offloaded.without(args, kwargs)
        x = checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if offloaded is not None:
            offloaded.let_go(str(index))
    return x


@pytest.mark.parametrize("by_name", [False, True])
def test_gradients_are_those_of_inputs_that_stay(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward twice, too; inputs leave in order, and come back while the block above runs back."""
    moves = list[str]()
    copy = offloaded_input.CopyStreams.copy

    def noted(streams: Any, target: Tensor, source: Tensor, *, leaves: bool) -> Any:
        moves.append("out" if leaves else "back")
        return copy(streams, target, source, leaves=leaves)

    monkeypatch.setattr(offloaded_input.CopyStreams, "copy", noted)
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(4))
    x = torch.randn(3, 6, requires_grad=True)
    below = {"0": None, "1": "0", "2": "1", "3": "2"}
    there = list[tuple[int, int]]()
    for index, layer in enumerate(layers):  # as the gradient of the output is known, the backward of the block begins
        layer.linear.weight.register_hook(lambda _, index=index: there.append((index, moves.count("back"))))
    found = list[tuple[Tensor, ...]]()
    for offloading in (Offloading(x.device, {}), Offloading(x.device, below)):
        loss = run(layers, x, offloading, by_name=by_name).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append((x.grad, *(one.grad for one in layers.parameters())))
        x.grad = None
        layers.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert moves == ["out"] * 4 + ["back"] * 8
    # Of the topmost its own, and in every backward that of the next below.
    assert there[8:12] == [(3, 2), (2, 3), (1, 4), (0, 4)]


def test_memory_of_the_host_is_let_go_with_the_graph() -> None:
    layers, x = nn.ModuleList(Layer() for _ in range(2)), torch.randn(3, 6, requires_grad=True)
    offloading = Offloading(x.device, {"0": None, "1": "0"})
    loss = run(layers, x, offloading).sum()
    assert len(offloading._last) == 2
    loss.backward()
    del loss
    assert len(offloading._last) == 0


def test_a_block_that_changes_its_input_is_refused() -> None:
    layers, x = nn.ModuleList([Layer(in_place=True)]), torch.randn(3, 6, requires_grad=True) * 1
    with pytest.raises(OsdpError, match="the input of block 0 cannot be offloaded") as refused:
        run(layers, x, Offloading(x.device, {"0": None}))
    assert "0=keep" in str(refused.value)


def test_what_needs_no_gradient_is_not_copied() -> None:
    offloading = Offloading(torch.device("cpu"), {"0": None})
    with pytest.warns(UserWarning, match="block 0 is handed no tensor that needs a gradient"):
        assert offloading.offload("0", (torch.randn(3, 6), 2), {"flag": True}) is None
    assert offloading.offload("1", (torch.randn(3, 6, requires_grad=True),), {}) is None


class FakeStream:
    """A stream that notes what is asked of it."""

    log: list[str]

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.log.append(f"{self.name} begins")

    def __exit__(self, *error: object) -> None:
        self.log.append(f"{self.name} ends")

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_copies_wait_for_computing_and_computing_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with streams that only say what they are asked: copies are made at once."""
    FakeStream.log = log = []
    names = iter(["out", "back"])
    monkeypatch.setattr(torch, "Stream", lambda _: FakeStream(next(names)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: FakeStream("computing"))
    offloading = Offloading(torch.device("cuda"), {"0": None})
    layers, x = nn.ModuleList([Layer()]), torch.randn(3, 6, requires_grad=True) * 1
    loss = run(layers, x, offloading).sum()
    out = ["out waits for computing", "out begins", "out records", "out ends", "computing waits for event of out"]
    assert log == out
    loss.backward()
    back = ["back waits for computing", "back begins", "back records", "back ends", "computing waits for event of back"]
    assert log == [*out, *back]


def test_a_copy_that_nothing_waits_for_is_waited_for_before_its_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a backward fails between two blocks."""
    FakeStream.log = log = []
    monkeypatch.setattr(torch, "Stream", lambda _: FakeStream("copying"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: FakeStream("computing"))
    offloading = Offloading(torch.device("cuda"), {"0": None, "1": "0"})
    layers, x = nn.ModuleList([Layer(), Layer()]), torch.randn(3, 6, requires_grad=True) * 1
    loss = run(layers, x, offloading).sum()
    before = len(log)
    torch.autograd.grad(loss, layers[1].parameters())
    waits = [entry for entry in log[before:] if entry == "computing waits for event of copying"]
    assert len(waits) == 1  # for its own input; that of the block below is on its way
    del loss
    gc.collect()
    assert log[-1] == "computing waits for event of copying"
    assert log[before:].count("computing waits for event of copying") == 2


def test_generators_of_the_device_are_kept_of_blocks_that_are_handed_all_by_name() -> None:
    """`checkpoint` asks positional arguments for their devices."""
    forward, args = _with_device(lambda a, b=0: (a, b), (), torch.device("meta"))
    assert [one.device.type for one in args] == ["meta"]
    assert forward(*args, a=1, b=2) == (1, 2)
    forward, args = _with_device(lambda a, b=0: (a, b), (3,), torch.device("meta"))
    assert forward(*args, b=4) == (3, 4)
