"""Parameters in the dtype that they rest in: what they cost by hand, in a dry run, and what the search makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import THOROUGH, some
from torch import Tensor, nn

from osdp.planning.request import Request, plan_model
from planner.cost.unit_memory import unit_bytes
from planner.model.fsdp_units import units_of
from planner.model.stages import cut
from planner.optimizers import OPTIMIZERS
from planner.strategies.spec import Strategy
from profiler.model_graph import ModelGraph, Parameter
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

ADAM, BF16 = OPTIMIZERS["adam"], torch.bfloat16
HALF = Parameter("w", (1024, 256), True, "bfloat16")


def test_bytes_of_a_unit_by_hand() -> None:
    """262,144 elements on 8 ranks: 32,768 each."""
    unit = unit_bytes([HALF], Strategy("shard", 8), "fp32", ADAM, ranks=8)
    assert (unit.parameters, unit.gradients, unit.stepped) == (65_536, 65_536, 65_536)
    assert unit.optimizer == 2 * 65_536 + 512
    assert (unit.unsharded, unit.gathered, unit.full_gradients) == (524_288, 524_288, 524_288)
    # Reduced in fp32: what arrives is a shard in fp32, beside the one in bf16 that rests.
    assert (unit.gather_temporary, unit.reduce_input, unit.reduce_temporary) == (0, 1_048_576, 131_072)
    # All-reduced across groups, FSDP2 has it until backward ends.
    across = unit_bytes([HALF], Strategy("group_shard", 4), "fp32", ADAM, ranks=8)
    assert (across.stepped, across.gradients, across.reduce_temporary) == (131_072, 131_072 + 262_144, 0)
    # In fp32 at rest, what it was.
    wide = unit_bytes([Parameter("w", (1024, 256))], Strategy("shard", 8), "bf16", ADAM, ranks=8)
    assert (wide.parameters, wide.unsharded, wide.gather_temporary, wide.reduce_temporary) == (
        131_072,
        524_288,
        65_536,
        0,
    )
    # A frozen copy is a tensor on every rank; a frozen shard has neither gradients nor states.
    frozen = Parameter("w", (1024, 256), False, "bfloat16")
    copy, shard = (unit_bytes([frozen], one, "fp32", ADAM) for one in (Strategy("replicate", 1), Strategy("shard", 8)))
    # Unless it is cast, be it to as many bits.
    cast = unit_bytes([replace(frozen, dtype="float16")], Strategy("replicate", 1), "bf16", ADAM)
    assert (cast.parameters, cast.unsharded) == (524_288, 524_288)
    assert (copy.parameters, copy.unsharded, copy.gathered, copy.optimizer, copy.gradients) == (524_288, 0, 0, 0, 0)
    assert (shard.parameters, shard.gathered, shard.optimizer, shard.reduce_input) == (65_536, 524_288, 0, 0)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int16, BF16, torch.float64, torch.complex64]
)
def test_bytes_of_an_element_are_those_of_torch(dtype: torch.dtype) -> None:
    assert Parameter("w", (1,), False, str(dtype).removeprefix("torch.")).element_bytes == dtype.itemsize


class Adapted(nn.Module):
    """A frozen linear layer with adapters of rank 8."""

    def __init__(self, features: int, outputs: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        base, adapter = dtypes
        self.base = nn.Linear(features, outputs, bias=False, dtype=base).requires_grad_(False)
        self.down = nn.Linear(features, 8, bias=False, dtype=adapter)
        self.up = nn.Linear(8, outputs, bias=False, dtype=adapter)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.up(self.down(x.to(self.down.weight.dtype))).to(y.dtype)


class Layer(nn.Module):
    """A feed-forward block of linear layers that `linear(features, outputs)` makes."""

    def __init__(self, width: int, linear: Callable[[int, int], nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width, dtype=dtype),
            linear(width, 4 * width),
            linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))).to(next(self.down.parameters()).dtype))
        return x + y.to(x.dtype)


class Net(nn.Module):
    """Tokens (batch, 64) -> a loss."""

    def __init__(
        self, make: Callable[[int], nn.Module], dtype: torch.dtype, width: int = 256, trains: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width, dtype=dtype).requires_grad_(trains)
        self.blocks = nn.ModuleList(make(width) for _ in range(3))
        self.head = nn.Linear(width, 1000, bias=False, dtype=dtype).requires_grad_(trains)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


class ConvBlock(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.after = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.after(self.second(F.relu(self.norm(self.first(x))))))


class ConvNet(nn.Module):
    """Images in fp32, less a mean in a buffer, (batch, 3, 16, 16) -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(ConvBlock(32) for _ in range(3))
        self.register_buffer("mean", torch.zeros(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x - self.mean)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).float().logsumexp(1).mean()


def tokens(module: nn.Module, batch: int) -> Any:
    return (torch.randint(1000, (batch, 64)),), {}


def images(module: nn.Module, batch: int) -> Any:
    return (torch.randn(batch, 3, 16, 16),), {}


def _linear(dtype: torch.dtype) -> Callable[[int, int], nn.Module]:
    return partial(nn.Linear, bias=False, dtype=dtype)


def adapted(base: torch.dtype, adapter: torch.dtype) -> nn.Module:
    """Return a model of which only adapters are trained."""
    linear = partial(Adapted, dtypes=(base, adapter))
    model = Net(lambda width: Layer(width, linear, base), base, trains=False)
    for block in model.blocks:
        block.norm.requires_grad_(False)
    return model


def mixed(width: int) -> nn.Module:
    """Return a block of which one layer is in bf16."""
    block = Layer(width, _linear(torch.float32), torch.float32)
    block.down = nn.Linear(4 * width, width, dtype=BF16)
    return block


def plain(dtype: torch.dtype) -> nn.Module:
    """Return a model all of whose layers have one dtype."""
    return Net(lambda width: Layer(width, _linear(dtype), dtype), dtype)


MODELS: dict[str, ModelSource] = {
    "bf16": ModelSource("bf16", lambda: plain(BF16), tokens, 64),
    "fp32": ModelSource("fp32", lambda: plain(torch.float32), tokens, 64),
    "adapted": ModelSource("adapted", lambda: adapted(BF16, torch.float32), tokens, 64),
    "adapted, bf16": ModelSource("adapted, bf16", lambda: adapted(BF16, BF16), tokens, 64),
    "mixed": ModelSource("mixed", lambda: Net(mixed, torch.float32), tokens, 64),
    "convolutions": ModelSource("convolutions", ConvNet, images, 1),
}


@cache
def graph_of(name: str, precision: str, master_weights: str = "") -> ModelGraph:
    """Return what the tracer makes of a model."""
    return trace_model(MODELS[name], precision, "cpu", master_weights=master_weights)


CHAINS = sorted(MODELS.keys() - {"convolutions"})


@pytest.mark.parametrize(
    ("name", "strategy"), some([*product(CHAINS, ("shard", "shard_grad", "group_shard:2", "owner", "replicate"))], 9)
)
def test_a_strategy_holds_what_is_predicted(name: str, strategy: str) -> None:
    number = len(strategy) + CHAINS.index(name)
    combinations = [(number % 2, number // 2 % 2, 1 + number // 4 % 2)]
    if THOROUGH:
        combinations = list(product((0, 1), (0, 1), (1, 2)))
    for is_bf16, has_master, accumulation in combinations:
        graph = graph_of(name, ("fp32", "bf16")[is_bf16], ("", "fp32")[has_master])
        choices, machine = {operator.name: strategy for operator in graph.operators}, cluster(1, 4)
        plan = plan_of(graph, machine, choices, micro_batch=2, accumulation=accumulation)
        assert -0.01 <= compare(plan, MODELS[name], graph, machine).error <= 0.01


@pytest.mark.parametrize(
    ("strategy", "precision"),
    some([*product(("shard", "shard_grad", "group_shard:2", "owner", "replicate"), ("fp32", "bf16"))], 3),
)
def test_convolutions_with_batch_norm_and_a_buffer(strategy: str, precision: str) -> None:
    graph, machine = graph_of("convolutions", precision), cluster(1, 4)
    plan = plan_of(graph, machine, {operator.name: strategy for operator in graph.operators}, micro_batch=2)
    assert -0.01 <= compare(plan, MODELS["convolutions"], graph, machine).error <= 0.01


@pytest.mark.parametrize(
    ("name", "down", "others"),
    [
        ("mixed", "group_shard:2", "group_shard:2"),
        ("mixed", "replicate", "replicate"),
        ("mixed", "group_shard:2+offload", "group_shard:2+offload"),
        ("bf16", "replicate", "group_shard:2"),
        ("bf16", "group_shard:2", "shard"),
    ],
)
def test_a_unit_of_a_block_that_is_all_reduced_has_gradients_beside_its_sums(name: str, down: str, others: str) -> None:
    """Of several micro-batches, as the rest of the block runs back: 1.2 and 1.5 % of the first two were missing."""
    graph, machine = graph_of(name, "fp32"), cluster(2, 2)
    choices = {one.name: down if one.name.endswith("down") else others for one in graph.operators}
    plan = plan_of(graph, machine, choices, micro_batch=2, accumulation=2)
    assert -0.001 <= compare(plan, MODELS[name], graph, machine).error <= 0.01


@pytest.mark.parametrize("down", ["replicate", "group_shard:2", "secondary_shard:2"])
def test_the_gradient_of_a_residual_waits_as_a_unit_in_the_block_is_reduced(down: str) -> None:
    """Up to 0.62 % was missing, one hidden state: the block as a whole has added it to the other by its reduction."""
    graph, machine, offloaded = graph_of("bf16", "bf16"), cluster(2, 2), "replicate+offload"
    choices = {one.name: down if one.name.endswith("down") else offloaded for one in graph.operators}
    choices["embedding"] = "shard+offload"
    found = compare(plan_of(graph, machine, choices, micro_batch=2), MODELS["bf16"], graph, machine)
    assert found.predicted_phase == "reduce of blocks.0.norm"
    assert -0.001 <= found.error <= 0.01


@pytest.mark.parametrize("strategy", ["odc:4", "odc_ordered:4"])
def test_windows_of_a_model_in_bf16(strategy: str) -> None:
    graph, machine = graph_of("bf16", "fp32"), cluster(1, 4)
    plan = plan_of(graph, machine, {operator.name: strategy for operator in graph.operators}, micro_batch=2)
    assert -0.01 <= compare(plan, MODELS["bf16"], graph, machine).error <= 0.03


def test_units_are_cut_by_dtype_and_by_what_mixed_precision_casts() -> None:
    machine = cluster(1, 4)
    shard, copy = Strategy("shard", 4), Strategy("replicate", 1)

    def units(name: str, precision: str, strategy: Strategy, block: str = "blocks.0.") -> list[set[str]]:
        graph = graph_of(name, precision)
        found = units_of(cut(graph), dict.fromkeys(range(len(graph.operators)), (strategy,)))
        named = [{graph.operators[index].name for index in unit.operators} for unit in found]
        return [one for one in named if any(each.startswith(block) for each in one)]

    assert machine.world_size == 4
    # Gradients of one dtype are reduced together; frozen parameters may have any.
    assert units("mixed", "fp32", shard) == [{"blocks.0.norm", "blocks.0.up"}, {"blocks.0.down"}]
    assert len(units("adapted", "fp32", shard)) == 1
    norms, others = ({f"blocks.0.{name}" for name in names} for names in (("norm", "after"), ("first", "second")))
    assert units("convolutions", "bf16", shard) == [others, norms]
    assert units("convolutions", "fp32", shard) == [others | norms]
    # Of copies, what is frozen is apart, as nothing is done to it.
    frozen = {"blocks.0.norm", "blocks.0.up.base", "blocks.0.down.base"}
    trained = {f"blocks.0.{layer}.{name}" for layer in ("up", "down") for name in ("up", "down")}
    assert sorted(map(sorted, units("adapted", "fp32", copy))) == sorted(map(sorted, (frozen, trained)))


def test_a_frozen_backbone_is_not_gathered_where_it_fits() -> None:
    """By hand: 3 blocks of 2 x 256 x 1024 frozen elements and 2 x 8 x 1280 trained ones, and 2 x 1000 x 256 frozen."""
    # On a slow link: on a fast one the latency of two units' collectives can cost more than gathering 1 MiB along.
    machine = cluster(1, 4, intra=1e9)
    backbone_bytes = 2 * (3 * (2 * 256 * 1024 + 2 * 256) + 2 * 1000 * 256)
    request = Request(limit_bytes=int(machine.reserve_bytes) + 64 * 2**20, micro_batch=2)
    roomy = plan_model(MODELS["adapted"], machine, request).plan
    assert {roomy.choices[name] for name in roomy.choices if "base" in name} == {"replicate"}
    assert roomy.predicted.memory_by_category["parameters"] >= backbone_bytes
    assert roomy.predicted.time_by_term["exposed_communication_s"] < 1e-3
    # In fp32 the same model needs as much more.
    full = ModelSource("fp32 base", lambda: adapted(torch.float32, torch.float32), tokens, 64)
    wide = plan_model(full, machine, request).plan
    more = wide.predicted.memory_by_category["parameters"] - roomy.predicted.memory_by_category["parameters"]
    assert more == pytest.approx(backbone_bytes, rel=0.01)
    # Where it does not fit whole, even if all is recomputed, it is sharded.
    least = int(machine.reserve_bytes) + roomy.predicted.tensors_bytes - 7 * 2**19
    tight = plan_model(MODELS["adapted"], machine, Request(limit_bytes=least, micro_batch=2)).plan
    assert any(choice != "replicate" for name, choice in tight.choices.items() if "base" in name)
