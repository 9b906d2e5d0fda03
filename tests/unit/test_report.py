"""What is printed: snapshots of whole reports, and their figures against arithmetic of our own.

`OSDP_SNAPSHOTS=write` writes the snapshots anew; read the difference before keeping it.
"""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic import chain, cluster, transformer

from osdp.cli.reports.explain import print_plan_reasons, print_target_reasons
from osdp.cli.reports.figures import (
    bar,
    figures_of,
    format_count,
    format_parameters,
    format_rate,
    format_seconds,
    rates,
    sources_of,
)
from osdp.cli.reports.plan import Circumstances, print_plan
from osdp.cli.reports.plan_json import plan_object
from osdp.cli.reports.rows import plan_rows, short_names
from osdp.planning.request import Planned, Request
from planner.analysis.explain import OpenPlan, find_target, open_plan
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.plan import ModelRef
from planner.pricing import fixed, make_plan
from planner.search.baselines import baselines
from planner.search.search import Found
from planner.strategies.spec import Strategy
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster
from profiler.cluster.figure import Figure
from profiler.model_graph import ModelGraph, Operator, Recompute

SNAPSHOTS = Path(__file__).parent / "snapshots"
WIDTH = 100
SHARD, KEEP = Strategy("shard", 4), Strategy("shard_grad", 4)
LIMIT_BYTES = 600 * MIB


def console(width: int = WIDTH) -> Console:
    """A console that keeps plain text; `osdp.cli.terminal` makes it likewise, on stdout."""
    return Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    lines = [line.rstrip() for line in target.file.getvalue().splitlines()]
    return "\n".join(lines) + "\n"


def check_snapshot(name: str, text: str) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("OSDP_SNAPSHOTS") == "write":
        path.write_text(text)
    assert text == path.read_text()


def planned_by_hand(graph: ModelGraph | None = None, recomputed: int = 4, limit_bytes: int = LIMIT_BYTES) -> Planned:
    """A plan as the search might find it: the first blocks recomputed, the tied weight kept."""
    graph = graph or transformer(6, 1024, vocabulary=8192)
    space, load = Space(graph), Workload(cluster(gpus=4), "adam", "fp32", micro_batch=1)
    choices = tuple(
        StageDecision(
            (SHARD,) * len(stage.operators),
            Recompute.EVERYTHING if stage.block is not None and stage.block < recomputed else Recompute.NOTHING,
        )
        for stage in space.model.stages
    )
    spanning = KEEP if space.model.spanning else None
    options = fixed(space, load, choices, spanning)
    plan = make_plan(options, spanning, space, load, limit_bytes=limit_bytes, gap=0.0125)
    speed = plan.predicted.samples_per_s
    loads = tuple(replace(load, micro_batch=size) for size in (1, 2, 3))
    found = Found(
        space=space,
        load=load,
        options=options,
        spanning=spanning,
        samples_per_s=speed,
        bound_samples_per_s=speed / (1 - plan.gap),
        baselines=baselines(space, loads, limit_bytes),
        points=3,
        search_s=0.25,
    )
    return Planned(plan, graph, found, Request(limit_bytes), trace_s=0.5, search_s=0.25)


def plan_text(planned: Planned, around: Circumstances | None = None, width: int = WIDTH) -> str:
    target = console(width)
    print_plan(target, planned, around or Circumstances(total_s=1.75))
    return printed(target)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return planned_by_hand()


@pytest.fixture(scope="module")
def view(planned: Planned) -> OpenPlan:
    return open_plan(planned.plan, planned.graph, planned.cluster)


# --- snapshots -------------------------------------------------------------------------------


def test_plan_report(planned: Planned) -> None:
    noted = replace(planned, graph=replace(planned.graph, notes=("dropout was taken as off",)))
    around = Circumstances(1.75, "the default, as no GPU is visible", "plan.yaml")
    check_snapshot("plan", plan_text(noted, around))


def test_explain_report(view: OpenPlan) -> None:
    target = console()
    print_plan_reasons(target, view)
    check_snapshot("explain", printed(target))


@pytest.mark.parametrize(("name", "snapshot"), [("blocks.1.qkv", "explain_operator"), ("blocks", "explain_blocks")])
def test_explain_target_report(view: OpenPlan, name: str, snapshot: str) -> None:
    target = console()
    print_target_reasons(target, view, name, find_target(view, name))
    check_snapshot(snapshot, printed(target))


# --- the figures in them -----------------------------------------------------------------------


def mib(text: str) -> float:
    """Return what `7.87 GiB` or `512.0 MiB` means, in MiB."""
    number, unit = text.split()
    return float(number.replace(",", "")) * {"GiB": 1024, "MiB": 1}[unit]


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]


def section(text: str, headline: str) -> list[str]:
    """Return the lines of a table under a headline, without its head."""
    _, _, rest = text.partition(headline)
    lines = rest.partition("\n\n")[0].splitlines()
    return [line for line in lines[3:] if line.strip()]


def cells(line: str) -> list[str]:
    return [cell for cell in re.split(r"\s{2,}", line.strip()) if cell]


def test_printed_categories_sum_to_the_printed_peak(planned: Planned) -> None:
    text = plan_text(planned)
    peak = re.search(r"Memory: peak (\S+ \S+) of (\S+ \S+), (\S+)% used", text)
    assert peak is not None
    shown = [mib(cells(line)[1]) for line in section(text, "Memory: ")]
    assert len(shown) == 7
    assert sum(shown) == pytest.approx(mib(peak[1]), abs=0.05 * len(shown) + 5)
    assert float(peak[3]) == pytest.approx(100 * mib(peak[1]) / mib(peak[2]), abs=0.5)
    assert mib(peak[2]) == pytest.approx(LIMIT_BYTES / MIB, abs=5)


def test_printed_terms_sum_to_the_printed_step_and_give_the_speed(planned: Planned) -> None:
    text = plan_text(planned)
    step = re.search(r"Time: (\S+ \S+) per step, (\S+) samples/s, (\S+) tokens/s", text)
    assert step is not None
    shown = [seconds(cells(line)[1]) for line in section(text, "Time: ") if "Another" not in line]
    assert len(shown) == 4
    # Each is printed to a tenth of a millisecond.
    assert sum(shown) == pytest.approx(seconds(step[1]), abs=0.05e-3 * (len(shown) + 1))
    # Four ranks with one sample each, of 1024 tokens.
    assert float(step[2]) == pytest.approx(4 / seconds(step[1]), rel=1e-3)
    assert float(step[3].replace(",", "")) == pytest.approx(float(step[2]) * 1024, rel=1e-3)


def test_printed_ratios_are_those_of_the_printed_speeds(planned: Planned) -> None:
    text = plan_text(planned)
    ours = re.search(r"(\S+) samples/s,", text)
    assert ours is not None
    rows = [cells(line) for line in section(text, "Compared with one strategy")]
    assert [row[:2] for row in rows] == [
        [name, recompute] for name in ("DDP", "ZeRO-2", "FSDP", "HSDP, groups of 2") for recompute in ("no", "yes")
    ]
    ratios = [(float(row[4]), row[5]) for row in rows if "does not fit" not in row]
    assert ratios
    for speed, ratio in ratios:
        assert float(ratio.removesuffix(" x as fast")) == pytest.approx(float(ours[1]) / speed, rel=1e-2)
    unfit = [row for row in rows if "does not fit" in row]
    assert unfit
    for row in unfit:
        assert mib(row[2].removeprefix("needs ")) > LIMIT_BYTES / MIB


def test_certificate_is_about_the_printed_speed(planned: Planned) -> None:
    flat = " ".join(plan_text(planned).split())
    certified = re.search(r"Certified gap (\S+)%: .* more than (\S+) samples/s", flat)
    ours = re.search(r"(\S+) samples/s,", flat)
    assert certified is not None
    assert ours is not None
    assert float(certified[1]) == pytest.approx(100 * (1 - float(ours[1]) / float(certified[2])), abs=0.05)


def test_rows_count_every_parameter_once(planned: Planned) -> None:
    rows = plan_rows(planned.plan, planned.graph)
    assert [(row.part, len(row.names), row.strategy, row.recompute) for row in rows] == [
        ("Linear", 1, "shard_grad", None),
        ("Block", 4, "shard", Recompute.EVERYTHING),
        ("Block", 2, "shard", Recompute.NOTHING),
        ("Linear", 1, "shard", None),
    ]
    # Embedding 8192 x 1024, tied; 6 blocks of 12 x 1024^2 + 2 x 1024; the last norm.
    assert [row.parameters for row in rows] == [8192 * 1024, 4 * (12 * 1024**2 + 2048), 2 * (12 * 1024**2 + 2048), 1024]
    assert rows[1].names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def test_a_block_whose_operators_differ_gets_a_row_for_each_strategy(planned: Planned) -> None:
    choices = planned.plan.choices | {"blocks.5.up": "replicate", "blocks.5.down": "replicate"}
    rows = plan_rows(replace(planned.plan, choices=choices), planned.graph)
    assert [(row.part, len(row.names), row.strategy, row.parameters) for row in rows[2:5]] == [
        ("Block", 1, "shard", 12 * 1024**2 + 2048),
        ("Block: norm1, qkv, out, norm2", 1, "shard", 4 * 1024**2 + 2048),
        ("Block: up, down", 1, "replicate", 8 * 1024**2),
    ]


def test_json_has_the_published_keys_and_sums(planned: Planned) -> None:
    told = json.loads(json.dumps(plan_object(planned, 1.75)))
    assert list(told) == [
        "schema",
        "model",
        "cluster",
        "limit_bytes",
        "micro_batch",
        "accumulation",
        "predicted",
        "gap",
        "baselines",
        "choices",
        "recomputed_blocks",
        "seconds",
        "headroom_bytes",
        "pins",
        "not_run_yet",
        "verdict",
        "assumed_of_cluster",
        "simple_samples_per_s",
        "selectively_recomputed_blocks",
        "tighter",
        "offloaded_blocks",
    ]
    assert told["schema"] == "osdp.plan_report/1"
    assert (told["model"], told["cluster"], told["limit_bytes"]) == ("transformer", "test", LIMIT_BYTES)
    predicted = told["predicted"]
    assert list(predicted) == [
        "peak_memory_bytes",
        "memory_by_category",
        "peak_phase",
        "step_time_s",
        "time_by_term",
        "samples_per_s",
    ]
    assert sum(predicted["memory_by_category"].values()) == predicted["peak_memory_bytes"]
    assert sum(predicted["time_by_term"].values()) == pytest.approx(predicted["step_time_s"], rel=1e-12)
    assert predicted["samples_per_s"] == pytest.approx(4 / predicted["step_time_s"], rel=1e-12)
    assert all(
        list(b)
        == ["name", "recompute", "recomputation", "feasible", "micro_batch", "peak_memory_bytes", "samples_per_s"]
        for b in told["baselines"]
    )
    for baseline in told["baselines"]:
        assert baseline["feasible"] == (baseline["peak_memory_bytes"] <= LIMIT_BYTES)
    assert told["recomputed_blocks"] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert set(told["choices"]) == {operator.name for operator in planned.graph.operators}
    assert told["seconds"] == {"trace": 0.5, "search": 0.25, "total": 1.75}


# --- odd models and terminals --------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_longer_than_the_terminal(planned: Planned, view: OpenPlan, width: int) -> None:
    target = console(width)
    print_plan_reasons(target, view)
    print_target_reasons(target, view, "blocks", find_target(view, "blocks"))
    text = plan_text(planned, width=width) + printed(target)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


def test_a_model_without_blocks_and_without_sequences_is_reported() -> None:
    text = plan_text(planned_by_hand(chain([(2048, 2048)] * 3, [1] * 3, [1] * 3), limit_bytes=GIB))
    assert "tokens" not in text
    assert "0 blocks" in text
    rows = [cells(line)[:2] for line in section(text, "Compared with one strategy")]
    assert rows == [[name, "no"] for name in ("DDP", "ZeRO-2", "FSDP", "HSDP, groups of 2")]


def test_names_are_taken_literally() -> None:
    """Square brackets are markup to rich, and colons may be emoji."""
    graph = transformer(2, 64)
    renamed = replace(graph, name="[bold]my:smile:model[/bold]")
    text = plan_text(planned_by_hand(renamed, recomputed=0))
    assert "[bold]my:smile:model[/bold]:" in text


def test_an_edited_plan_file_is_noticed(planned: Planned) -> None:
    slower = replace(planned.plan.predicted, step_time_s=2 * planned.plan.predicted.step_time_s)
    target = console()
    print_plan_reasons(target, open_plan(replace(planned.plan, predicted=slower), planned.graph, planned.cluster))
    assert f"The plan file predicts {format_seconds(slower.step_time_s)}" in printed(target)


def test_tied_operators_name_their_modules() -> None:
    graph = transformer(2, 64)
    tied = Operator("embed", "Embedding", graph.operators[0].parameters, ("embed", "head"), None)
    rows = plan_rows(planned_by_hand(graph).plan, replace(graph, operators=(tied, *graph.operators[1:])))
    assert rows[0].names == ("embed (tied with head)",)


# --- numbers and names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["h.0", "h.1", "h.2", "h.5"], "h.0-2, h.5"),
        (["h.0", "h.1"], "h.0, h.1"),
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["enc.0", "enc.1", "enc.2", "dec.0", "dec.1", "dec.2"], "enc.0-2, dec.0-2"),
        (["h.2", "h.1", "h.0"], "h.2, h.1, h.0"),
        (["h.9", "h.10", "h.11"], "h.9-11"),
        (["x1", "x2", "x3"], "x1, x2, x3"),
        ([], ""),
    ],
)
def test_short_names(names: list[str], expected: str) -> None:
    assert short_names(names) == expected


def test_short_names_say_how_many_they_leave_out() -> None:
    names = [f"blocks.{i}" for i in range(0, 96, 2)]
    text = short_names(names, longest=30)
    assert text == "blocks.0, blocks.2, blocks.4, and 45 more"
    assert len(names) == 48


@pytest.mark.parametrize(
    ("value", "signed", "expected"),
    [
        (2.1408, False, "2.141 s"),
        (0.0123, False, "12.3 ms"),
        (5.7e-6, False, "5.7 us"),
        (0.0, True, "0 s"),
        (-1e-12, True, "0 s"),
        (0.002, True, "+2.0 ms"),
        (-0.002, True, "-2.0 ms"),
        (0.00099996, False, "1.0 ms"),
        (0.00099994, False, "999.9 us"),
        (0.99996, False, "1.000 s"),
    ],
)
def test_seconds(value: float, signed: bool, expected: str) -> None:
    """No figure is wider than tables have room for: 1000.0 us cut the name of a collective."""
    assert format_seconds(value, signed) == expected


@given(st.floats(1e-7, 0.99))
def test_seconds_have_three_digits_before_the_point(value: float) -> None:
    assert float(format_seconds(value).split()[0]) < 1000


@pytest.mark.parametrize(
    ("rate", "expected"), [(999.96e6, "1 GB/s"), (999.94e6, "999.9 MB/s"), (571.2e9, "571.2 GB/s"), (5.0, "5 B/s")]
)
def test_rates_have_four_digits(rate: float, expected: str) -> None:
    assert format_rate(rate, "B/s") == expected


def test_counts() -> None:
    assert [format_count(x) for x in (6.8061, 81.44, 192.31, 1398.2)] == ["6.806", "81.44", "192.3", "1,398"]
    assert [format_parameters(x) for x in (1_557_611_200, 80_411_200, 921_900_000, 3200, 12)] == [
        "1.56 B",
        "80.4 M",
        "922 M",
        "3.20 K",
        "12",
    ]


def test_bars() -> None:
    assert [bar(share, 10) for share in (0.0, 0.26, 1.0, 1.5)] == ["", "###", "##########", "##########"]


def sourced(nodes: int = 1) -> Cluster:
    plain = cluster(nodes, 4)
    memory, context = Figure(24 * GIB, "datasheet: x"), Figure(300 * MIB, "measured: y")
    device = replace(plain.device, nominal_bytes=memory, memory_bytes=memory, reserve_bytes={"cuda_context": context})
    return replace(plain, device=device)


def test_every_figure_of_a_cluster_is_counted() -> None:
    # memory, fp32, bf16, efficiency, memory rate, context, 2 of the link, overlap; 2 more between nodes.
    assert sources_of(sourced()) == "1 measured, 1 datasheet, 7 assumed"
    assert sources_of(sourced(nodes=2)) == "1 measured, 1 datasheet, 9 assumed"
    assert [value for name, value, _ in figures_of(sourced()) if name == "reserve: cuda context"] == ["300.0 MiB"]


def test_rates_name_their_sources() -> None:
    model = ModelRef("a model", "0", 1, 1, "fp32")
    assert rates(sourced(), model) == (
        "fp32 10 TFLOP/s (assumed) at 100% (assumed), memory 600 GB/s (assumed), link 10 GB/s (assumed), "
        "communication overlaps (assumed)"
    )
    assert "between nodes 1 GB/s (assumed)" in rates(sourced(nodes=2), model)
