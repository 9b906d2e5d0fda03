"""`osdp plan --imbalance`: what is printed, kept in the plan's file, and refused; and plans that cannot run yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli

from osdp.planning.plan_file import read_plan
from planner.cost.stragglers import Waits, lognormal_slowest
from profiler.errors import OsdpError

TINY = ("plan", "--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--batch", "2", "--global-batch", "64")
"""Four micro-batches a step on eight ranks."""


def test_a_coefficient_is_printed_and_kept(cli: Cli) -> None:
    out = cli.done(*TINY, "--imbalance", "0.5", "-o", "plan.yaml")
    assert "coefficient of variation 0.5, given" in out
    plan = read_plan(Path("plan.yaml"))
    assert plan.asked.imbalance == "0.5"
    assert plan.waits.per_micro_batch == lognormal_slowest(0.5, 8)
    assert plan.waits.per_step == lognormal_slowest(0.25, 8)
    assert "straggler wait" in out
    assert plan.predicted.time_by_term["waiting_s"] > 0
    # What is read back is priced the same.
    assert "The plan file predicts" not in cli.done("explain", "plan.yaml", "--no-what-if")


def test_a_plan_cannot_gain_from_waiting(cli: Cli) -> None:
    cli.done(*TINY, "-o", "plan.yaml")
    path = Path("plan.yaml")
    path.write_text(path.read_text().replace("per_step: 1.0", "per_step: 0.5"))
    with pytest.raises(OsdpError, match="per_step"):
        read_plan(path)


def test_plans_from_before_there_was_any_are_read(cli: Cli) -> None:
    cli.done(*TINY, "-o", "plan.yaml")
    path = Path("plan.yaml")
    text, _, _ = path.read_text().partition("\nwaits:")
    path.write_text(text + "\n")
    assert read_plan(path).waits == Waits()


def test_without_it_nothing_waits(cli: Cli) -> None:
    out = cli.done(*TINY)
    assert "straggler" not in out
    assert "imbalance" not in out


def test_lengths_are_counted(cli: Cli) -> None:
    Path("lengths.txt").write_text("64\n" * 999 + "8\n")
    assert "from 1,000 lengths in lengths.txt" in cli.done(*TINY, "--imbalance", "lengths.txt")


def test_a_file_of_lengths_is_found_from_any_folder(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What more would buy is asked again with the lengths, wherever the plan is opened."""
    lengths = "128\n" * 9 + "8\n"
    Path("lengths.txt").write_text(lengths)
    asked = (*TINY[:5], "--gpus-per-node", "2", "--batch", "2", "--global-batch", "16")
    more = cli.json(*asked, "--imbalance", "lengths.txt", "-o", "plan.yaml", "--what-if")["what_if"]["answers"][1]
    plan, given = Path("plan.yaml").absolute(), Path("lengths.txt").absolute()
    assert read_plan(plan).asked.imbalance == str(given)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    Path("lengths.txt").write_text("1\n")  # not the one that was meant
    rows = [line for line in cli.done("explain", plan).splitlines() if line.startswith(more["change"])]
    assert f"{more['ratio']:.3f} x" in rows[0]
    given.unlink()
    assert "No what-if analysis: the imbalance is neither" in " ".join(cli.done("explain", plan).split())


def test_a_number_stays_one_where_a_file_has_its_name(cli: Cli) -> None:
    Path("0.5").write_text("128\n8\n")
    cli.done(*TINY, "--imbalance", "0.5", "-o", "plan.yaml")
    assert read_plan(Path("plan.yaml")).asked.imbalance == "0.5"


def test_terms_sum_to_the_step(cli: Cli) -> None:
    predicted = cli.json(*TINY, "--imbalance", "0.5", "--pin", "*=shard")["predicted"]
    terms = predicted["time_by_term"]
    assert sum(terms.values()) == pytest.approx(predicted["step_time_s"])
    # Sharded plans meet in every micro-batch.
    factor = lognormal_slowest(0.5, 8) - 1
    assert terms["waiting_s"] == pytest.approx(factor * (terms["compute_s"] + terms["recompute_s"]))


@pytest.mark.parametrize("value", ["-1", "nan", "uneven", "missing.txt"])
def test_what_cannot_be_is_refused(cli: Cli, value: str) -> None:
    assert "imbalance" in cli.refused(*TINY, "--imbalance", value)


def test_an_empty_file_is_refused(cli: Cli) -> None:
    Path("empty.txt").touch()
    assert "no lengths" in cli.refused(*TINY, "--imbalance", "empty.txt")


def test_a_plan_with_windows_is_taken_as_any_other(cli: Cli) -> None:
    text = " ".join(cli.done(*TINY, "--pin", "*=odc:8").split())
    assert "odc:8" in text
    assert "do not run" not in text


def test_dealing_samples_is_compared_with_odc(cli: Cli) -> None:
    printed = " ".join(cli.done(*TINY, "--imbalance", "0.5").split())
    assert "Samples dealt by cost: all derived from the cost model" in printed
    report = cli.json(*TINY, "--imbalance", "0.5")
    dealing = report["dealing"]
    assert dealing["source"] == "derived from the cost model, not measured in a run"
    assert dealing["strategies_for_uneven"] == ["odc"]
    rows = {(row["balanced"], row["for_uneven"]): row for row in dealing["rows"]}
    assert len(rows) == len(dealing["rows"]) == 4
    # The plan that is reported is one of the rows.
    assert rows[False, True]["samples_per_s"] == pytest.approx(report["predicted"]["samples_per_s"])
    drawn, by_cost = rows[False, False], rows[True, False]
    assert drawn["slowest_per_micro_batch"] == lognormal_slowest(0.5, 8)
    assert drawn["slowest_per_step"] == lognormal_slowest(0.25, 8)
    assert by_cost["slowest_per_micro_batch"] < drawn["slowest_per_micro_batch"]
    assert by_cost["ratio"] == by_cost["samples_per_s"] / drawn["samples_per_s"] > 1
    assert f"{by_cost['ratio']:.3f} x 2 x 4" in printed


def test_dealing_is_left_out_where_nobody_waits(cli: Cli) -> None:
    for asked in (TINY, (*TINY, "--imbalance", "0"), (*TINY, "--imbalance", "0.5", "--gpus-per-node", "1")):
        assert "dealing" not in cli.json(*asked)
        assert "Samples dealt" not in cli.done(*asked)


def test_pins_and_the_style_hold_for_all_rows(cli: Cli) -> None:
    """With everything pinned no strategy can be added, and samples that are dealt by cost are all that helps."""
    found = cli.json(*TINY, "--imbalance", "0.5", "--pin", "*=shard", "--simple")["dealing"]["rows"]
    speeds = [row["samples_per_s"] for row in found]
    assert speeds[0] == speeds[2]
    assert speeds[1] == speeds[3] > speeds[0]
