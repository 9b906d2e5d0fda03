"""`osdp verify`: what it compares, what it prints and with which exit status, at worlds of 8 to 1024 ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from rehearsals import compare, plan_of
from thoroughness import some
from torch import nn

import osdp.planning.verify
from osdp.cli.reports.verify import verdict
from osdp.models.user_factory import source_of
from osdp.planning.plan_file import write_plan
from osdp.planning.request import Request, plan_model
from osdp.planning.verify import ROUNDING_BYTES, Verified
from osdp.zoo import load_cluster, load_model
from planner.plan import Plan
from profiler.byte_sizes import GIB, MIB
from profiler.trace.trace import trace_model
from runtime.observe.dry_run import DryRun, Script
from runtime.schedule import Schedule

CATEGORIES = {
    "parameters",
    "optimizer",
    "gradients",
    "unsharded_parameters",
    "communication_buffers",
    "activations",
    "optimizer_temporaries",
}
ENOUGH_S = 60.0
"""Generous: a dry run of gpt2-tiny takes 2 s."""


@pytest.fixture(scope="module")
def planned() -> Plan:
    """What `osdp plan` makes for gpt2-tiny."""
    request = Request(GIB, micro_batch=2)
    return plan_model(load_model("gpt2-tiny"), load_cluster("titan-rtx-8"), request).plan


@pytest.fixture(scope="module")
def uniform() -> Callable[..., Plan]:
    """Makes a plan for gpt2-tiny that gives every operator the same."""
    graph = trace_model(load_model("gpt2-tiny"), "fp32")

    def make(choice: str, nodes: int = 1, gpus: int = 8, micro_batch: int = 1) -> Plan:
        machine = load_cluster("h100-4x8", nodes, gpus)
        choices = {operator.name: choice for operator in graph.operators}
        return plan_of(graph, machine, choices, micro_batch=micro_batch)

    return make


DRY: dict[str, DryRun] = {}


@pytest.fixture(autouse=True)
def dry_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what is compiled alike once: a dry run finds the same each time, and takes most of a command's."""
    dry_run = osdp.planning.verify.dry_run

    def found(script: Script, schedule: Schedule, rank: int) -> DryRun:
        key = f"{schedule} {rank} {script.optimizer} {script.micro_batch}"
        if key not in DRY:
            DRY[key] = dry_run(script, schedule, rank)
        return DRY[key]

    monkeypatch.setattr(osdp.planning.verify, "dry_run", found)


def written(plan: Plan) -> Path:
    write_plan(Path("plan.yaml"), plan)
    return Path("plan.yaml")


def test_a_plan_that_holds(cli: Cli, planned: Plan) -> None:
    status, out, err = cli("verify", written(planned), "--json")
    assert (status, err) == (0, "")
    told: dict[str, Any] = json.loads(out)
    assert set(told) == {
        "schema",
        "model",
        "cluster",
        "how",
        "world_size",
        "rank",
        "predicted",
        "tracked",
        "predicted_peak_bytes",
        "tracked_peak_bytes",
        "error",
        "reserved_bytes",
        "allocatable_bytes",
        "holds",
        "seconds",
        "allocators",
    }
    assert (told["schema"], told["model"], told["cluster"]) == ("osdp.verification/1", "gpt2-tiny", "titan-rtx-8")
    assert (told["how"], told["world_size"], told["holds"]) == ("rehearsal", 8, True)
    assert 0 <= told["rank"] < 8
    for side in ("predicted", "tracked"):
        assert set(told[side]) <= CATEGORIES
        assert told[f"{side}_peak_bytes"] == sum(told[side].values())
    assert told["error"] == (told["predicted_peak_bytes"] - told["tracked_peak_bytes"]) / told["tracked_peak_bytes"]
    assert -0.01 <= told["error"] <= 0.03
    assert told["predicted"]["parameters"] == told["tracked"]["parameters"] > 0
    # The file's own figure is that, and the reserve.
    reserve = planned.predicted.memory_by_category["reserve"]
    assert told["predicted_peak_bytes"] == planned.predicted.peak_memory_bytes - reserve
    assert told["reserved_bytes"] is None
    assert set(told["allocators"]) == {"default", "expandable_segments"}
    for name, allocator in told["allocators"].items():
        assert set(allocator) == {"allocated_bytes", "reserved_bytes", "retries", "fits", "without_retries_bytes"}
        assert allocator["without_retries_bytes"] >= allocator["reserved_bytes"]
        # With cuBLAS's workspaces; large blocks are only cut by default if more than 1 MiB is left.
        tensors_bytes = allocator["allocated_bytes"] - round(16.25 * MIB)
        assert tensors_bytes == told["tracked_peak_bytes"] or (name == "default" and tensors_bytes > 0)
        assert allocator["allocated_bytes"] <= allocator["reserved_bytes"] <= told["allocatable_bytes"]
        assert allocator["fits"]


def test_the_report_has_every_category_and_the_verdict(cli: Cli, planned: Plan) -> None:
    status, out, err = cli("verify", written(planned))
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    assert "gpt2-tiny on titan-rtx-8" in text
    assert "without computing" in text
    for part in ("parameters", "activations", "peak", "predicted", "tracked"):
        assert part in text
    assert "The prediction holds: its error is" in text
    assert "The allocator fits with expandable_segments:True" in text


orthogonal = nn.utils.parametrizations.orthogonal


@pytest.mark.parametrize(
    "asks",
    [
        partial(orthogonal, orthogonal_map="matrix_exp"),
        partial(orthogonal, orthogonal_map="householder", use_trivialization=False),
        lambda layer: nn.init.trunc_normal_(layer.weight, std=0.02),
    ],
    ids=("compares", "computes", "draws until"),
)
def test_a_model_whose_constructor_asks_for_its_weights(asks: Callable[[nn.Linear], object]) -> None:
    """Whether they are orthogonal already, or within bounds; verifying once refused what planning accepts."""

    def build() -> nn.Module:
        layer = nn.Linear(16, 16)
        asks(layer)
        return nn.Sequential(layer, nn.Linear(16, 4))

    model = source_of(build, "orthogonal", None, lambda batch: torch.randn(batch, 16))
    graph, machine = trace_model(model), load_cluster("cpu-gloo", 1, 2)
    plan = plan_of(graph, machine, dict.fromkeys((one.name for one in graph.operators), "shard"))
    assert -0.01 <= compare(plan, model, graph, machine, with_data=False).error <= 0.03


def test_a_plan_whose_allocator_needs_more_than_the_limit_ends_with_1(cli: Cli, planned: Plan) -> None:
    """Of the limit, 380 MiB are taken beside the allocator, and tensors and workspaces have the rest to the byte."""
    tight = 380 * MIB + round(16.25 * MIB) + planned.predicted.tensors_bytes
    status, out, err = cli("verify", written(replace(planned, limit_bytes=tight)), "--json")
    told = json.loads(out)
    expandable = told["allocators"]["expandable_segments"]
    assert (status, err, told["holds"], expandable["fits"]) == (1, "", False, False)
    assert abs(told["error"]) < 0.01
    # Pages of 20 MiB for large tensors, of 2 for small ones.
    assert told["allocatable_bytes"] < expandable["reserved_bytes"] <= told["allocatable_bytes"] + 24 * MIB
    status, out, _ = cli("verify", "plan.yaml")
    assert status == 1
    assert "The allocator does not fit, even with expandable_segments:True" in " ".join(out.split())


def test_a_prediction_that_does_not_hold_ends_with_1(
    cli: Cli, uniform: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run that finds 2 % more than was predicted, or 4 % less."""
    dry_run, once = osdp.planning.verify.dry_run, list[DryRun]()
    path = written(uniform("shard", micro_batch=128))  # 170 MiB, of which 1 % is more than rounding can be
    for factor, holds, *as_json in ((1.02, False, "--json"), (0.96, False), (1.001, True)):

        def other(*arguments: Any, factor: float = factor) -> Any:
            found = once[0] if once else dry_run(*arguments)
            once.append(found)
            categories = {name: round(factor * size) for name, size in found.peak.categories.items()}
            peak = replace(found.peak, categories=categories, total_bytes=sum(categories.values()))
            return replace(found, peak=peak)

        monkeypatch.setattr(osdp.planning.verify, "dry_run", other)
        status, out, err = cli("verify", path, *as_json)
        assert (status, err) == (0 if holds else 1, "")
        assert (json.loads(out)["holds"] if as_json else "does not hold" not in " ".join(out.split())) is holds


@pytest.mark.parametrize(
    ("predicted", "tracked", "holds"),
    [
        (99 * MIB, 100 * MIB, True),
        (98 * MIB, 100 * MIB, False),
        (103 * MIB, 100 * MIB, True),
        (104 * MIB, 100 * MIB, False),
        # Of next to nothing, some blocks of 512 bytes are more than a per cent.
        (ROUNDING_BYTES, 2 * ROUNDING_BYTES, True),
        (ROUNDING_BYTES, 2 * ROUNDING_BYTES + 1, False),
    ],
)
def test_what_holds(predicted: int, tracked: int, holds: bool) -> None:
    found = Verified("rehearsal", 0, 8, {}, {}, predicted, tracked, "backward", "backward", 1.0, GIB)
    assert found.holds is holds
    by_share = 0.99 * tracked <= predicted <= 1.03 * tracked
    assert (", or 1.0 MiB either way, is allowed" in verdict(found)) is not by_share


@pytest.mark.parametrize(("excess_bytes", "status"), [(0, 0), (1, 1)])
def test_what_the_allocator_reserved_has_to_be_within_the_limit(
    cli: Cli, planned: Plan, monkeypatch: pytest.MonkeyPatch, excess_bytes: int, status: int
) -> None:
    """Of 1 GiB, context (300 MiB) and communicators (80 MiB) are taken beside PyTorch's allocator."""
    room_bytes = GIB - 380 * MIB
    # The allocator hands out cuBLAS's workspaces too.
    tensors_bytes = planned.predicted.peak_memory_bytes - planned.predicted.memory_by_category["reserve"]
    allocated = tensors_bytes + round(16.25 * MIB)

    def measure(*_: Any) -> Any:
        held = {"allocated": allocated, "reserved": room_bytes + excess_bytes}
        return osdp.planning.verify._Held(0, held, allocated, "as torch.cuda measures it")

    monkeypatch.setattr(osdp.planning.verify, "_check_ranks", lambda view: None)
    monkeypatch.setattr(osdp.planning.verify, "_measure", measure)
    done = cli("verify", written(planned), "--device", "cuda", "--json")
    told = json.loads(done.out)
    assert (done.status, told["how"], told["error"], told["holds"]) == (status, "cuda", 0, status == 0)
    assert told["predicted"]["cublas_workspaces"] == round(16.25 * MIB)
    assert (told["reserved_bytes"], told["allocatable_bytes"]) == (room_bytes + excess_bytes, room_bytes)
    done = cli("verify", "plan.yaml", "--device", "cuda")
    text = " ".join(done.out.split())
    assert done.status == status
    assert "The prediction holds: its error is" in text
    assert f"The allocator is {'beyond' if status else 'within'} the limit: it reserved 644.0 MiB of the 644.0" in text


@pytest.mark.parametrize(("nodes", "gpus"), some([(1, 8), (8, 8), (128, 8)], 3, first=2))
def test_every_world_takes_one_process_and_seconds(
    cli: Cli, uniform: Callable[..., Plan], nodes: int, gpus: int
) -> None:
    path = written(uniform("shard", nodes, gpus))
    started = time.perf_counter()
    status, out, _ = cli("verify", path, "--json")
    seconds = time.perf_counter() - started
    told = json.loads(out)
    print(f"{nodes * gpus} ranks: {seconds:.1f} s, error {told['error']:+.3%}")
    assert (status, told["world_size"]) == (0, nodes * gpus)
    assert told["seconds"] < seconds < ENOUGH_S


# --- what is refused -------------------------------------------------------------------------


def test_a_missing_file(cli: Cli) -> None:
    assert "nothing.yaml" in cli.refused("verify", "nothing.yaml")


def test_a_plan_of_another_model(cli: Cli, uniform: Callable[..., Plan]) -> None:
    path = written(uniform("shard"))
    assert "another model" in cli.refused("verify", path, "--model", "gpt2")
    assert "no-such-model" in cli.refused("verify", path, "--model", "no-such-model")


def test_a_cluster_that_is_not_to_be_found(cli: Cli, uniform: Callable[..., Plan]) -> None:
    assert "no-such-cluster" in cli.refused("verify", written(uniform("shard")), "--cluster", "no-such-cluster")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_to_measure_on(cli: Cli, uniform: Callable[..., Plan]) -> None:
    assert "no GPU" in cli.refused("verify", written(uniform("shard")), "--device", "cuda")


def test_a_file_that_is_no_plan(cli: Cli) -> None:
    Path("notes.yaml").write_text("a: 1\n")
    cli.refused("verify", "notes.yaml")
