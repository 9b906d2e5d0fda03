"""`osdp plan` of several limits, with pins, headroom and --what-if; `osdp diff`: exit status and what is printed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import command_line
import pytest
from command_line import Cli

from osdp.planning.plan_file import read_plan
from planner.options.search_space import Space
from profiler.byte_sizes import GIB, MIB

TINY = ("plan", "--model", "gpt2-tiny", "--cluster", "titan-rtx-8", "--gpus-per-node", "2", "--batch", "2")


# --- the frontier ------------------------------------------------------------------------------------


def test_a_frontier_is_printed_with_rows_that_do_not_fit(cli: Cli) -> None:
    out = cli.done(*TINY, "--mem", "100MB,502MB,1GB")
    assert out.startswith("Frontier of gpt2-tiny on titan-rtx-8, 1 x 2 NVIDIA TITAN RTX")
    assert "All figures are predicted" in " ".join(out.split())
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()[:1].isdigit() and "%" in line}
    assert set(rows) == {"502.0", "1.00"}
    assert "#" in rows["1.00"]
    assert "does not fit: needs at least 49" in out


def test_a_frontier_in_json_has_every_limit(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    told = cli.json(*TINY, "--mem", "100MB,502MB:522MB:20MB")
    assert (told["schema"], told["model"], told["cluster"]) == ("osdp.frontier/1", "gpt2-tiny", "titan-rtx-8")
    rows = told["frontier"]
    assert [(row["limit_bytes"], row["feasible"]) for row in rows] == [
        (100 * MIB, False),
        (502 * MIB, True),
        (522 * MIB, True),
    ]
    # 492.2 MiB of reserve and some of tensors, with the headroom of 1.5 %.
    assert 492.2 * MIB / 0.985 < rows[0]["needed_bytes"] <= 502 * MIB
    assert "which peaks in" in rows[0]["why"]
    # Each is what a search of its own prints, with options of its own.
    monkeypatch.setattr(command_line, "FOUND", {})
    for module in ("planner.search.search", "osdp.planning.request"):
        monkeypatch.setattr(f"{module}.Space", Space)
    alone = cli.json(*TINY, "--mem", "502MB", "--best")
    for key in ("micro_batch", "predicted", "choices", "recomputed_blocks", "baselines", "limit_bytes"):
        assert rows[1][key] == alone[key]
    assert rows[1]["gap"] <= alone["gap"]


def test_plans_of_a_frontier_go_into_a_folder(cli: Cli) -> None:
    for _ in range(2):  # and may be written again
        out = cli.done(*TINY, "--mem", "502MB,1GB", "-o", "plans/")
        assert out.splitlines()[-1] == "Written to plans"
    assert sorted(os.listdir("plans")) == ["1GB.yaml", "502MB.yaml"]
    assert read_plan(Path("plans/502MB.yaml")).limit_bytes == 502 * MIB
    text = Path("plans/1GB.yaml").read_text()
    assert "--mem 502MB,1GB" in text
    assert read_plan(Path("plans/1GB.yaml")).limit_bytes == GIB


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--mem", "502MB,1GB", "-o", "plan.yaml"), "cannot hold several plans"),
        (("--mem", "502MB,1GB", "-o", "no/plans"), "mkdir -p no"),
        (("--mem", "502MB,1GB", "-o", "taken"), "is not a plan, so it is not overwritten"),
        (("--mem", "1GB", "-o", "taken"), "it is a directory"),
        (("--mem", "502MB,1GB", "--what-if"), "--what-if applies to one plan"),
        (("--mem", "1GB", "--plot", "frontier.png"), "--plot draws a frontier"),
        (("--mem", "100MB:100MB:1MB"), "no plan fits the memory limit"),
        (("--mem", "1GB:"), "not a range of memory limits"),
        (("--mem", "1GB,900GB"), "larger than the memory"),
    ],
)
def test_what_a_frontier_cannot_do_is_told(cli: Cli, arguments: tuple[str, ...], part: str) -> None:
    Path("taken").mkdir()
    Path("taken/1GB.yaml").write_text("a: 1\n")
    assert part in cli.refused(*TINY, *arguments)
    assert Path("taken/1GB.yaml").read_text() == "a: 1\n"


def test_a_picture_without_matplotlib_is_refused_before_anything_is_planned(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = cli.refused(*TINY, "--mem", "502MB,1GB", "--plot", "frontier.png")
    assert "--plot needs matplotlib, which is not installed" in message
    assert ".venv/bin/pip install -e '.[plot]'" in message


def test_a_picture_is_drawn(cli: Cli) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is optional and not installed")
    status, _, err = cli(*TINY, "--mem", "502MB,1GB", "--plot", "frontier.png")
    assert (status, err) == (0, "osdp: note: drawn into frontier.png\n")
    assert Path("frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "frontier.yaml cannot be drawn" in cli.refused(*TINY, "--mem", "502MB,1GB", "--plot", "frontier.yaml")


# --- pins, headroom ----------------------------------------------------------------------------------


def test_pins_are_kept_shown_and_remembered(cli: Cli) -> None:
    pins = ("--pin", "blocks.*.mlp=replicate", "--pin", "blocks.[01]=recompute", "--pin", "norm=shard")
    out = cli.done(*TINY, *pins, "-o", "plan.yaml")
    plan = read_plan(Path("plan.yaml"))
    assert {plan.choices[name] for name in plan.choices if ".mlp." in name} == {"replicate"}
    assert plan.choices["norm"] == "shard"
    assert {"blocks.0", "blocks.1"} <= set(plan.recomputed_blocks)
    assert plan.asked.pins == ["blocks.*.mlp=replicate", "blocks.[01]=recompute", "norm=shard"]
    assert "replicate, pinned" in out
    assert "yes, pinned" in out
    assert "pinned   blocks.*.mlp=replicate, blocks.[01]=recompute, norm=shard" in out
    assert "--pin 'blocks.*.mlp=replicate' --pin 'blocks.[01]=recompute'" in Path("plan.yaml").read_text()
    told = cli.json(*TINY, *pins)
    assert told["pins"] == plan.asked.pins
    assert told["choices"] == plan.choices
    assert "(pinned)" in cli.done("explain", "plan.yaml", "--no-what-if")


@pytest.mark.parametrize(
    ("pins", "part"),
    [
        (("blocks.*",), "not a pin"),
        (("blocks.9=shard",), "no such operator or block"),
        (("norm=split(2*shard)",), "norm cannot be split"),
        (("norm=sahrd",), "no such strategy"),
        (("wte=shard", "lm_head=replicate"), "one operator, as they share a parameter"),
        (("blocks.0=shard", "blocks.*.mlp.up=replicate"), "contradict each other"),
        (("norm=keep",), "only blocks can be recomputed or kept"),
    ],
)
def test_a_pin_that_cannot_be_honoured_is_refused(cli: Cli, pins: tuple[str, ...], part: str) -> None:
    assert part in cli.refused(*TINY, *(word for pin in pins for word in ("--pin", pin)))


def test_headroom_is_left_free_and_shown(cli: Cli) -> None:
    out = cli.done(*TINY, "--mem", "532MB", "--headroom", "30MB", "-o", "plan.yaml")
    plan = read_plan(Path("plan.yaml"))
    assert (plan.limit_bytes, plan.headroom_bytes) == (532 * MIB, 30 * MIB)
    assert plan.predicted.peak_memory_bytes <= 502 * MIB
    assert "30.0 MiB are headroom" in out
    assert "(30.0 MiB of it headroom)" in " ".join(cli.done("explain", "plan.yaml", "--no-what-if").split())
    share = cli.json(*TINY, "--mem", "600MB", "--headroom", "5%")
    assert share["headroom_bytes"] == 30 * MIB
    assert share["predicted"] == cli.json(*TINY, "--mem", "600MB", "--headroom", "30MB")["predicted"]


@pytest.mark.parametrize(
    ("headroom", "part"),
    [
        ("100%", "less than the memory limit"),
        ("lots", "not a headroom"),
        ("40MB", "leaves no memory"),
        ("39MB", "--headroom 0 (then "),
    ],
)
def test_a_headroom_that_cannot_be_is_told(cli: Cli, headroom: str, part: str) -> None:
    """Of 532 MiB, 492.2 are reserved for CUDA context, NCCL and cuBLAS."""
    assert part in cli.refused(*TINY, "--mem", "532MB", "--headroom", headroom)


# --- what if -----------------------------------------------------------------------------------------


def test_what_binds_and_what_more_would_buy(cli: Cli) -> None:
    told = cli.json(*TINY, "--mem", "502MB", "--what-if", "--best", "-o", "plan.yaml")
    more = told["what_if"]
    assert more["samples_per_s"] == pytest.approx(told["predicted"]["samples_per_s"])
    assert [answer["resource"] for answer in more["answers"]] == ["memory", "link in a node", "nodes", "compute"]
    assert set(more["binds"]) <= {"memory", "link in a node", "compute"}
    assert more["answers"][2]["why_not"] == "titan-rtx-8 has no inter-node link"
    assert more["answers"][2]["ratio"] is None
    for answer in more["answers"][:2]:
        assert answer["ratio"] == pytest.approx(answer["samples_per_s"] / more["samples_per_s"])
    # From the file the same is asked, with the same micro-batch.
    assert read_plan(Path("plan.yaml")).asked.micro_batch == 2
    out = cli.done("explain", "plan.yaml")
    assert "What if: predicted by a new search for each change" in out
    table = {line.split("  ")[0]: line for line in out.splitlines()}
    ratio = f"{more['answers'][0]['ratio']:.3f} x"
    assert ratio in table["one more GiB of memory"]
    assert "What if:" not in cli.done("explain", "plan.yaml", "--no-what-if")
    assert "What if:" not in cli.done("explain", "plan.yaml", "blocks.0")


def test_a_plan_that_nothing_fits_any_more_is_still_explained(cli: Cli) -> None:
    cli.done(*TINY, "--headroom", "0", "-o", "plan.yaml")
    text = Path("plan.yaml").read_text()
    limit = read_plan(Path("plan.yaml")).limit_bytes
    Path("plan.yaml").write_text(text.replace(f"limit_bytes: {limit}", f"limit_bytes: {100 * MIB}"))
    assert "No what-if analysis: no plan fits" in cli.done("explain", "plan.yaml")


# --- diff --------------------------------------------------------------------------------------------


def test_diff_tells_choices_memory_and_time(cli: Cli) -> None:
    cli.done(*TINY, "--mem", "502MB", "-o", "a.yaml")
    cli.done(*TINY, "--mem", "1GB", "--pin", "blocks.0=owner", "-o", "b.yaml")
    old, new = read_plan(Path("a.yaml")), read_plan(Path("b.yaml"))
    told = cli.json("diff", "a.yaml", "b.yaml")
    assert (told["schema"], told["same"], told["same_operators"]) == ("osdp.plan_diff/1", False, True)
    assert told["settings"]["limit_bytes"] == {"before": 502 * MIB, "after": GIB}
    assert told["changed_operators"] == sum(old.choices[name] != new.choices[name] for name in old.choices)
    change = told["predicted"]["peak_memory_bytes"]["change"]
    assert change == new.predicted.peak_memory_bytes - old.predicted.peak_memory_bytes
    assert sum(c["change"] for c in told["predicted"]["memory_by_category"].values()) == change
    terms = sum(c["change"] for c in told["predicted"]["time_by_term"].values())
    assert terms == pytest.approx(told["predicted"]["step_time_s"]["change"])
    out = cli.done("diff", "a.yaml", "b.yaml")
    assert "owner" in out
    assert f"{new.predicted.samples_per_s / old.predicted.samples_per_s:.3f} x as fast" in out


def test_equal_plans_are_said_to_be_equal(cli: Cli) -> None:
    cli.done(*TINY, "-o", "a.yaml")
    out = cli.done("diff", "a.yaml", "a.yaml")
    assert "The plans are equal" in out
    assert "Model, cluster, limit and batch" not in out
    assert cli.json("diff", "a.yaml", "a.yaml")["same"] is True


def test_plans_of_other_models_are_told_apart_with_their_figures(cli: Cli) -> None:
    cli.done(*TINY, "-o", "a.yaml")
    cli.done("plan", "--model", "bert-tiny", "--cluster", "titan-rtx-8", "--batch", "2", "-o", "b.yaml")
    out = cli.done("diff", "a.yaml", "b.yaml")
    assert "The models have different operators, so the choices are not compared." in out
    assert "Memory at the peak" in out
    assert "x as fast" in out
    assert cli.json("diff", "a.yaml", "b.yaml")["choices"] == []


def test_what_is_no_plan_is_refused(cli: Cli) -> None:
    cli.done(*TINY, "-o", "a.yaml")
    assert "absent.yaml does not exist" in cli.refused("diff", "a.yaml", "absent.yaml")
    Path("b.yaml").write_text("a: 1\n")
    assert "b.yaml" in cli.refused("diff", "b.yaml", "a.yaml", "--json")
