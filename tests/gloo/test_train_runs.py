"""Training runs on CPU ranks, against a plain PyTorch loop: losses, resuming, and what is measured."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collected import Collected
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import nn

from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2
from osdp.training.config import TrainConfig, load_config
from osdp.training.evaluate import TEST_SAMPLES, held_out_accuracies
from osdp.training.job import prepare
from osdp.training.rank_main import run_rank
from osdp.training.tasks import Addition, batch
from osdp.zoo import load_model

STEPS = 6
BATCH = 8
FEW = 16
"""Sums that are asked for where nobody looks at how many are right; all of `osdp train` are in one test."""


SMALL = GPT2Config(vocabulary_size=16, maximum_positions=32, hidden_size=32, layers=1, heads=2)
"""Of a model where nothing depends on which one it is; some are of the zoo's."""


def small() -> nn.Module:
    return GPT2(SMALL)


def with_dropout() -> nn.Module:
    return GPT2(dataclasses.replace(SMALL, dropout=0.3))


def in_bf16() -> nn.Module:
    """Return a model as a checkpoint in bf16 gives it."""
    return small().bfloat16()


def train_here(rank: int, config: TrainConfig, asked: int = FEW) -> Collected:
    """Be one rank of a run, which asks for so many sums at its end."""
    collected = Collected()
    with mock.patch("osdp.training.rank_main.held_out_accuracies", partial(held_out_accuracies, count=asked)):
        run_rank(prepare(config), collected)
    return collected


def train(ranks: int, asked: int = FEW, **options: Any) -> Collected:
    """Train on so many ranks and return what rank 0 was told."""
    fixed = {
        "model": "test_train_runs:small",
        "steps": STEPS,
        "global_batch": BATCH,
        "log_every": 1,
        "device": "cpu",
        "timeout_s": 30.0,
    }
    config = load_config("gpt2", fixed | options)
    found: Collected = run_ranks(train_here, ranks, config, asked, joins=False)[0]
    return found


@cache
def by_default() -> Collected:
    """Train as the configuration says."""
    return train(2, model="gpt2-tiny")


def losses(collected: Collected) -> dict[int, float]:
    return {step.number: step.loss for step in collected.steps}


@cache
def reference(model: str = "small") -> dict[int, float]:
    """Losses of a loop on one process that knows nothing of OSDP."""
    torch.manual_seed(0)
    return trained(small() if model == "small" else load_model(model).build())


def trained(model: nn.Module) -> dict[int, float]:
    """Return the losses of a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    task, found = Addition(2, 7, 0), {}
    for step in range(STEPS):
        tokens, keywords = batch(task, range(step * BATCH, (step + 1) * BATCH))
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (step + 1) / 50  # the configuration's warm-up
        loss = model(torch.from_numpy(tokens), labels=torch.from_numpy(keywords["labels"]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found[step + 1] = loss.item()
    return found


@pytest.mark.parametrize("options", [{}, *([{"fsdp_type": "FSDP", "batch": 4}] if THOROUGH else [])])
def test_a_bf16_model_is_trained_in_fp32(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    alone = trained(in_bf16().float())
    collected = train(2, model="test_train_runs:in_bf16", master_weights="fp32", **options)
    assert losses(collected) == pytest.approx(alone, rel=2e-5)
    assert collected.starts[0].plan.model.master_weights == "fp32"


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (4 if THOROUGH else 2, {"fsdp_type": "FSDP"}),
        (2, {"batch": 2}),  # two micro-batches a step
        (2, {"batch": 2, "fsdp_type": "DDP"}),  # with one: test_what_is_measured
    ],
)
def test_losses_are_those_of_one_process(ranks: int, options: dict[str, Any]) -> None:
    collected = train(ranks, **options) if options else by_default()
    assert losses(collected) == pytest.approx(reference("small" if options else "gpt2-tiny"), rel=2e-5)
    plan = collected.starts[0].plan
    assert ranks * plan.micro_batch * plan.accumulation == BATCH
    if options.get("fsdp_type"):
        assert set(plan.choices.values()) == {{"FSDP": "shard", "DDP": "replicate"}[options["fsdp_type"]]}


def test_a_resumed_run_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Bit for bit, dropout included."""
    given: dict[str, Any] = {"model": "test_train_runs:with_dropout"}
    folder = str(tmp_path / "checkpoints")
    whole = train(2, **given, checkpoint=folder, checkpoint_every=2, checkpoint_keep=9, checkpoint_async=True)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step-000002", "step-000004", "step-000006"]
    resumed = train(2, **given, resume=f"{folder}/step-000004")
    assert resumed.starts[0].first_step == 4
    assert losses(resumed) == {number: loss for number, loss in losses(whole).items() if number > 4}


def test_checkpoints_serve_other_ranks_and_old_ones_go(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    train(2, checkpoint=folder, checkpoint_every=1, checkpoint_keep=2, steps=4)
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step-000003", "step-000004"]
    elsewhere = train(1, resume=f"{folder}/step-000003", fsdp_type="DDP")
    assert losses(elsewhere) == pytest.approx({n: loss for n, loss in reference().items() if n > 3}, rel=2e-5)
    finished = train(2, checkpoint=folder, steps=4)
    assert finished.steps == []
    assert (finished.summaries[0].steps, finished.summaries[0].memory) == (0, None)
    with pytest.raises(AssertionError, match="is of a run with other data"):
        train(2, checkpoint=folder, seed=1)


def test_what_is_measured(tmp_path: Path) -> None:
    collected = train(2, TEST_SAMPLES, model="gpt2-tiny", fsdp_type="DDP", tensorboard=str(tmp_path))
    assert losses(collected) == pytest.approx(reference("gpt2-tiny"), rel=2e-5)
    plan = collected.starts[0].plan
    assert (set(plan.choices.values()), 2 * plan.micro_batch * plan.accumulation) == ({"replicate"}, BATCH)
    (summary,) = collected.summaries
    assert summary.timed_steps == STEPS - 2
    assert summary.samples_per_s == pytest.approx(BATCH / summary.step_s)
    (accuracy,) = summary.accuracies
    assert (accuracy.what, accuracy.total) == ("sums", 256)
    assert summary.memory is not None
    # Parameters, gradients and two moments of every parameter at least, in fp32, and little more at this size.
    assert 4 * 4 * 241_024 < summary.memory.peak_bytes < 1.5 * 4 * 4 * 241_024
    predicted = summary.plan.predicted
    tensors_bytes = predicted.peak_memory_bytes - predicted.memory_by_category["reserve"]
    assert summary.memory.peak_bytes == pytest.approx(tensors_bytes, rel=0.1)


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(AssertionError, match=r"the loss of step [2-6] is not finite on ranks 0, 1"):
        train(2, optimizer="sgd", lr=1e30, clip=1e30)


def test_baselines_take_the_micro_batch_of_the_plan_and_say_if_they_do_not_fit() -> None:
    """4.0 bytes x 4 x 241,024 = 3.7 MiB of states do not go into 254 MiB beside 251 MiB of reserve."""
    fixed = {"global_batch": 64, "steps": 1}
    config = dataclasses.replace(load_config("gpt2", {}), mem="254MB", device="cpu", **fixed)  # type: ignore[arg-type]
    planned, replicated = (
        run_ranks(train_here, 2, dataclasses.replace(config, fsdp_type=kind), joins=False)[0].starts[0]
        for kind in ("OSDP", "DDP")
    )
    assert planned.fits
    assert not replicated.fits
    assert replicated.plan.micro_batch == planned.plan.micro_batch < 64 // 2


def test_looking_into_steps_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is optional and not installed")
    seen, plain = train(2, model="gpt2-tiny", trace=str(tmp_path / "traces")), by_default()
    assert losses(seen) == losses(plain)
    names = {
        f"{name}-rank{rank}.{suffix}" for rank in (0, 1) for name, suffix in (("memory", "png"), ("trace", "json"))
    }
    assert {path.name for path in (tmp_path / "traces").iterdir()} == names
    # Steps 3 and 4 were slower, and so were not timed: of 6, those and two to warm up are left out.
    assert [run.summaries[0].timed_steps for run in (seen, plain)] == [STEPS - 4, STEPS - 2]
