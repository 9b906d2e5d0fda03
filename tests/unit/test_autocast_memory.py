"""What `torch.autocast` keeps: as plans predict it of models that ask for it, and a bound where loops do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from random import Random

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from runtime.autocast_weights import bytes_of_copies
from runtime.compile_plan import compile_plan

WIDTH = 128


class Block(nn.Module):
    """A residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8, WIDTH) -> the same."""
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """An embedding, which autocast does not cast, and six blocks, under autocast for a kind of device or not."""

    def __init__(self, device_type: str, enabled: bool = True) -> None:
        super().__init__()
        self.context = torch.autocast(device_type=device_type, dtype=torch.bfloat16, enabled=enabled)
        self.table, self.blocks = nn.Embedding(50, WIDTH), nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, 8) -> a loss."""
        with self.context:
            x = self.blocks(self.table(tokens))
        return x.float().pow(2).mean()


def source_of(device_type: str, enabled: bool = True) -> ModelSource:
    def inputs(_: nn.Module, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        return (torch.randint(50, (batch, 8)),), {}

    return ModelSource("model", lambda: Model(device_type, enabled), inputs, 8)


def test_no_more_is_kept_than_is_said() -> None:
    """Where a loop asks for autocast, of which a plan knows nothing."""
    source, machine = source_of("cpu"), cluster(2, 2)
    without = trace_model(source_of("cpu", enabled=False))
    for recomputed in ((), ("blocks.0", "blocks.1", "blocks.2", "blocks.3")):
        plan = plan_of(without, machine, {one.name: "shard" for one in without.operators}, recomputed, micro_batch=1)
        found = compare(plan, source, without, machine, with_data=True)
        copies_bytes = bytes_of_copies(source.build(), compile_plan(plan, without, machine), torch.bfloat16)
        kept = 6 - max(0, len(recomputed) - 1)
        assert copies_bytes == kept * 2 * 2 * 4 * WIDTH * WIDTH
        more = sum(found.tracked.values()) - sum(found.predicted.values())
        assert more <= copies_bytes
        if not recomputed:
            assert more > 0.5 * copies_bytes


class Attention(nn.Module):
    """Attention by hand, its softmax in fp32 without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        with torch.autocast(x.device.type, enabled=False):
            weights = torch.softmax(query.float() @ key.float().transpose(1, 2), -1)
        y: Tensor = x + self.out(weights.to(value.dtype) @ value)
        return y


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1), nn.BatchNorm1d(2 * WIDTH)
        self.down = nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.norm(self.up(x.transpose(1, 2))))).transpose(1, 2)
        return y


class Inside(Block):
    """Enters autocast itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x)


class Checkpointed(Block):
    """Runs a part again itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.first, super().forward(x), use_reentrant=False)
        return y


class Twice(nn.Module):
    """Runs one layer twice, which has one copy if its block is one unit and two if it is one itself."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.back(torch.relu(self.out(self.twice(torch.tanh(self.twice(x))))))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.out(self.recurrent(x)[0])
        return y


KINDS = (Block, Attention, Convolution, Inside, Checkpointed, Twice, Recurrent)
STRATEGIES = ("shard", "shard_grad", "hierarchical", "replicate", "owner", "odc:2", "group_shard:2")


class Drawn(nn.Module):
    """Blocks of a kind, with autocast around all, around what is before the loss, in every other block, or not."""

    def __init__(self, kind: Callable[[], nn.Module], where: str, dtype: torch.dtype, is_tied: bool) -> None:
        super().__init__()
        self.where, self.dtype = where, dtype
        self.table, self.blocks = nn.Embedding(50, WIDTH), nn.ModuleList(kind() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, 8) -> a loss."""
        kind = tokens.device.type
        if self.where == "plain":
            found = self.head(self.norm(nn.Sequential(*self.blocks)(self.table(tokens))))
            return cross_entropy(found.flatten(0, 1), tokens.flatten())
        with torch.autocast(kind, self.dtype):
            x = self.table(tokens)
            for number, block in enumerate(self.blocks):
                with torch.autocast(kind, self.dtype, enabled=self.where != "half" or number % 2 == 0):
                    x = block(x.float())
            found = self.head(self.norm(x))
            if self.where == "all":
                return cross_entropy(found.flatten(0, 1), tokens.flatten())
        return cross_entropy(found.float().flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("seed", range(len(KINDS) + 3))
def test_what_is_predicted_of_models_that_ask_for_it_is_held(seed: int) -> None:
    """On the CPU against its own autocast, and with that of GPUs in a dry run of their kernels."""
    drawn = Random(seed)
    kind, is_tied, where = KINDS[seed % len(KINDS)], drawn.random() < 0.3, drawn.choice(("all", "body", "half"))
    dtype = torch.bfloat16 if kind in (Recurrent, Convolution) else drawn.choice((torch.bfloat16, torch.float16))
    precision = drawn.choice(("fp32", "amp-bf16" if dtype == torch.bfloat16 else "amp-fp16"))
    if precision != "fp32":
        where = "plain"

    def inputs(_: nn.Module, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        return (torch.randint(50, (batch, 8)),), {}

    source = ModelSource("drawn", lambda: Drawn(kind, where, dtype, is_tied), inputs, 8)
    device_type = drawn.choice(("cpu", "cpu", "cuda"))
    graph, machine = trace_model(source, precision, device_type), cluster(2, 2)
    assert graph.autocast == graph.matmul_precision == ("bf16" if dtype == torch.bfloat16 else "fp16")
    plain = drawn.choice(STRATEGIES)
    mixed = [drawn.choice(("shard", "shard_grad", "replicate")) for _ in graph.operators]
    choices = mixed if drawn.random() < 0.3 else [plain] * len(mixed)
    names = [block.name for block in graph.blocks]
    plan = plan_of(
        graph,
        machine,
        dict(zip([one.name for one in graph.operators], choices, strict=True)),
        drawn.choice(((), names[:1], names[1:], names)),
        micro_batch=drawn.choice((1, 4)),
        accumulation=drawn.choice((1, 2)),
    )
    found = compare(plan, source, graph, machine, with_data=device_type == "cpu", device_type=device_type)
    assert -0.01 <= found.error <= (0.12 if kind is Twice else 0.05 if kind is Recurrent else 0.03), plan


def test_an_own_context_of_another_device_does_nothing() -> None:
    """Nor does one that is off."""
    plain = trace_model(source_of("cpu", enabled=False))
    with pytest.warns(UserWarning, match="autocast") if not torch.cuda.is_available() else nullcontext():
        graph = trace_model(source_of("cuda"))
    assert graph.autocast == plain.autocast == ""
    assert (graph.calls, graph.blocks) == (plain.calls, plain.blocks)


def test_what_computes_in_the_dtype_of_autocast_is_not_copied() -> None:
    source, machine = source_of("cpu", enabled=False), cluster(2, 2)
    graph = trace_model(source, "bf16")
    plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, micro_batch=1)
    schedule = compile_plan(plan, graph, machine)
    found = [bytes_of_copies(source.build(), schedule, dtype) for dtype in (torch.bfloat16, torch.float16)]
    assert found == [0, 6 * 2 * 2 * 4 * WIDTH * WIDTH]


def test_contexts_that_are_made_in_any_way_are_traced() -> None:
    """By keywords, as PyTorch's own checkpoints make them, and in the forward."""

    class Around(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16), torch.amp.autocast("cpu", enabled=True):
                return super().forward(tokens)

    def inputs(_: nn.Module, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        return (torch.randint(50, (batch, 8)),), {}

    around = trace_model(ModelSource("model", lambda: Around("cpu"), inputs, 8))
    once = trace_model(source_of("cpu"))
    assert [call.saved_bytes for call in around.calls] == [call.saved_bytes for call in once.calls]
    assert around.autocast == "bf16"
