"""`osdp plan --imbalance`: what is printed, kept in the plan's file, and refused; and plans that cannot run yet."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from osdp.cli import main
from osdp.planning import read_plan
from planner.imbalance import Waits, lognormal_slowest
from profiler.errors import OsdpError

Command = Callable[..., tuple[int, str, str]]
TINY = ("plan", "--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--batch", "2", "--global-batch", "64")
"""Four micro-batches a step on eight ranks."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs a command in an empty folder and returns (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["osdp", *arguments])
        capsys.readouterr()
        return main(), *capsys.readouterr()

    return command


def test_a_coefficient_is_printed_and_kept(run: Command) -> None:
    status, out, _ = run(*TINY, "--imbalance", "0.5", "-o", "plan.yaml")
    assert status == 0
    assert "coefficient of variation 0.5, given" in out
    plan = read_plan(Path("plan.yaml"))
    assert plan.asked.imbalance == "0.5"
    assert plan.waits.per_micro_batch == lognormal_slowest(0.5, 8)
    assert plan.waits.per_step == lognormal_slowest(0.25, 8)
    assert "waiting for the slowest" in out
    assert plan.predicted.time_by_term["waiting_s"] > 0
    # What is read back is priced the same.
    status, out, _ = run("explain", "plan.yaml")
    assert status == 0
    assert "The file says" not in out


def test_a_plan_cannot_gain_from_waiting(run: Command) -> None:
    assert run(*TINY, "-o", "plan.yaml")[0] == 0
    path = Path("plan.yaml")
    path.write_text(path.read_text().replace("per_step: 1.0", "per_step: 0.5"))
    with pytest.raises(OsdpError, match="per_step"):
        read_plan(path)


def test_plans_from_before_there_was_any_are_read(run: Command) -> None:
    assert run(*TINY, "-o", "plan.yaml")[0] == 0
    path = Path("plan.yaml")
    text, _, _ = path.read_text().partition("\nwaits:")
    path.write_text(text + "\n")
    assert read_plan(path).waits == Waits()


def test_without_it_nothing_waits(run: Command) -> None:
    status, out, _ = run(*TINY)
    assert status == 0
    assert "waiting" not in out
    assert "imbalance" not in out


def test_lengths_are_counted(run: Command) -> None:
    Path("lengths.txt").write_text("64\n" * 999 + "8\n")
    status, out, _ = run(*TINY, "--imbalance", "lengths.txt")
    assert status == 0
    assert "from 1,000 lengths in lengths.txt" in out


def test_terms_sum_to_the_step(run: Command) -> None:
    status, out, _ = run(*TINY, "--imbalance", "0.5", "--pin", "*=shard", "--json")
    assert status == 0
    predicted = json.loads(out)["predicted"]
    terms = predicted["time_by_term"]
    assert sum(terms.values()) == pytest.approx(predicted["step_time_s"])
    # Sharded plans meet in every micro-batch.
    factor = lognormal_slowest(0.5, 8) - 1
    assert terms["waiting_s"] == pytest.approx(factor * (terms["compute_s"] + terms["recompute_s"]))


@pytest.mark.parametrize("value", ["-1", "nan", "uneven", "missing.txt"])
def test_what_cannot_be_is_refused(run: Command, value: str) -> None:
    status, out, err = run(*TINY, "--imbalance", value)
    assert (status, out) == (2, "")
    assert "imbalance" in err
    assert "Traceback" not in err


def test_an_empty_file_is_refused(run: Command) -> None:
    Path("empty.txt").touch()
    status, _, err = run(*TINY, "--imbalance", "empty.txt")
    assert status == 2
    assert "no lengths" in err


def test_a_plan_that_cannot_run_yet_says_so(run: Command) -> None:
    status, out, _ = run(*TINY, "--pin", "*=odc:8")
    assert status == 0
    assert "Note: the plan takes odc:8, which OSDP() and osdp train do not run yet" in " ".join(out.split())
