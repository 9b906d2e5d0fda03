"""`osdp profile` on two CPU ranks: from the command to a file that `osdp plan` takes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from command_line import Cli
from programs import REAL_RANK, process_of, python
from ranks import children, run_ranks
from thoroughness import THOROUGH

from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2
from osdp.planning.clusters import load_cluster
from osdp.zoo import load_model
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.search.baselines import uniform
from planner.strategies.spec import Strategy
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import call_key
from profiler.cluster.read_cluster import read_cluster
from profiler.model_graph import Recompute
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from profiler.yaml_files import write_yaml
from runtime.optimizers import OPTIMIZERS

CHECKOUT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
PATIENCE_S = 180.0
BUDGET_S = "60" if THOROUGH else "20"
QUICK = ("--model", "gpt2-tiny", "--batch", "1,2", "--repetitions", "2", "--budget-s", BUDGET_S, "--device", "cpu")


def osdp(folder: Path, *arguments: str, real: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "osdp", *arguments],
        env=ENVIRONMENT | ({REAL_RANK: "0"} if real else {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=folder,
    )


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a profile, and what measuring it printed."""
    folder = tmp_path_factory.mktemp("profile")
    done = osdp(folder, "profile", *QUICK, "-o", "mine.yaml", real=THOROUGH)
    if done.returncode == 2 and "there is too little time" in done.stderr:  # as beside others on a slow machine
        done = osdp(folder, "profile", *QUICK, "--budget-s", "60", "-o", "mine.yaml", real=THOROUGH)
    assert done.returncode == 0, done.stderr
    assert "measuring communication" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["mine.yaml"]
    return folder, done.stdout


def test_everything_is_measured(profiled: tuple[Path, str]) -> None:
    cluster = read_cluster(profiled[0] / "mine.yaml")
    measured = cluster.measured
    assert measured is not None
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node, cluster.device.kind) == ("mine", 1, 2, "cpu")
    assert not cluster.overlaps  # gloo's collectives block
    operations = {(one.operation, one.algorithm, one.ranks) for one in measured.collectives}
    assert operations == {
        (name, "native", 2)
        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "pull", "push", "publish")
    } | {("reduce_scatter", "ring", 2)}
    assert measured.one_sided_overhead_s is not None
    assert 0 <= measured.one_sided_overhead_s < 0.1
    graph = trace_model(load_model("gpt2-tiny"))
    assert {one.key for one in measured.calls} == {call_key(graph, call) for call in graph.calls}
    assert all(one.micro_batches == (1, 2) for one in measured.calls)
    assert all(seconds > 0 for one in measured.calls for seconds in (*one.forward_s, *one.backward_s))
    assert {one.name for one in measured.optimizers} == OPTIMIZERS.keys()
    assert 1e8 < cluster.device.matmul_flops_per_s["fp32"].value < 1e13
    assert 2**27 < cluster.reserve_bytes < 2**31 < cluster.device.memory_bytes.value
    assert all(figure.source.startswith("measured: ") for figure in cluster.device.matmul_flops_per_s.values())


def test_the_report_shows_it(profiled: tuple[Path, str]) -> None:
    folder, told = profiled
    assert "1 x 2 ranks, measured on" in told
    assert "ring reduce-scatter, 2 ranks" in told
    assert "blocks.0.mlp.up" in told
    assert told.rstrip().endswith("Plan with it: osdp plan --cluster mine.yaml")
    shown = osdp(folder, "clusters", "mine.yaml", "--sources")
    assert shown.returncode == 0
    assert "measured: large products" in shown.stdout


def test_a_plan_takes_what_was_measured(profiled: tuple[Path, str]) -> None:
    folder, _ = profiled
    done = osdp(
        folder,
        "plan",
        "--model",
        "gpt2-tiny",
        "--cluster",
        "mine.yaml",
        "--batch",
        "2",
        "--optimizer",
        "sgd",
        "--pin",
        "*=shard",
        "--json",
        "-o",
        "plan.yaml",
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    cluster, graph = read_cluster(folder / "mine.yaml"), trace_model(load_model("gpt2-tiny"))
    assert cluster.measured is not None
    by_key = {one.key: one for one in cluster.measured.calls}
    calls = [by_key[call_key(graph, call)] for call in graph.calls]
    terms = told["predicted"]["time_by_term"]
    assert terms["compute_s"] == pytest.approx(sum(one.forward_s[1] + one.backward_s[1] for one in calls))
    sgd = {one.name: one for one in cluster.measured.optimizers}["sgd"]
    tensors = sum(len(operator.parameters) for operator in graph.operators)
    # Rows are padded to whole ones per rank: all sizes here are even but the norms' and biases' are vectors.
    assert terms["optimizer_s"] == pytest.approx(sgd.step_s(tensors, 4 * graph.numel / 2), rel=0.01)
    # The communication is that of the fitted curves: every unit's gather twice and its reduction once.
    space, load = Space(graph), Workload(cluster, "sgd", "fp32", 2)
    options = uniform(space, load, Strategy("shard", 2), recompute=Recompute.NOTHING)
    assert len(options) == len(space.model.stages)
    times = {(one.operation, one.algorithm): one for one in cluster.measured.collectives}
    sizes = [4 * sum(graph.operators[o].numel for o in stage.operators) for stage in space.model.stages]
    sizes += [4 * graph.operators[o].numel for o in space.model.spanning]
    reduces = [times["reduce_scatter", cluster.algorithm("reduce_scatter", 2, 1, size)].time_s(size) for size in sizes]
    gathers = [times["all_gather", "native"].time_s(size) for size in sizes]
    overheads = 3 * len(sizes) * cluster.measured.unit_overhead_s
    assert terms["exposed_communication_s"] == pytest.approx(2 * sum(gathers) + sum(reduces) + overheads, rel=0.01)


def test_two_profiles_side_by_side(profiled: tuple[Path, str]) -> None:
    folder, _ = profiled
    cluster = read_cluster(folder / "mine.yaml")
    rate = cluster.device.memory_bytes_per_s
    doubled = replace(cluster.device, memory_bytes_per_s=replace(rate, value=2 * rate.value))
    write_yaml(folder / "other.yaml", replace(cluster, device=doubled))
    done = osdp(folder, "profile", "--compare", "mine.yaml", "other.yaml", "--json")
    (folder / "other.yaml").unlink()
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    ratios = {figure["what"]: figure["ratio"] for figure in figures}
    assert ratios.pop("memory rate") == pytest.approx(2.0)
    # A fit may find that a part which does not depend on size takes no time, and nothing has a ratio to 0.
    none = {figure["what"] for figure in figures if figure["before"] == 0}
    assert none <= {"latency in a node", "each gather and reduction", "each pull and push"}
    assert ratios == {what: None if what in none else 1.0 for what in ratios}
    assert {figure["part"] for figure in figures} == {"device", "links", "collectives", "calls", "units", "optimizers"}
    # A cluster that was not measured has rates and links only.
    write_yaml(folder / "preset.yaml", load_cluster("cpu-gloo"))
    plain = osdp(folder, "profile", "--compare", "preset.yaml", "mine.yaml")
    (folder / "preset.yaml").unlink()
    assert plain.returncode == 0
    assert "Links: preset.yaml against mine.yaml" in plain.stdout


def test_one_rank_alone_is_profiled_and_planned_for(tmp_path: Path) -> None:
    """A machine with one GPU, but on a CPU."""
    asked = ("--model", "gpt2-tiny", "--batch", "1,2", "--repetitions", "2", "--device", "cpu", "--ranks-per-node", "1")
    done = osdp(tmp_path, "profile", *asked, "-o", "mine.yaml")
    assert done.returncode == 0, done.stderr
    assert "measuring communication" not in done.stderr
    assert "not measured, as there is one rank; a link of 300 MB/s is assumed" in " ".join(done.stdout.split())
    cluster, graph = read_cluster(tmp_path / "mine.yaml"), trace_model(load_model("gpt2-tiny"))
    measured = cluster.measured
    assert measured is not None
    assert (cluster.world_size, measured.collectives, cluster.ring, measured.notes) == (1, (), (), measured.notes)
    assert {one.key for one in measured.calls} == {call_key(graph, call) for call in graph.calls}
    assert {one.name for one in measured.optimizers} == OPTIMIZERS.keys()
    assert cluster.intra.bytes_per_s == Figure(3e8, "assumed: one rank alone has no link, so as of cpu-gloo")
    assert cluster.overlap_source.startswith("assumed: ")
    plan = ("plan", "--model", "gpt2-tiny", "--cluster", "mine.yaml", "--batch", "2", "--optimizer", "sgd", "--json")
    planned = osdp(tmp_path, *plan, "-o", "plan.yaml")
    assert planned.returncode == 0, planned.stderr
    terms = json.loads(planned.stdout)["predicted"]["time_by_term"]
    by_key = {one.key: one for one in measured.calls}
    calls = [by_key[call_key(graph, call)] for call in graph.calls]
    assert terms["compute_s"] == pytest.approx(sum(one.forward_s[1] + one.backward_s[1] for one in calls))
    assert terms["exposed_communication_s"] == 0
    explained = osdp(tmp_path, "explain", "plan.yaml", "--cluster", "mine.yaml", "--no-what-if")
    assert explained.returncode == 0, explained.stderr
    assert osdp(tmp_path, "profile", "--compare", "mine.yaml", "mine.yaml").returncode == 0


def test_an_interrupted_profile_leaves_no_file(tmp_path: Path) -> None:
    command = [python(), "-m", "osdp", "profile", *QUICK, "-o", "mine.yaml"]
    started = subprocess.Popen(command, env=ENVIRONMENT, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    assert any("measuring communication" in line for line in started.stderr)
    # The ranks are in sessions of their own.
    program = process_of(started.pid)
    for pid in (*children(program), program):
        os.kill(pid, signal.SIGKILL)
    started.wait()
    assert list(tmp_path.iterdir()) == []


Told = list[tuple[str, float]]


def small() -> GPT2:
    return GPT2(GPT2Config(vocabulary_size=16, maximum_positions=8, hidden_size=16, layers=1, heads=2))


def measure_once(rank: int) -> Told:
    """Return what was told of the progress; what is measured is small, as nobody looks at how long it takes."""
    from osdp.profile import fsdp_overhead, time_collectives
    from osdp.profile.session import Wanted, measure
    from profiler.timing import device_rates

    source = ModelSource("small", small, lambda module, batch: module.example_inputs(batch, 8), 8)  # type: ignore[operator]
    wanted, told = Wanted(source, "fp32", (1,), 1, 30.0, "cpu", (4096, 16384, 65536)), Told()
    with contextlib.ExitStack() as patches:
        for sizes in (device_rates.MATRIX, device_rates.ELEMENTS, fsdp_overhead.ROWS):
            patches.enter_context(mock.patch.dict(sizes, cpu=64))
        patches.enter_context(mock.patch.object(time_collectives, "TIMING_S", 0.002))
        measure(wanted, torch.device("cpu"), lambda what, fraction: told.append((what, fraction)))
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_progress_never_falls(ranks: int) -> None:
    for told in run_ranks(measure_once, ranks):
        fractions = [fraction for _, fraction in told]
        assert fractions == sorted(fractions)
        assert fractions[0] == 0.0
        assert 0.75 <= fractions[-1] <= 1.0
        stages = ["memory", "communication", "rates", "overlap", "units", "model", "calls", "optimizers"]
        if ranks == 1:
            stages = [stage for stage in stages if stage not in ("communication", "overlap", "units")]
        expected = [f"measuring {stage}" for stage in stages]
        expected.insert(stages.index("model"), "tracing small")
        assert list(dict.fromkeys(what.partition(":")[0] for what, _ in told)) == expected


def test_torchrun_overwrites_nothing_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    torchrun = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "osdp", "profile", *QUICK, "-o", "notes.txt"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "notes.txt exists and is not a cluster, so it is not overwritten" in done.stderr
    assert "measuring" not in done.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("notes.txt", "mine")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--batch", "two"), "--batch takes micro-batch sizes"),
        (("--batch", "0"), "--batch takes micro-batch sizes"),
        (("--precision", "fp8"), "unknown --precision"),
        (("--device", "tpu"), "unknown --device"),
        (("--model", "gpt9"), "no such model"),
        (("-o", "missing/profile.yaml"), "missing"),
        (("--compare", "a.yaml", "b.yaml"), "a.yaml"),
    ],
)
def test_bad_input_is_one_message(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr(sys, "executable", python())
    assert told in cli.refused("profile", *arguments)
    assert not list(tmp_path.iterdir())
