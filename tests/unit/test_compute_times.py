"""Which interval is whose by a clock that the model itself moves; sums against a plain training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from clocks import ManualClock, ThreadClock, one_thread
from thoroughness import THOROUGH, some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trace_models import MEMORY_CASES, MLP, Block, language_model, source

from osdp.models.bert import Bert
from osdp.models.config import BertConfig, GPT2Config, LlamaConfig
from osdp.models.gpt2 import GPT2
from osdp.models.llama import Llama
from profiler.cluster.measurements import CallTimes, call_key
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.timing.operator_times import ComputeTimes, measure_calls, spread
from profiler.timing.shared_weights import build, shared_weights
from profiler.trace.trace import trace_model
from runtime.observe.live_bytes import LiveBytes

CPU = torch.device("cpu")


class PacedClock(ManualClock):
    """Stands still until `Tick` moves it."""

    pace = 1.0


CLOCK = PacedClock()


class Tick(torch.autograd.Function):
    """Returns its input and moves the clock, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        CLOCK.now += forward_s * CLOCK.pace
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        CLOCK.now += ctx.backward_s * CLOCK.pace
        return gradient, None, None


def tick(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    out: Tensor = Tick.apply(x, forward_s, backward_s)
    return out


class Slow(nn.Linear):
    """A linear layer of known duration."""

    def __init__(self, inputs: int, outputs: int, forward_s: float, backward_s: float) -> None:
        super().__init__(inputs, outputs)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return tick(super().forward(x), self.forward_s, self.backward_s)


class SlowBlock(nn.Module):
    """Two branches that read the same input, and a layer over their sum."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.left = Slow(width, 16, seconds, 2 * seconds)
        self.right = Slow(width, 24, 3 * seconds, 4 * seconds)
        self.down = Slow(40, width, 5 * seconds, 6 * seconds)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat((self.left(x), self.right(x)), -1)
        return tick(self.down(joined), 0.5, 0.25) + x


class SlowModel(nn.Module):
    """Blocks between two layers; what the first made goes past them too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Slow(4, 8, 100.0, 200.0)
        self.blocks = nn.ModuleList((SlowBlock(8, 1.0), SlowBlock(8, 3.0)))
        self.last = Slow(8, 5, 300.0, 400.0)

    def forward(self, x: Tensor) -> Tensor:
        x = past = tick(self.first(tick(x, 7.0, 0.0)), 10.0, 20.0)
        for block in self.blocks:
            x = tick(block(x), 0.125, 0.0625)
        return tick(self.last(x + past).square().mean(), 1000.0, 2000.0)


def by_name(found: ComputeTimes) -> dict[str, CallTimes]:
    return {times.name.removeprefix("model "): times for times in found.calls}


def test_each_call_gets_its_module_and_what_follows_it() -> None:
    model = source(SlowModel, (4,))
    found = measure_calls(model, trace_model(model), CPU, [2, 4], repetitions=1, clock=CLOCK)
    times = by_name(found)
    assert found.cut
    # The blocks' branches are alike, and take 1 and 3 times as long; a sum follows the second block.
    expected = {
        "first": (7 + 100 + 10, 200 + 20),
        "blocks.0.left": (2 * 1, 2 * 2),
        "blocks.0.right": (2 * 3, 2 * 4),
        "blocks.0.down": (5 + 0.5 + 0.125, 6 + 0.25 + 0.0625),
        "blocks.1.down": (15 + 0.5 + 0.125, 18 + 0.25 + 0.0625),
        "last": (300 + 1000, 400 + 2000),
    }
    assert list(times) == list(expected)
    for name, (forward_s, backward_s) in expected.items():
        assert times[name].micro_batches == (2, 4)
        assert times[name].forward_s == (forward_s, forward_s), name
        assert times[name].backward_s == (backward_s, backward_s), name
    assert found.disagreement == (0.0, 0.0)


def test_medians_of_what_follows_the_warm_up_with_a_barrier_before_each() -> None:
    model = source(SlowModel, (4,))
    paces = iter([1e6, 1e5, 1.0, 9.0, 2.0])  # the first counts bytes, the second warms up
    seen: list[tuple[int, int]] = []

    def barrier() -> None:
        CLOCK.pace = next(paces)

    try:
        found = measure_calls(
            model,
            trace_model(model),
            CPU,
            [1],
            repetitions=3,
            warm_up=1,
            clock=CLOCK,
            barrier=barrier,
            progress=lambda done, passes: seen.append((done, passes)),
        )
    finally:
        CLOCK.pace = 1.0
    assert by_name(found)["last"].forward_s == (2 * 1300,)
    assert seen == [(done, 5) for done in range(1, 6)]


@pytest.mark.parametrize(
    ("entries", "calls", "expected"),
    [
        ([0, 1, 2], [0, 1, 2], [1.0, 2.0, 4.0]),
        # 7 began inside 1, without its module: by weight 20 : 30.
        ([0, 1, 2], [0, 1, 7, 2], [1.0, 2 * 20 / 50, 2 * 30 / 50, 4.0]),
        # The module of 1 was entered, but no op ran in it.
        ([0, 1, 2], [0, 2], [1.0 + 2.0, 4.0]),
        ([1, 0, 2], [0, 2], [2.0 + 1.0, 4.0]),
        ([5, 5, 5], [8, 9], [7 * 10 / 30, 7 * 20 / 30]),
    ],
)
def test_entries_and_calls_that_differ(entries: list[int], calls: list[int], expected: list[float]) -> None:
    values, weights = [1.0, 2.0, 4.0], [10.0, 20.0, 30.0, 40.0][: len(calls)]
    assert spread(entries, calls, values, weights) == pytest.approx(expected)


# --- against PyTorch itself -----------------------------------------------------------------------


def gpt2(hidden: int, layers: int, length: int, words: int = 256, dropout: float = 0.0) -> ModelSource:
    config = GPT2Config(words, length, hidden, layers, 4, dropout)
    return ModelSource("gpt2", lambda: GPT2(config), lambda module, batch: module.example_inputs(batch), length)


@pytest.mark.parametrize("layers", [2, 6] if THOROUGH else [3])
def test_calls_add_up_to_a_plain_training_step(layers: int) -> None:
    """A plain step and a measured pass take turns; the bands leave room for a busy machine."""
    model = gpt2(256, layers, 64)
    graph = trace_model(model)
    module = model.build()
    args, kwargs = model.example_inputs(module, 2)
    forward_s: list[float] = []
    step_s: list[float] = []

    def plain_step() -> None:
        module.zero_grad()
        start = time.thread_time()
        loss = module(*args, **kwargs)
        forward_s.append(time.thread_time() - start)
        loss.backward()
        step_s.append(time.thread_time() - start)

    with one_thread():
        found = measure_calls(model, graph, CPU, [2], repetitions=9, clock=ThreadClock(), barrier=plain_step)
    times = {one.key: one for one in found.calls}
    calls = [times[call_key(graph, call)] for call in graph.calls]
    forward = sum(one.forward_s[0] for one in calls)
    whole = forward + sum(one.backward_s[0] for one in calls)
    assert whole == pytest.approx(median(step_s[3:]), rel=0.35)
    assert forward == pytest.approx(median(forward_s[3:]), rel=0.35)
    assert abs(found.disagreement[0]) < 0.35


class Wayward(nn.Module):
    """A tied head, blocks that run twice and checkpoint themselves, tensors that go past them, a loss in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32, 2, 64) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = past = self.words(tokens)
        late = self.norm(2 * x)  # made before the blocks; its backward comes after theirs
        for block in self.blocks:
            x = block(checkpoint(block, x, use_reentrant=False))
        logits = self.head(self.norm(x + past + late))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), tokens.flatten())}


MODELS: dict[str, ModelSource] = {
    "gpt2": gpt2(64, 2, 128),
    "bert with dropout": ModelSource(
        "bert", lambda: Bert(BertConfig(256, 128, 64, 2, 4, 2, 128, 0.1)), lambda m, b: m.example_inputs(b), 128
    ),
    "llama": ModelSource(
        "llama",
        lambda: Llama(LlamaConfig(256, 128, 64, 2, 4, 2, 128, 1e4, True)),
        lambda m, b: m.example_inputs(b),
        128,
    ),
    "encoder-decoder": MEMORY_CASES["encoder-decoder"],
    "tied in use": MEMORY_CASES["tied in use"],
    "convolutions": MEMORY_CASES["convolutions"],
    "wayward": source(Wayward, (32,), classes=64),
}


def kept_bytes(model: ModelSource, batch: int, dtype: torch.dtype) -> int:
    """Return what autograd keeps of a whole forward, uncut, without parameters and buffers."""
    module = model.build().to(dtype)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.float()  # which mixed precision leaves as it is
    args, kwargs = model.example_inputs(module, batch)
    args = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*args, **kwargs)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("precision", "name"), some([*product(("fp32", "bf16"), MODELS)], 3))
def test_every_kind_of_call_is_measured_and_keeps_what_autograd_keeps(name: str, precision: str) -> None:
    """Of each model in one precision; with --thorough in both."""
    model = MODELS[name]
    graph = trace_model(model, precision)
    found = measure_calls(model, graph, CPU, [2], repetitions=1, warm_up=0)
    times = {one.key: one for one in found.calls}
    assert set(times) == {call_key(graph, call) for call in graph.calls}
    assert all(one.forward_s[0] > 0 and one.backward_s[0] > 0 for one in found.calls)
    assert found.cut
    kept = sum(times[call_key(graph, call)].saved_bytes[0] for call in graph.calls)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert kept == pytest.approx(kept_bytes(model, 2, dtype), abs=1)


@pytest.mark.parametrize("batch", [1, 2])
def test_saved_bytes_are_those_of_the_trace(batch: int) -> None:
    """Of every call; 128 tokens make all of them multiples of the 512 bytes to which the trace rounds."""
    graph = trace_model(MODELS["gpt2"])
    found = measure_calls(MODELS["gpt2"], graph, CPU, [batch], repetitions=1, warm_up=0)
    times = {one.key: one for one in found.calls}
    for call in graph.calls[:-1]:
        assert times[call_key(graph, call)].saved_bytes == (call.saved_bytes(batch),)
    loss = graph.calls[-1].saved_bytes(batch)  # with scalars of its own
    assert loss - 1024 <= times[call_key(graph, graph.calls[-1])].saved_bytes[0] <= loss


# --- what it holds and leaves ---------------------------------------------------------------------


def peak_bytes(model: ModelSource, graph: ModelGraph) -> int:
    with LiveBytes() as live:
        measure_calls(model, graph, CPU, [4], repetitions=1, warm_up=0)
    return live.peak_bytes


def test_depth_costs_no_memory() -> None:
    shallow, deep = gpt2(64, 2, 128), gpt2(64, 12 if THOROUGH else 3, 128)
    peaks = [peak_bytes(model, trace_model(model)) for model in (shallow, deep)]
    # Each layer more has 200 KB of parameters and keeps 3 MB of activations.
    assert peaks[1] <= peaks[0] + 64 * 1024


def test_operators_alike_share_their_parameters() -> None:
    hidden, words, length = 64, 256, 128
    module = build(gpt2(hidden, 5, length, words), CPU)
    with shared_weights(module, CPU, "fp32") as made:
        held_bytes = sum(one.untyped_storage().nbytes() for one in made)
    linear = sum(
        inputs * outputs + outputs
        for inputs, outputs in ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    )
    # The head is the embedding, all norms are one.
    assert held_bytes == 4 * (words * hidden + length * hidden + 2 * hidden + linear)


class InPlaceBlock(nn.Module):
    """Changes its input in place, which no leaf allows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x.mul_(2.0)))
        return out


def test_a_model_that_cannot_be_cut_runs_in_one_piece() -> None:
    model = source(lambda: nn.Sequential(nn.Linear(8, 8), InPlaceBlock(), InPlaceBlock()), (8,))
    graph = trace_model(model)
    assert graph.blocks
    found = measure_calls(model, graph, CPU, [3], repetitions=1)
    assert not found.cut
    assert {one.key for one in found.calls} == {call_key(graph, call) for call in graph.calls}


# --- errors ---------------------------------------------------------------------------------------


class Failing(nn.Linear):
    """Runs on the meta device only."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            raise RuntimeError("no such kernel")
        return super().forward(x)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not gradient.is_meta:
            raise RuntimeError("no such kernel")
        return gradient


class FailingBackward(nn.Linear):
    """Its backward runs on the meta device only."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = FailsBackward.apply(super().forward(x))
        return out


@pytest.mark.parametrize(("layer", "direction"), [(Failing, "forward"), (FailingBackward, "backward")])
def test_what_the_model_raises_names_the_operator(layer: Callable[[int, int], nn.Module], direction: str) -> None:
    model = source(lambda: nn.Sequential(nn.Linear(8, 16), layer(16, 4), nn.Linear(4, 2)), (8,))
    with pytest.raises(OsdpError, match=f"the {direction} of `1`(.|\n)*no such kernel"):
        measure_calls(model, trace_model(model), CPU, [1])


class Other(nn.Module):
    """A layer by a name that no other model has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x).sum()
        return out


def test_a_graph_of_another_model_is_refused() -> None:
    with pytest.raises(OsdpError, match=r"not of model(.|\n)*no module net"):
        measure_calls(source(lambda: MLP(8, 4), (8,)), trace_model(source(Other, (8,))), CPU, [1])


@pytest.mark.parametrize(("sizes", "repetitions"), [([], 1), ([0], 1), ([1], 0)])
def test_nothing_to_measure_is_refused(sizes: list[int], repetitions: int) -> None:
    model = language_model(layers=1)
    with pytest.raises(OsdpError, match="nothing to measure"):
        measure_calls(model, trace_model(model), CPU, sizes, repetitions=repetitions)
