"""Gradients that are infinite or not numbers never reach the weights, nor a checkpoint."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collected import Collected
from ranks import run_ranks
from torch import Tensor, nn

from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2
from osdp.training.config import load_config
from osdp.training.evaluate import held_out_accuracies
from osdp.training.finite import NonFinite
from osdp.training.job import prepare
from osdp.training.loop import Trainer
from osdp.training.rank_main import run_rank
from osdp.training.reporters import Skipped
from profiler.errors import OsdpError
from runtime.state.checkpoint_files import latest, whole_steps

BAD = {3: 1, 5: 0}
"""Step, and the rank in whose backward a gradient turns into NaN, though its loss is finite."""
number = 0
"""Of the step that is run."""
FEW_ASKED = mock.patch("osdp.training.rank_main.held_out_accuracies", partial(held_out_accuracies, count=8))
"""Asks for few sums at the end of a run, as nobody looks at how many are right."""


class Spoil(torch.autograd.Function):
    """The identity, whose backward gives NaN when told so."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rank = torch.distributed.get_rank()
        return gradients[0] * float("nan") if BAD.get(number) == rank else gradients[0]


SIZES = GPT2Config(vocabulary_size=16, maximum_positions=32, hidden_size=32, layers=1, heads=2)


def small() -> nn.Module:
    """Return a model of a family of the zoo."""
    return GPT2(SIZES)


class Spoiled(nn.Module):
    """Such a model whose loss is spoiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    @property
    def config(self) -> Any:
        return self.inner.config

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        output = self.inner(tokens, labels=labels)
        return output if labels is None else Spoil.apply(output)

    def example_inputs(self, batch: int, sequence_length: int = 8) -> Any:
        return self.inner.example_inputs(batch, sequence_length)


def run(rank: int, options: dict[str, Any], clip: float | None = 1.0) -> tuple[str, list[int], list[int], int]:
    """Train; return what was raised, which steps were skipped and reported, and how many the summary says."""
    step = Trainer._step

    def counted(self: Trainer, rate: float) -> Any:
        global number
        number = self.position.step + 1
        return step(self, rate)

    Trainer._step = counted  # type: ignore[method-assign]
    collected, skipped = Collected(), []

    class Noting:
        def report(self, event: Any) -> None:
            if isinstance(event, Skipped):
                skipped.append(event.number)

    fixed = {"steps": 6, "device": "cpu", "timeout_s": 30.0, "log_every": 1, "global_batch": 8, "batch": 4}
    fixed["model"] = "test_finite_gradients:Spoiled"
    told = ""
    try:
        with FEW_ASKED:
            config = dataclasses.replace(load_config("gpt2", fixed | options), clip=clip)
            run_rank(prepare(config), collected, Noting())
    except OsdpError as error:
        told = str(error)
    last = collected.summaries[-1].skipped if collected.summaries else -1
    return told, skipped, [one.number for one in collected.steps], last


@pytest.mark.parametrize(("clip", "sharding"), [(None, "FSDP"), (1.0, "DDP")])
def test_a_run_stops_before_the_optimizer(clip: float | None, sharding: str, tmp_path: Path) -> None:
    """At the step in which the gradient arises, on all ranks; what is saved is finite."""
    options = {"checkpoint": str(tmp_path), "checkpoint_every": 1, "fsdp_type": sharding}
    for told, skipped, steps, _ in run_ranks(run, 2, options, clip, joins=False):
        assert told.startswith("the gradients of step 3 are not finite\n")
        assert skipped == []
        assert steps in ([1, 2], [])
    assert latest(tmp_path) == tmp_path / "step-000002"


def test_steps_are_left_out_and_counted() -> None:
    told, skipped, steps, in_all = run_ranks(run, 2, {"on_nonfinite": "skip"}, joins=False)[0]
    assert (told, skipped, steps, in_all) == ("", [3, 5], [1, 2, 3, 4, 5, 6], 2)


def test_too_many_in_a_row_stop_the_run() -> None:
    left_out = NonFinite(skips=True, most_in_a_row=3)
    found = [left_out.leaves_out(is_finite, step) for step, is_finite in enumerate([False, False, True, False, False])]
    assert (found, left_out.skipped) == ([True, True, False, True, True], 4)
    with pytest.raises(OsdpError, match=r"step 9 are not finite\n  got: 3 such steps in a row"):
        left_out.leaves_out(False, 9)


def resume(rank: int, folder: str, resumes: bool) -> tuple[int, str]:
    """Save a step and one whose weights overflow, or resume; return the first step and what was raised."""
    fixed = {"steps": 2, "device": "cpu", "timeout_s": 30.0, "checkpoint": folder, "checkpoint_every": 1}
    model = {"model": "test_finite_gradients:small", "fsdp_type": "FSDP", "global_batch": 8, "batch": 4}
    config = load_config("gpt2", model | fixed)
    if not resumes:
        check = Trainer.is_finite
        Trainer.is_finite = lambda self: True  # type: ignore[method-assign]  # as before there was such a check
        step = Trainer._step

        def overflow(self: Trainer, rate: float) -> Any:
            found = step(self, rate)
            if self.position.step == 1:
                with torch.no_grad():
                    next(iter(self.model.parameters())).mul_(float("inf"))
            return found

        Trainer._step = overflow  # type: ignore[method-assign]
        with FEW_ASKED:
            run_rank(prepare(config), Collected())
        Trainer._step, Trainer.is_finite = step, check  # type: ignore[method-assign]
        return 0, ""
    collected, told = Collected(), ""
    try:
        with FEW_ASKED:
            run_rank(prepare(dataclasses.replace(config, steps=3)), collected)
    except OsdpError as error:
        told = str(error)
    return collected.starts[0].first_step if collected.starts else -1, told


def test_the_newest_finite_checkpoint_is_taken(tmp_path: Path) -> None:
    run_ranks(resume, 2, str(tmp_path), False, joins=False)
    assert [path.name for path in whole_steps(tmp_path)] == ["step-000002", "step-000001"]
    first, told = run_ranks(resume, 2, str(tmp_path), True, joins=False)[0]
    assert (first, told) == (1, "")
