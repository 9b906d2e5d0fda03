"""What `torch.autocast` keeps: the note of a plan, and a bound that a dry run keeps to."""

from __future__ import annotations

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn

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


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_plan_says_that_the_model_asks_for_autocast(device_type: str) -> None:
    """On a machine without GPUs too, for which a plan is made."""
    notes = trace_model(source_of(device_type), device_type=device_type).notes
    assert [note for note in notes if "torch.autocast" in note and "1.5 MiB" in note]  # of 798,208 elements
    other = "cpu" if device_type == "cuda" else "cuda"
    for source in (source_of(device_type, enabled=False), source_of(other)):
        assert not any("torch.autocast" in note for note in trace_model(source, device_type=device_type).notes)


@pytest.mark.parametrize(
    ("strategy", "recomputed"),
    [("shard", ()), ("shard", ("blocks.0", "blocks.1", "blocks.2", "blocks.3")), ("owner", ())],
)
def test_no_more_is_kept_than_is_said(strategy: str, recomputed: tuple[str, ...]) -> None:
    source, machine = source_of("cpu"), cluster(2, 2)
    graph = trace_model(source)
    plan = plan_of(graph, machine, {one.name: strategy for one in graph.operators}, recomputed, micro_batch=1)
    found = compare(plan, source, graph, machine, with_data=True)
    schedule = compile_plan(plan, graph, machine)
    copies_bytes = bytes_of_copies(source.build(), schedule, torch.bfloat16)
    kept = 6 - max(0, len(recomputed) - 1)
    assert copies_bytes == kept * 2 * 2 * 4 * WIDTH * WIDTH
    more = sum(found.tracked.values()) - sum(found.predicted.values())
    assert more <= copies_bytes
    if strategy == "shard" and not recomputed:  # others hold most while no copies are there
        assert more > 0.5 * copies_bytes


def test_what_computes_in_the_dtype_of_autocast_is_not_copied() -> None:
    source, machine = source_of("cpu", enabled=False), cluster(2, 2)
    graph = trace_model(source, "bf16")
    plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, micro_batch=1)
    schedule = compile_plan(plan, graph, machine)
    found = [bytes_of_copies(source.build(), schedule, dtype) for dtype in (torch.bfloat16, torch.float16)]
    assert found == [0, 6 * 2 * 2 * 4 * WIDTH * WIDTH]


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_contexts_that_are_made_in_any_way_are_traced() -> None:
    """By keywords, as PyTorch's own checkpoints make them, and in the forward."""

    class Inside(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16), torch.amp.autocast("cpu", enabled=False):
                return super().forward(tokens)

    def inputs(_: nn.Module, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        return (torch.randint(50, (batch, 8)),), {}

    graph = trace_model(ModelSource("inside", lambda: Inside("cpu", enabled=False), inputs, 8))
    assert any("torch.autocast" in note for note in graph.notes)
