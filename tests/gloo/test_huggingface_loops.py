"""The Trainer of transformers, and accelerate's loop, on sharded models: as the same training by hand in a process."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from examples_path import EXAMPLES
from ranks import run_ranks
from torch import Tensor, nn

RANKS, STEPS, MAX_NORM = 2, 10, 0.5
MIXED = {
    "transformers_trainer": ("*=shard", "model.layers.0=replicate", "model.layers.1=recompute", "lm_head=owner"),
    "accelerate_loop": ("*=shard", "blocks.0=replicate", "blocks.1=recompute", "head=owner"),
}
"""Plans by example: what is resumed at step 5 is sharded throughout."""


def forget_accelerate() -> None:
    """Let the next script begin as the first of its process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(example: str, *options: str) -> dict[str, Any]:
    """Run an example as it stands on this rank; return its names. The process group outlives it."""
    forget_accelerate()
    path = str(EXAMPLES / "integrations" / f"{example}.py")
    arguments = mock.patch.object(sys, "argv", [path, *options])
    with arguments, mock.patch.object(dist, "destroy_process_group"), contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(path, run_name="__main__")


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, lr: float) -> tuple[float, float]:
    """Step by the gradient of a loss, clipped; return the loss and the norm before."""
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def next_token_loss(model: Any, picked: list[dict[str, Tensor]], smoothing: float = 0.0) -> Tensor:
    """Return the mean over all tokens that are to be learnt."""
    tokens, labels = (torch.stack([one[name] for one in picked]) for name in ("input_ids", "labels"))
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=smoothing)


def decoder_by_hand(build: Callable[[], nn.Module], samples: Callable[[int], Any]) -> dict[str, Any]:
    """Train the decoder of the Trainer's example: 8 samples a step, of 32 in turn."""
    model, data, held_out = build(), samples(32), samples(8)
    decayed = [one for name, one in model.named_parameters() if "norm" not in name]
    others = [one for name, one in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, told, evaluated = torch.optim.AdamW(groups), [], {}
    for step in range(STEPS):
        loss = next_token_loss(model, [data[(8 * step + index) % 32] for index in range(8)])
        told.append(stepped(model, optimizer, loss, 1e-2 * (1 - step / STEPS)))
        if step in (4, 9):
            with torch.no_grad():
                parts = [next_token_loss(model, held_out[start : start + 4]) for start in (0, 4)]
            evaluated[step + 1] = torch.stack(parts).mean().item()
    return {"told": told, "evaluated": evaluated, "parameters": model.state_dict()}


def adder_by_hand(build: Callable[[], nn.Module], samples: Callable[[int, int], Any]) -> dict[str, Any]:
    """Train the network of accelerate's example: 8 new samples a step; its schedule counts each rank's steps."""
    model, data = build(), samples(8 * STEPS, 1)
    optimizer, told, evaluated = torch.optim.AdamW(model.parameters()), [], {}

    def mean_loss(picked: list[dict[str, Tensor]]) -> Tensor:
        digits, labels = (torch.stack([one[name] for one in picked]) for name in ("digits", "labels"))
        return nn.functional.cross_entropy(model(digits, labels)["logits"], labels)

    for step in range(STEPS):
        lr = 2e-2 / (1 + 0.1 * RANKS * step)
        told.append(stepped(model, optimizer, mean_loss(data[8 * step : 8 * step + 8]), lr))
        if step in (4, 9):
            with torch.no_grad():
                evaluated[step + 1] = mean_loss(samples(8, 2)).item()
    return {"told": told, "evaluated": evaluated, "parameters": model.state_dict()}


def trained(rank: int, example: str, folder: Path) -> dict[str, Any]:
    """Run an example, and again from its state at step 5; return what both tell, and what one process does."""
    output = ("--output", str(folder / example))
    whole = run(example, *output, "--pins", *MIXED[example])
    is_trainer = example == "transformers_trainer"
    checkpoint = str(folder / example / "checkpoint-5") if is_trainer else "5"
    resumed = run(example, *output, "--pins", "*=shard", "--resume", checkpoint, "--seed", "3")
    found: dict[str, Any] = {}
    for name, names in (("whole", whole), ("resumed", resumed)):
        parameters = names["model"].full_state_dict()
        if is_trainer:
            log = names["trainer"].state.log_history
            told = [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]
            evaluated = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
        else:
            told, evaluated = list(zip(names["losses"], names["norms"], strict=True)), names["evaluated"]
        found[name] = {"told": told, "evaluated": evaluated, "parameters": parameters}
    found["choices"], found["recomputed"] = whole["model"].plan.choices, whole["model"].plan.recomputed_blocks
    if rank == 0:
        by_hand = decoder_by_hand if is_trainer else adder_by_hand
        whole["options"].seed = 0
        found["by_hand"] = by_hand(whole["build"], whole["samples"])
    return found


def loops(rank: int, folder: Path) -> dict[str, Any]:
    """Return what all of the following tests look at: a rank imports transformers once, and has one process group."""
    return {example: trained(rank, example, folder) for example in MIXED}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found: list[dict[str, Any]] = run_ranks(loops, RANKS, tmp_path_factory.mktemp("loops"), joins=False)
    return found


@pytest.mark.parametrize("example", MIXED)
def test_a_loop_trains_as_one_process_does_and_resumes_under_another_plan(
    example: str, told: list[dict[str, Any]]
) -> None:
    found = told[0][example]
    assert set(found["choices"].values()) == {"shard", "replicate", "owner"}
    assert len(found["recomputed"]) == 1
    wanted = found["by_hand"]
    assert len(found["whole"]["told"]) == STEPS
    assert found["whole"]["evaluated"] == pytest.approx(wanted["evaluated"], abs=2e-5)
    assert max(norm for _, norm in wanted["told"]) > MAX_NORM, "it clips"
    for name, steps in (("whole", STEPS), ("resumed", 5)):
        torch.testing.assert_close(found[name]["told"][-steps:], wanted["told"][-steps:], rtol=2e-5, atol=2e-5)
        assert found[name]["evaluated"][STEPS] == pytest.approx(wanted["evaluated"][STEPS], abs=2e-5)
        torch.testing.assert_close(found[name]["parameters"], dict(wanted["parameters"]), rtol=1e-4, atol=2e-5)
