"""BERT with groups on four CPU ranks that stand for two nodes, against a plain PyTorch loop."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collected import Collected
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn

from osdp.training.config import load_config
from osdp.training.evaluate import TEST_SAMPLES, held_out_accuracies
from osdp.training.job import prepare
from osdp.training.process_group import Ranks
from osdp.training.rank_main import run_rank
from osdp.training.reporters import Start, Step, Summary
from osdp.training.sentence_pairs import MadeUp, SentencePairs
from osdp.training.tasks import batch
from osdp.zoo import load_model
from profiler.errors import OsdpError

STEPS, BATCH = 4 if THOROUGH else 2, 16
FIXED = {"steps": STEPS, "global_batch": BATCH, "log_every": 1, "timeout_s": 60.0}
Told = tuple[Start, list[Step], Summary]


FEW = 32
"""Pairs that are asked for but in one test, which asks for as many as `osdp train` does."""


def train_here(rank: int, options: dict[str, Any], asked: int = FEW) -> Told | None:
    """Be one rank of a run, which asks for so many pairs at its end; rank 0 returns what it was told."""
    collected = Collected()
    with mock.patch("osdp.training.rank_main.held_out_accuracies", partial(held_out_accuracies, count=asked)):
        run_rank(prepare(load_config("bert", FIXED | options)), collected)
    return (collected.starts[0], collected.steps, collected.summaries[0]) if rank == 0 else None


def train(asked: int, **options: Any) -> Told:
    found: Told = run_ranks(train_here, 4, options, asked, joins=False)[0]
    return found


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """Losses of a loop on one process that knows nothing of OSDP."""
    torch.manual_seed(0)
    model, task, losses = load_model("bert-tiny").build(), SentencePairs(MadeUp(), 32, 0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(STEPS):
        tokens, keywords = batch(task, range(step * BATCH, (step + 1) * BATCH))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (step + 1) / 30  # the configuration's warm-up
        loss = model(torch.from_numpy(tokens), **{name: torch.from_numpy(array) for name, array in keywords.items()})
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("options", "strategy", "parts", "asked"),
    [
        ({"fsdp_args": "group_sharding"}, "group_shard:2", 2, TEST_SAMPLES),
        ({"fsdp_args": "communication_with_groups", "batch": 2}, "hierarchical", 4, FEW),  # two micro-batches a step
        *([({"fsdp_args": "none"}, "shard", 4, TEST_SAMPLES)] if THOROUGH else []),
    ],
)
def test_losses_are_those_of_one_process(
    options: dict[str, Any], strategy: str, parts: int, asked: int, reference: list[float]
) -> None:
    start, steps, summary = train(asked, **options)
    assert [step.loss for step in steps] == pytest.approx(reference, rel=2e-5)
    assert set(start.plan.choices.values()) == {strategy}
    assert (start.plan.cluster.nodes, start.plan.cluster.gpus_per_node) == (2, 2)
    assert summary.memory is not None
    # Parameters, gradients and two moments in fp32, a part of each; micro-batches of a few samples add little.
    states_bytes = 16 * 183_878 / parts
    assert states_bytes < summary.memory.peak_bytes < states_bytes + 2.5e6
    predicted = summary.plan.predicted
    tensors_bytes = predicted.peak_memory_bytes - predicted.memory_by_category["reserve"]
    assert summary.memory.peak_bytes == pytest.approx(tensors_bytes, rel=0.1)
    assert [(accuracy.what, accuracy.total) for accuracy in summary.accuracies] == [
        ("masked tokens", 4 * asked),
        ("next sentences", asked),
    ]


def test_text_is_learned_too(tmp_path: Path) -> None:
    """Of 40 documents 4 are held out."""
    text = tmp_path / "text"
    text.write_text("\n\n".join(f"this is document {n}\nand this its end" for n in range(40)))
    options = {"data": str(text), "steps": 2, "batch": 8, "emulated_nodes": 1}
    _, steps, summary = run_ranks(train_here, 2, options, joins=False)[0]
    assert len(steps) == 2
    assert [accuracy.what for accuracy in summary.accuracies] == ["masked tokens", "next sentences"]


class Oracle(nn.Module):
    """Knows the made-up corpus: the topics of both sentences by the words that are seen, a word by its place."""

    def __init__(self, lies: bool) -> None:
        super().__init__()
        self.lies = lies

    @property
    def module(self) -> nn.Module:
        return self

    def forward(self, tokens: Tensor, token_type_ids: Tensor, both_heads: bool) -> tuple[Tensor, Tensor]:
        topics = torch.where(tokens >= 4, (tokens - 4) // 16, -1)
        of_segment = [self._commonest(topics, token_type_ids == segment) for segment in (0, 1)]
        places = torch.arange(tokens.shape[1]) - 1 - token_type_ids
        topic = torch.where(token_type_ids == 0, of_segment[0][:, None], of_segment[1][:, None])
        words = 4 + 16 * topic + places % 16 + int(self.lies)
        is_random = (of_segment[0] != of_segment[1]) ^ self.lies
        return nn.functional.one_hot(words, 133), nn.functional.one_hot(is_random.long(), 2)

    def _commonest(self, topics: Tensor, here: Tensor) -> Tensor:
        counts = [((topics == topic) & here).sum(1) for topic in range(8)]
        return torch.stack(counts).argmax(0)


def ask_oracles(rank: int) -> list[list[tuple[int, int]]]:
    """Return (right, total) of both accuracies, of one that is always right and one that never is."""
    ranks, task = Ranks(rank, 3, torch.device("cpu")), SentencePairs(MadeUp(), 32, 0)
    return [
        [(found.right, found.total) for found in held_out_accuracies(Oracle(lies), task, ranks, 7, 30)]  # type: ignore[arg-type]
        for lies in (False, True)
    ]


def test_accuracies_of_an_oracle() -> None:
    """30 pairs over 3 ranks with batches of 7 and 3, four masked tokens in each."""
    assert run_ranks(ask_oracles, 3) == [[[(120, 120), (30, 30)], [(0, 120), (0, 30)]]] * 3


def on_one_node(rank: int) -> Told | None:
    """Train where there are no groups; rank 0, which plans, warns."""
    with pytest.warns(UserWarning, match="no effect on one node") if rank == 0 else nullcontext():
        return train_here(rank, {"emulated_nodes": 1, "steps": 1})


def test_groups_on_one_node_are_told_to_have_no_effect() -> None:
    start, _, _ = run_ranks(on_one_node, 2, joins=False)[0]
    assert set(start.plan.choices.values()) == {"shard"}


def uneven(rank: int) -> None:
    with pytest.raises(OsdpError, match="do not divide evenly into the emulated nodes"):
        train_here(rank, {"emulated_nodes": 2, "fsdp_args": "none"})


def test_ranks_that_do_not_divide_are_refused() -> None:
    run_ranks(uneven, 3, joins=False)
