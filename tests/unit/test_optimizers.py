"""The optimizers that plans name: what PyTorch's keep is what the planner counts."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import THOROUGH, some
from torch import nn

from osdp.description import Description, read_description
from osdp.planning.plan_file import read_plan
from osdp.zoo import load_cluster, load_model
from planner.cost.workload import Workload
from planner.optimizers import OPTIMIZERS as COUNTED
from planner.optimizers import fused_name, plain_name
from profiler.errors import OsdpError
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from runtime.observe.live_bytes import LiveBytes
from runtime.optimizers import OPTIMIZERS, as_priced, can_fuse


def test_both_know_the_same() -> None:
    assert OPTIMIZERS.keys() == COUNTED.keys()


def test_fused_names() -> None:
    assert [fused_name(name) for name in ("adam", "adamw", "sgd")] == ["fused_adam", "fused_adamw", "fused_sgd"]
    assert fused_name("states of 2 bytes per parameter") == "states of 2 bytes per parameter"
    assert [plain_name(fused_name(name)) for name in ("adam", "adamw", "sgd")] == ["adam", "adamw", "sgd"]
    assert plain_name("adam") == "adam"


def test_complex_numbers_are_not_fused() -> None:
    assert can_fuse([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)])
    assert not can_fuse([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))])


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


def test_a_fused_optimizer_holds_nothing_while_it_steps(cli: Cli) -> None:
    """And one that a user makes is priced with an update of every tensor.  Both that are fused with --thorough."""
    asked = ("--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--pin", "*=shard", "--batch", "1")
    told = dict[str, Any]()
    for name in ("adamw", "fused_adamw", "fused_sgd"):
        assert cli("plan", *asked, "--optimizer", name, "-o", f"{name}.yaml")[0] == 0
        if name == "fused_sgd" and not THOROUGH:
            break
        told[name] = cli.json("verify", f"{name}.yaml")
        assert told[name]["predicted_peak_bytes"] == told[name]["tracked_peak_bytes"]
        assert told[name]["predicted"].get("optimizer_temporaries", 0) == told[name]["tracked"].get(
            "optimizer_temporaries", 0
        )
        # Tensors as small as these are stepped for as long as the host launches that.
        parameters = 52
        optimizer_s = read_plan(Path(f"{name}.yaml")).predicted.time_by_term["optimizer_s"]
        assert optimizer_s == pytest.approx(parameters * 11e-6)


def test_a_fused_optimizer_passes_fewer_times_over_large_tensors() -> None:
    """Of 20 passes over the shards 7 are left."""
    machine = load_cluster("titan-rtx-8")
    adamw, fused_adamw, fused_sgd = (
        Workload(machine, name, "fp32", 1).optimizer_s(1e9, tensors=52)
        for name in ("adamw", "fused_adamw", "fused_sgd")
    )
    assert fused_adamw == pytest.approx(7 / 20 * adamw)
    assert fused_sgd == pytest.approx(3 / 20 * adamw)


@pytest.mark.parametrize(
    ("sizes", "made_bytes"),
    [((1000,) * 5, 5 * 4096), ((1000, 10_000), 2 * 40_448 + 4096)],
    ids=["alike", "one is most"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_made_as_a_step_runs(name: str, sizes: tuple[int, ...], made_bytes: int) -> None:
    """By hand: of each tensor its update, or two of the largest beside the last of the one before, as
    they are stepped one by one.

    So does the optimizer that a user makes where that is more; on a CPU it steps one by one.
    """
    makers = [as_priced(name)] if len(sizes) == 5 else [as_priced(name), OPTIMIZERS[name]]
    assert {made_as_it_steps(make, sizes) for make in makers} == {made_bytes if name in ("adam", "adamw") else 0}


def made_as_it_steps(make: Callable[..., torch.optim.Optimizer], sizes: tuple[int, ...]) -> int:
    """Return the most bytes that a step holds beside parameters, gradients and states."""
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = make(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with LiveBytes() as live:
            live.hold([*parameters, *(one.grad for one in parameters if one.grad is not None)])
            live.hold_states(optimizer)
            before = live.total_bytes
            optimizer.step()
    return live.peak_bytes - before


@pytest.mark.parametrize("optimizer", ["adam", "states of 8 bytes per parameter", "fused_adam"])
def test_a_plan_counts_that_the_largest_tensor_is_stepped_alone(optimizer: str) -> None:
    """Of whole tensors on their owner, one of which is nearly all: the step is the peak, and a step that computes."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(512, 512), nn.Linear(512, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.wide(x).relu()).square().mean()

    source = ModelSource("wide", Wide, lambda _, batch: ((torch.randn(batch, 512),), {}), 1)
    graph, machine = trace_model(source, "bf16"), cluster(1, 8)
    plan = plan_of(graph, machine, dict.fromkeys(("wide", "narrow"), "owner"), optimizer=optimizer)
    found = compare(plan, source, graph, machine, with_data=True)
    # Two of the wide weight, and what is left of the tensor before: there is none, and its bias's is assumed.
    made = (found.predicted.get("optimizer_temporaries", 0), found.tracked.get("optimizer_temporaries", 0))
    assert made == ((0, 0) if optimizer == "fused_adam" else (2 * 4 * 512 * 512 + 4 * 512, 2 * 4 * 512 * 512))
    assert -1e-6 <= found.error <= 1e-3


@pytest.mark.parametrize("kept_bytes", some([2.25, 40, 0], 2))
def test_any_other_is_priced_by_what_it_keeps(cli: Cli, kept_bytes: float) -> None:
    option = ("--optimizer-bytes-per-parameter", str(kept_bytes))
    asked = ("--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--pin", "*=shard", "--batch", "1")
    assert cli("plan", *asked, *option, "-o", "plan.yaml")[0] == 0
    plan = read_plan(Path("plan.yaml"))
    assert plan.optimizer == f"states of {kept_bytes} bytes per parameter"
    # By hand: rows of each tensor go to 8 ranks, and every tensor is rounded up to 512 bytes.
    shards = [-(-p.shape[0] // 8) * (p.numel() // p.shape[0]) for p in load_model("gpt2-tiny").build().parameters()]
    kept = sum(-(-ceil(kept_bytes * numel) // 512) * 512 for numel in shards)
    told = cli.json("verify", "plan.yaml")
    assert told["predicted_peak_bytes"] == told["tracked_peak_bytes"]
    assert told["predicted"].get("optimizer", 0) == told["tracked"].get("optimizer", 0) == kept
    if THOROUGH or kept_bytes == 2.25:
        assert cli("plan", *asked, "-o", "adam.yaml")[0] == 0
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
