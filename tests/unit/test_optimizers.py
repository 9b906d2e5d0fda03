"""The optimizers that plans name: what PyTorch's keep is what the planner counts."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest
import torch
from command_line import Cli
from torch import nn

from osdp.description import Description, read_description
from osdp.planning.plan_file import read_plan
from osdp.zoo import load_model
from planner.optimizers import OPTIMIZERS as COUNTED
from profiler.errors import OsdpError
from runtime.optimizers import OPTIMIZERS


def test_both_know_the_same() -> None:
    assert OPTIMIZERS.keys() == COUNTED.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_are_counted(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = OPTIMIZERS[name]([parameter])
    parameter.grad = torch.ones(3, 5)
    optimizer.step()
    states = list(optimizer.state[parameter].values())
    moments = [state for state in states if state.shape == parameter.shape]
    assert len(moments) == COUNTED[name].moments
    assert all(state.dtype == torch.float32 for state in moments)
    assert len(states) - len(moments) == COUNTED[name].has_step_counter


@pytest.mark.parametrize("kept_bytes", [0, 2.25, 40])
def test_any_other_is_priced_by_what_it_keeps(cli: Cli, kept_bytes: float) -> None:
    option = ("--optimizer-bytes-per-parameter", str(kept_bytes))
    asked = ("--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--pin", "*=shard", "--batch", "1")
    for name, options in (("plan.yaml", option), ("adam.yaml", ())):
        assert cli("plan", *asked, *options, "-o", name)[0] == 0
    plan = read_plan(Path("plan.yaml"))
    assert plan.optimizer == f"states of {kept_bytes} bytes per parameter"
    # By hand: rows of each tensor go to 8 ranks, and every tensor is rounded up to 512 bytes.
    shards = [-(-p.shape[0] // 8) * (p.numel() // p.shape[0]) for p in load_model("gpt2-tiny").build().parameters()]
    kept = sum(-(-ceil(kept_bytes * numel) // 512) * 512 for numel in shards)
    told = cli.json("verify", "plan.yaml")
    assert told["predicted_peak_bytes"] == told["tracked_peak_bytes"]
    assert told["predicted"].get("optimizer", 0) == told["tracked"].get("optimizer", 0) == kept
    differences = cli("diff", "adam.yaml", "plan.yaml")[1]
    assert plan.optimizer in " ".join(differences.split())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-0.5",), "cannot keep so many bytes per parameter\n  got: -0.5"),
        (("nan",), "got: nan"),
        (("inf",), "expected: a finite number from 0"),
        (("8", "--optimizer", "adam"), "by its name or by its bytes per parameter"),
    ],
)
def test_bytes_that_cannot_be_are_refused(cli: Cli, arguments: tuple[str, ...], part: str) -> None:
    assert part in cli.refused("plan", "--model", "gpt2-tiny", "--optimizer-bytes-per-parameter", *arguments)


def test_descriptions_take_them_too() -> None:
    given = read_description({"optimizer_bytes_per_parameter": 4})
    assert isinstance(given, Description)
    assert given.optimizer_bytes_per_parameter == 4
    for wrong in ({"optimizer_bytes_per_parameter": -1}, {"optimizer_bytes_per_parameter": 4, "optimizer": "sgd"}):
        with pytest.raises(OsdpError, match="optimizer_bytes_per_parameter"):
            read_description(wrong)
