"""The programs of examples/tiny: one loss curve for all, each under its own strategy; and modules of the user's own."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from thoroughness import THOROUGH, some
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny"
RANKS = 2
STEPS, FEWER = 4, 4 if THOROUGH else 2
"""Those that the page shows, and those of programs with options: the second follows an update."""
FLAGS = ((), ("--half",), ("--recompute",))
STRATEGY = {"ddp": {"replicate"}, "fsdp": {"shard"}, "zero3": {"owner@0", "owner@1"}}
"""What every part of the model takes, by program."""
EVEN = ("--evenness-priority", "1")

Job = tuple[str, tuple[str, ...]]
"""A program and its options."""
BOTH = ("--half", "--recompute")
HALVED = some(list(STRATEGY), 3, 1)
"""Programs that are run with both: all of them hand both on by one function."""
JOBS: tuple[Job, ...] = (
    *((program, ()) for program in STRATEGY),
    *((program, BOTH) for program in HALVED),
    ("zero3", EVEN),
)


Single = dict[tuple[str, ...], list[float]]
"""Losses of the program for one device, by its options."""
Several = dict[Job, list[dict[str, Any]]]
"""What every rank tells of the other programs."""


def run(rank: int, program: str, options: Sequence[str], steps: int = STEPS) -> dict[str, Any]:
    """Run a program as it stands on this rank; return what it prints and what its plan says."""
    sys.argv = [f"{program}.py", "--json", "--steps", str(steps), *options]
    sys.path.insert(0, str(TINY))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model = runpy.run_path(str(TINY / f"{program}.py"), run_name="__main__")["model"]
    told: dict[str, Any] = json.loads(printed.getvalue()) if rank == 0 else {}
    if program != "single":
        told["choices"], told["recomputed"] = model.plan.choices, model.plan.recomputed_blocks
        told["precision"] = model.plan.model.precision
        told["owned"] = sum(p.to_local().numel() for p in model.parameters() if hasattr(p, "to_local"))
    return told


@pytest.fixture(scope="module")
def single() -> Single:
    """Train on one device under each flag."""
    losses = {flags: run_ranks(run, 1, "single", flags, joins=False)[0]["losses"] for flags in FLAGS}
    for each in losses.values():
        assert len(each) == STEPS
        assert each[-1] < each[0] - 0.5, "it learns"
    return losses


@pytest.fixture(scope="module")
def several() -> Several:
    """Train on ranks, each program, and some under each flag: all of them with --thorough."""
    return {job: run_ranks(run, RANKS, *job, FEWER if job[1] else STEPS, joins=False) for job in JOBS}


@pytest.mark.parametrize("program", STRATEGY)
def test_all_have_the_curve_of_one_device(program: str, single: Single, several: Several) -> None:
    told = several[program, ()][0]
    assert (told["program"], told["ranks"]) == (program, RANKS)
    assert told["losses"] == pytest.approx(single[()], abs=2e-5)
    assert set(told["choices"].values()) == STRATEGY[program]
    assert (told["precision"], told["recomputed"]) == ("fp32", [])


@pytest.mark.parametrize("program", HALVED)
def test_half_computes_in_bf16_and_recompute_changes_no_loss(program: str, single: Single, several: Several) -> None:
    told = several[program, BOTH][0]
    assert told["precision"] == "bf16"
    assert told["recomputed"] == [f"blocks.{index}" for index in range(4)]
    # Three digits are what 8 bits of mantissa leave of a loss of 6; autocast rounds elsewhere than FSDP2 does.
    assert told["losses"] == pytest.approx(single["--half",][:FEWER], abs=2e-2)
    for half in (told["losses"], single["--half",][:FEWER]):
        assert half != pytest.approx(single[()][:FEWER], abs=1e-5)
    assert single["--recompute",] == pytest.approx(single[()], abs=1e-6)


def test_recompute_runs_blocks_again_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of four blocks in each step: once more in backward."""
    counts = []
    for flags in ([], ["--recompute"]):
        ran = 0

        def count(*_: Any) -> None:
            nonlocal ran
            ran += 1

        handle = nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: count() if type(module).__name__ == "MLP" else None
        )
        monkeypatch.setattr(sys, "argv", ["single.py", "--json", "--steps", "2", *flags])
        monkeypatch.syspath_prepend(str(TINY))
        runpy.run_path(str(TINY / "single.py"), run_name="__main__")
        handle.remove()
        counts.append(ran)
    assert counts == [2 * 4, 2 * 4 * 2]


def test_the_page_shows_what_is_printed(single: Single) -> None:
    page = (ROOT / "docs" / "tiny-fsdp.md").read_text()
    shown = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", page, re.MULTILINE)]
    assert shown == pytest.approx(single[()], abs=1e-4)


def test_evenness_moves_owners_and_no_loss(several: Several) -> None:
    apart, even = several["zero3", ()], several["zero3", EVEN]
    assert even[0]["losses"] == pytest.approx(apart[0]["losses"][:FEWER], abs=1e-6)
    # The order of the model: its embeddings are the first, and the last norm ends what rank 1 has.
    assert (apart[0]["choices"]["wte"], apart[0]["choices"]["norm"]) == ("owner@0", "owner@1")
    spread = [abs(told[0]["owned"] - told[1]["owned"]) for told in (apart, even)]
    assert sum(told["owned"] for told in apart) == sum(told["owned"] for told in even) == 241_024
    assert spread[1] < spread[0]


def test_programs_are_short() -> None:
    for path in TINY.glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, path


# --- custom modules ------------------------------------------------------------------------------


class RootMeanSquare(nn.Module):
    """A norm with a parameter of its own that no module of torch holds."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> the same shape."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class LowRank(nn.Module):
    """y = x A B + b, called by matrix products and not by a layer."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(0.3 * torch.randn(features, rank))
        self.up = nn.Parameter(0.3 * torch.randn(rank, features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> the same shape."""
        return torch.addmm(self.bias, x.flatten(0, -2) @ self.down, self.up).view_as(x)


class Custom(nn.Module):
    """Modules that no table of supported ones could know, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 7))
        self.layers = nn.ModuleList(nn.Sequential(RootMeanSquare(7), LowRank(7, 3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) -> a loss."""
        x = x + self.token
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - 1).pow(2).mean()

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.randn(batch, 7),), {}


def train(model: nn.Module, batches: list[Tensor], rank: int, ranks: int) -> list[float]:
    """Train on this rank's part of every batch; return the losses of whole batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = model(batch[rank::ranks])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def custom() -> tuple[nn.Module, list[Tensor]]:
    """Return the model that every run starts from, and its batches."""
    torch.manual_seed(5)
    return Custom(), [torch.randn(8, 7) for _ in range(5)]


def train_custom(rank: int, pins: dict[str, list[str]]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Train under each strategy."""
    from osdp import OSDP

    found = {}
    for name, wanted in pins.items():
        model, batches = custom()
        wrapped = OSDP(model, {"micro_batch": 4, "optimizer": "adamw", "pins": wanted})
        found[name] = train(wrapped, batches, rank, RANKS), wrapped.full_state_dict()
    return found


def test_custom_modules_need_no_registration() -> None:
    from osdp.compat.zero3_partition import owner_pins, zero3_partition_tensors

    model, batches = custom()
    parts, _ = zero3_partition_tensors(dict(model.named_parameters()), ["cpu:0", "cpu:1"], 0.5, by_module=True)
    pins = {"replicate": ["*=replicate"], "shard": ["*=shard"], "owner": ["*=owner"], "given": owner_pins(parts)}
    wanted = train(model, batches, 0, 1)
    assert wanted[-1] < 0.9 * wanted[0]
    for name, (losses, parameters) in run_ranks(train_custom, RANKS, pins)[0].items():
        assert losses == pytest.approx(wanted, rel=1e-5), name
        torch.testing.assert_close(parameters, model.state_dict(), rtol=1e-4, atol=1e-6)
