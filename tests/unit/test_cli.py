"""The `osdp` command: what it prints, where, and with which exit status."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, Outcome

import osdp.planning.request
from osdp.planning.allocator_headroom import default_headroom
from osdp.planning.clusters import memory_limit
from osdp.planning.plan_file import read_plan, write_plan
from osdp.zoo import load_cluster, load_model
from profiler.byte_sizes import GIB
from profiler.yaml_files import write_yaml

CHECKOUT = Path(__file__).resolve().parents[2]
TINY = ("plan", "--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--batch", "4")
MAX_GROWTH_BYTES = 0.37e9
"""What `osdp plan` for GPT-2 1.5B may take beside what importing torch takes, from process start to printed plan.

With torch's CPU build, which takes 0.23 GB, that is 0.6 GB in all.
"""


@pytest.fixture(scope="module")
def tiny_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for gpt2-tiny, in a file; tests copy it before they change it."""
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    cluster = load_cluster("titan-rtx-8")
    limit, headroom = memory_limit(cluster, None), default_headroom(cluster)
    request = osdp.planning.request.Request(limit, micro_batch=4, headroom=headroom)
    write_plan(path, osdp.planning.request.plan_model(load_model("gpt2-tiny"), cluster, request).plan)
    return path


def process(*arguments: str, cwd: Path = CHECKOUT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(
        [sys.executable, "-m", "osdp", *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


# --- as a process ------------------------------------------------------------------------------


def test_a_plan_from_start_to_json(tmp_path: Path) -> None:
    """The whole way, in a process of its own, away from the checkout."""
    path = tmp_path / "plan.yaml"
    done = process(*TINY, "--json", "-o", str(path), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["schema"] == "osdp.plan_report/1"
    assert (told["model"], told["cluster"], told["micro_batch"]) == ("gpt2-tiny", "titan-rtx-8", 4)
    assert sum(told["predicted"]["memory_by_category"].values()) == told["predicted"]["peak_memory_bytes"]
    assert told["predicted"]["samples_per_s"] == pytest.approx(8 * 4 / told["predicted"]["step_time_s"])
    seconds = told["seconds"]
    assert 0 < (seconds["trace"] or 0.0) + seconds["search"] < seconds["total"] < 60  # its graph comes with OSDP
    plan = read_plan(path)
    assert plan.choices == told["choices"]
    assert plan.predicted.peak_memory_bytes == told["predicted"]["peak_memory_bytes"]


PEAKS = """
import subprocess, sys

peak = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
program = f"import sys, torch; {peak}; from osdp.cli import main; status = main(); {peak}; sys.exit(status)"
done = subprocess.run([sys.executable, "-c", program, *sys.argv[1:]], stdout=subprocess.DEVNULL)
sys.exit(done.returncode)
"""
"""Runs a command in a process that tells its peak, in KiB, when it has imported torch and when the command has ended.

It is a small process that starts it: Linux counts what the one held that it was forked from.
"""


def test_the_largest_gpt2_is_planned_in_little_memory() -> None:
    """Traced anew, since no graph of this length comes with OSDP."""
    command = ("plan", "--model", "gpt2-1.5b", "--seq", "1000", "--mem", "8GB")
    done = subprocess.run([sys.executable, "-c", PEAKS, *command], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0
    torch_bytes, peak_bytes = (1024 * int(kib) for kib in done.stderr.split())
    assert torch_bytes < peak_bytes < torch_bytes + MAX_GROWTH_BYTES


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['osdp', 'plan', '--help']\n"
        "from osdp.cli import main\n"
        "status = main()\n"
        "heavy = {'torch', 'pulp', 'networkx', 'numpy', 'rich', 'planner.search.search', 'yaml'} & set(sys.modules)\n"
        "print(status, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.parametrize(
    ("arguments", "status"), [(("clusters", "--sources"), 141), (("models",), 141), (("--help",), 1)]
)
def test_a_reader_that_goes_away_is_told_nothing(arguments: tuple[str, ...], status: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "osdp", *arguments],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == status


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "osdp", "models"], cwd=CHECKOUT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_streams_are_no_error() -> None:
    done = subprocess.run(["sh", "-c", f"exec '{sys.executable}' -m osdp models >&- 2>&-"], cwd=CHECKOUT)
    assert done.returncode == 0


# --- plan ------------------------------------------------------------------------------------------


def test_the_report_names_the_default_cluster(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = cli("plan", "--model", "gpt2-tiny", "--batch", "4")
    assert (done.status, done.err) == (0, "")
    assert "titan-rtx-8: 1 x 8 NVIDIA TITAN RTX" in done.out
    assert "the default, as no GPU is visible" in " ".join(done.out.split())
    assert "predicted" in done.out
    assert "\x1b" not in done.out


def test_what_is_written_says_how_it_was_made_and_comes_back(cli: Cli, tiny_plan: Path) -> None:
    done = cli(*TINY, "-o", "plan.yaml")
    assert done.status == 0
    assert done.out.splitlines()[-1] == "Written to plan.yaml"
    text = Path("plan.yaml").read_text()
    assert text.splitlines()[1].startswith("# osdp plan --model gpt2-tiny --cluster titan-rtx-8 --batch 4 ")
    assert read_plan(Path("plan.yaml")) == read_plan(tiny_plan)


def test_what_is_asked_for_is_kept(cli: Cli) -> None:
    done = cli(
        "plan",
        "--model",
        "gpt2-tiny",
        "--cluster",
        "h100-4x8",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--mem",
        "10GB",
        "--batch",
        "2",
        "--global-batch",
        "48",
        "--seq",
        "32",
        "--precision",
        "bf16",
        "--optimizer",
        "sgd",
        "-o",
        "plan.yaml",
        "--json",
    )
    assert done.status == 0
    plan = read_plan(Path("plan.yaml"))
    assert (plan.cluster.nodes, plan.cluster.gpus_per_node) == (2, 4)
    assert plan.limit_bytes == 10 * GIB
    assert (plan.micro_batch, plan.accumulation) == (2, 48 // (2 * 8))
    assert (plan.model.sequence_length, plan.model.precision, plan.optimizer) == (32, "bf16", "sgd")
    told = json.loads(done.out)
    assert told["predicted"]["samples_per_s"] == pytest.approx(48 / told["predicted"]["step_time_s"])


def test_a_smaller_limit_is_never_faster(cli: Cli) -> None:
    """And its plan fits: the promise that matters most."""
    speeds = []
    for mem in ("502MB", "532MB", "1GB"):
        asked = (*TINY[:5], "--global-batch", "16", "--mem", mem)
        told = json.loads(cli(*asked, "--json").out)
        assert told["predicted"]["peak_memory_bytes"] <= told["limit_bytes"]
        speeds.append(told["predicted"]["samples_per_s"])
        rivals = [b["samples_per_s"] for b in told["baselines"] if b["feasible"]]
        assert max(rivals) <= speeds[-1] * (1 + 1e-9)
    assert speeds == sorted(speeds)


def test_a_model_that_prints_leaves_stdout_alone(cli: Cli) -> None:
    Path("chatty.py").write_text("import torch\ndef make():\n    print('hello')\n    return torch.nn.Linear(4, 4)\n")
    done = cli("plan", "--model", "chatty:make", "--cluster", "titan-rtx-8", "--batch", "1", "--json")
    assert done.status == 0
    assert json.loads(done.out)["model"] == "chatty:make"
    assert "hello" in done.err


def test_warnings_are_for_users(cli: Cli) -> None:
    Path("flat.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(4, 4)\n")
    done = cli("plan", "--model", "flat:make", "--cluster", "titan-rtx-8", "--batch", "1", "--seq", "7", "--json")
    assert done.status == 0
    assert done.err == "osdp: warning: the sequence length 7 has no effect on flat:make\n"


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--model", "gpt2-tny"), "did you mean gpt2-tiny"),
        (("--model", "gpt2-tiny", "--cluster", "titan-rtx"), "did you mean titan-rtx-8?"),
        (("--model", "gpt2-tiny", "--mem", "lots"), "not an amount of memory"),
        (("--model", "gpt2-tiny", "--mem", "-8GB"), "not an amount of memory"),
        (("--model", "gpt2-tiny", "--mem", "25GB"), "at most 24.00 GiB; its driver leaves 24,166 MiB"),
        (("--model", "gpt2-tiny", "--precision", "bf16"), "TITAN RTX has no matmul rate for this precision"),
        (("--model", "gpt2-tiny", "--optimizer", "lion"), "expected: adam, adamw, sgd"),
        (("--model", "gpt2-tiny", "--solver", "cbc"), "expected: labels or ilp"),
        (("--model", "gpt2-tiny", "--time-limit", "1", "--what-if"), "are of one plan"),
        (("--model", "gpt2-tiny", "--solver", "ilp", "--mem", "2GB,4GB"), "are of one plan"),
        (("--model", "gpt2-tiny", "--global-batch", "12"), "--global-batch 16"),
        (("--model", "gpt2-tiny", "--global-batch", "24", "--batch", "2"), "does not divide the global batch"),
        (("--model", "gpt2-tiny", "--seq", "4096"), "expected: at most 128"),
        (("--model", "gpt2-tiny", "--nodes", "2"), "has no link between nodes"),
        (("--model", "no_such_module:make"), "there is no module no_such_module"),
        (("--model", "gpt2-tiny", "-o", "no/plan.yaml"), "mkdir -p no"),
        (("--model", "gpt2-tiny", "-o", "."), "it is a directory"),
    ],
)
def test_bad_input_is_told(cli: Cli, arguments: tuple[str, ...], part: str) -> None:
    named = () if "--cluster" in arguments else ("--cluster", "titan-rtx-8")
    assert part in cli.refused("plan", *named, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        (*TINY[:-1], "0"),
        (*TINY, "--global-batch", "0"),
        (*TINY, "--nodes", "-1"),
        (*TINY, "--seq", "many"),
        (*TINY, "--modle", "x"),
        ("explain",),
        ("plans",),
    ],
)
def test_wrong_usage_ends_with_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.status == 2
    assert "Usage: osdp" in done.out + done.err


def test_the_smallest_limit_that_is_told_is_enough_and_no_less_is(cli: Cli) -> None:
    tiny = (*TINY[:3], "--cluster", "rtx4090-2", *TINY[5:], "--headroom", "0")
    message = cli.refused(*tiny, "--mem", "100MB")
    needed = int(message.partition("try: --mem ")[2].partition("MB")[0])
    assert cli(*tiny, "--mem", f"{needed}MB").status == 0
    assert "no plan fits the memory limit" in cli.refused(*tiny, "--mem", f"{needed - 1}MB")


def test_a_factory_that_raises_is_told_with_its_line(cli: Cli) -> None:
    Path("broken.py").write_text("def make():\n    raise RuntimeError('no weights')\n")
    message = cli.refused("plan", "--model", "broken:make", "--cluster", "titan-rtx-8")
    assert "RuntimeError: no weights" in message
    assert "broken.py:2" in message


def test_other_files_are_not_overwritten(cli: Cli, tiny_plan: Path) -> None:
    Path("notes.yaml").write_text("# schema: osdp.plan/1 is what I want\n")
    assert "not a plan" in cli.refused(*TINY, "-o", "notes.yaml")
    assert Path("notes.yaml").read_text().startswith("# schema")
    Path("old.yaml").write_text(tiny_plan.read_text().replace("micro_batch: 4", "micro_batch: 3"))
    Path("empty.yaml").touch()
    for name in ("old.yaml", "empty.yaml"):
        assert cli(*TINY, "-o", name, "--json").status == 0
        assert read_plan(Path(name)).micro_batch == 4
    Path("binary.yaml").write_bytes(b"\xff\xfe")
    assert "not a plan" in cli.refused(*TINY, "-o", "binary.yaml")


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def key_pressed(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize(("fault", "status", "said"), [(full_disk, 2, "No space left"), (key_pressed, 130, "interr")])
def test_an_interrupted_write_leaves_no_half_file(
    cli: Cli, tiny_plan: Path, monkeypatch: pytest.MonkeyPatch, call: str, fault: Any, status: int, said: str
) -> None:
    before = tiny_plan.read_text().replace("micro_batch: 4", "micro_batch: 3")
    Path("plan.yaml").write_text(before)
    for name in ("plan.yaml", "new.yaml"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fault)
            done = cli(*TINY, "-o", name)
        assert (done.status, done.out) == (status, "")
        assert said in done.err
        assert "Traceback" not in done.err
    assert sorted(os.listdir()) == ["plan.yaml"]
    assert Path("plan.yaml").read_text() == before


def test_a_pressed_key_ends_quietly(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osdp.planning.request, "plan_model", key_pressed)
    assert cli(*TINY) == Outcome(130, "", "interrupted\n")


def test_a_fault_of_ours_points_at_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("here")

    monkeypatch.setattr(osdp.planning.request, "plan_model", fail)
    done = cli(*TINY)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("osdp: error: unexpected ZeroDivisionError: here")
    assert "OSDP_TRACEBACK=1" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("OSDP_TRACEBACK", "1")
    assert "in fail" in cli(*TINY).err


# --- explain -------------------------------------------------------------------------------------------


def test_explain_all(cli: Cli, tiny_plan: Path) -> None:
    done = cli("explain", tiny_plan)
    assert (done.status, done.err) == (0, "")
    assert "gpt2-tiny on titan-rtx-8, micro-batch 4" in done.out
    assert "The plan file predicts" not in done.out
    assert "Block " in done.out


def test_explain_one(cli: Cli, tiny_plan: Path) -> None:
    done = cli("explain", tiny_plan, "blocks.1.mlp.up")
    assert (done.status, done.err) == (0, "")
    now = read_plan(tiny_plan).choices["blocks.1.mlp.up"]
    assert f"blocks.1.mlp.up: {now}" in done.out
    table = done.out.partition("All alternatives")[2]
    assert all(other in table for other in {"replicate", "shard", "shard_grad", "group_shard:4"} - {now})


def test_explain_unknown_operator(cli: Cli, tiny_plan: Path) -> None:
    assert "blocks.1.mlp.up" in cli.refused("explain", tiny_plan, "blocks.1.mlp.upp")


def test_explain_knows_a_tied_module(cli: Cli, tiny_plan: Path) -> None:
    assert "These change together: wte, lm_head." in cli("explain", tiny_plan, "lm_head").out


def test_a_plan_for_another_model_is_refused(cli: Cli, tiny_plan: Path) -> None:
    assert "made for another model" in cli.refused("explain", tiny_plan, "--model", "bert-tiny")


def edited(tiny_plan: Path, old: str, new: str) -> Path:
    """Write the plan with one change to the current directory."""
    text = tiny_plan.read_text()
    assert text.count(old) >= 1
    Path("edited.yaml").write_text(text.replace(old, new, 1))
    return Path("edited.yaml")


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("schema: osdp.plan/1", "schema: osdp.plan/9", ["edited.yaml, line 1", "another version", "osdp.plan/1"]),
        ("schema: osdp.plan/1", "schema: my.plan/1", ["edited.yaml, line 1", "another kind of file"]),
        ("micro_batch: 4", "micro_batch: 0", ["line", "`micro_batch` is wrong", "1 or more"]),
        ("micro_batch: 4", "micro_batch: four", ["`micro_batch` is wrong", "a whole number"]),
        ("accumulation: 1", "acumulation: 1", ["`accumulation`", "is missing"]),
        ("optimizer: adam", "optimizer: lion", ["unknown optimizer", "adam, adamw, sgd"]),
        ("model:\n", "model: [\n", ["edited.yaml, line", "plain YAML"]),
    ],
)
def test_a_bad_plan_file_is_told_with_line_and_field(
    cli: Cli, tiny_plan: Path, old: str, new: str, parts: list[str]
) -> None:
    message = cli.refused("explain", edited(tiny_plan, old, new))
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "a: 1\n", "\0"])
def test_foreign_files_are_refused(cli: Cli, content: str) -> None:
    Path("foreign.yaml").write_text(content)
    assert "foreign.yaml" in cli.refused("explain", "foreign.yaml")
    assert "absent.yaml does not exist" in cli.refused("explain", "absent.yaml")


def test_an_unknown_strategy_in_a_plan_is_told(cli: Cli, tiny_plan: Path) -> None:
    plan = read_plan(tiny_plan)
    write_yaml(Path("plan.yaml"), replace(plan, choices=plan.choices | {"norm": "shred"}))
    assert "shred" in cli.refused("explain", "plan.yaml")


def test_names_that_no_longer_load_can_be_replaced(cli: Cli, tiny_plan: Path) -> None:
    gone = edited(tiny_plan, "name: gpt2-tiny", "name: moved-model")
    assert "--model with its present name or path" in cli.refused("explain", gone)
    assert cli("explain", gone, "norm", "--model", "gpt2-tiny").status == 0
    gone = edited(tiny_plan, "name: titan-rtx-8", "name: moved-cluster")
    assert "--cluster with its present name or path" in cli.refused("explain", gone)
    assert cli("explain", gone, "norm", "--cluster", "titan-rtx-8") == cli("explain", tiny_plan, "norm")


def test_another_cluster_is_warned_of(cli: Cli, tiny_plan: Path) -> None:
    done = cli("explain", tiny_plan, "--cluster", "h100-8", "--no-what-if")
    assert done.status == 0
    assert "osdp: warning: the figures of the cluster h100-8 have changed since" in done.err
    assert "The plan file predicts" in done.out


# --- lists and versions -----------------------------------------------------------------------------------


def test_models_lists_the_zoo(cli: Cli) -> None:
    done = cli("models")
    assert (done.status, done.err) == (0, "")
    (line,) = (line for line in done.out.splitlines() if line.startswith("gpt2-1.5b"))
    assert line.split()[1:4] == ["1.56", "B", "1024"]


def test_clusters_lists_the_presets(cli: Cli) -> None:
    done = cli("clusters")
    assert (done.status, done.err) == (0, "")
    (line,) = (line for line in done.out.splitlines() if line.startswith("titan-rtx-8"))
    assert line.split()[1:8] == ["1", "x", "8", "23.60", "GiB", "10", "GB/s"]


def test_clusters_tells_sources(cli: Cli) -> None:
    done = cli("clusters", "titan-rtx-8", "--sources")
    assert done.status == 0
    assert "h100" not in done.out
    assert "16.3 TFLOP/s" in done.out
    assert "datasheet: TITAN RTX, 16.3 TFLOPS" in done.out
    assert "there is no such cluster" in cli.refused("clusters", "titan")


def test_version(cli: Cli) -> None:
    assert cli("--version") == Outcome(0, f"osdp {osdp.__version__}\n", "")


def test_help_says_what_8gb_is(cli: Cli) -> None:
    text = " ".join(cli("plan", "--help").out.split())
    assert "8GB means 8 GiB (8192 MiB)" in text


def test_schedule_prints_the_units_of_a_plan(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert cli(*TINY, "-o", str(path)).status == 0
    found = cli("schedule", str(path))
    assert found.status == 0
    head, columns, *units = found.out.splitlines()
    assert head.startswith("8 ranks (1 x 8), fp32")
    assert columns.split()[:5] == ["unit", "operators", "strategy", "mesh", "bytes"]
    # Tied embedding and head, positions, four blocks of six operators each, the last normalisation.
    counts = [(line.split()[0], line.split()[1]) for line in units]
    assert counts == [("wte", "1"), ("wpe", "1"), *((f"blocks.{i}", "6") for i in range(4)), ("norm", "1")]
    assert cli("schedule", str(tmp_path / "none.yaml")).status == 2
