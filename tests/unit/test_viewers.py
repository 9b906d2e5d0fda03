"""What `osdp plan` writes for PyTorch's memory viewer and for Perfetto, replayed by hand."""

from __future__ import annotations

import json
import pickle
from base64 import b64decode
from copy import deepcopy
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, trace_once
from thoroughness import some
from torch.cuda import _memory_viz

from osdp.planning.clusters import load_cluster
from osdp.planning.request import Request, plan_graph
from osdp.zoo import load_model
from planner.cost.memory_over_step import moments_of_step
from planner.pins import parse_pin

CASES: tuple[tuple[str, ...], ...] = (
    ("--cluster", "titan-rtx-8", "--mem", "2GB"),
    ("--cluster", "titan-rtx-8", "--batch", "4", "--pin", "*=shard"),
    ("--cluster", "titan-rtx-8", "--batch", "4", "--pin", "*=replicate"),
    ("--cluster", "titan-rtx-8", "--batch", "2", "--global-batch", "64", "--pin", "*=shard_grad"),
    ("--cluster", "a100-2x8", "--batch", "2", "--pin", "*=group_shard:8", "--pin", "blocks.*=recompute"),
    ("--cluster", "a100-2x8", "--batch", "2", "--pin", "*=hierarchical", "--precision", "bf16"),
    ("--cluster", "cpu-gloo", "--batch", "3", "--pin", "*=owner", "--imbalance", "0.4"),
    ("--cluster", "h100-8", "--batch", "2", "--pin", "*=odc:8", "--global-batch", "48"),
    ("--cluster", "h100-8", "--batch", "1", "--pin", "*=shard+offload"),
    ("--cluster", "h100-8", "--batch", "2", "--pin", "*=shard", "--optimizer", "sgd", "--pin", "blocks.1=selective"),
)
"""A plan of each kind: what rests, what is gathered, one or several micro-batches, streams that overlap or do not."""


Written = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
WRITTEN: dict[tuple[str, ...], Written] = {}
"""By arguments: several tests look at the same plan."""


def planned(cli: Cli, *arguments: str) -> Written:
    """Return the report, the snapshot and the timeline of a plan for gpt2-tiny."""
    if arguments not in WRITTEN:
        files = ("--memory-snapshot", "m.pickle", "--timeline", "t.json")
        outcome = cli("plan", "--model", "gpt2-tiny", *arguments, *files, "--json")
        assert outcome.status == 0, outcome
        snapshot, trace = pickle.loads(Path("m.pickle").read_bytes()), json.loads(Path("t.json").read_text())
        WRITTEN[arguments] = json.loads(outcome.out), snapshot, trace
    return deepcopy(WRITTEN[arguments])


def replayed(snapshot: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """Return the peak of live bytes and what lives at the end, by address; blocks must be apart and freed as made."""
    (entries,) = snapshot["device_traces"]
    live, highest, segments = dict[int, int](), 0, dict[int, int]()
    for entry in entries:
        address, size = entry["addr"], entry["size"]
        assert size > 0
        if entry["action"] == "segment_alloc":
            segments[address] = size
        elif entry["action"] == "alloc":
            assert any(start <= address and address + size <= start + all_ for start, all_ in segments.items())
            assert all(address + size <= at or at + taken <= address for at, taken in live.items())
            live[address] = size
            highest = max(highest, sum(live.values()))
        elif entry["action"] == "free_requested":
            assert live[address] == size
        else:
            assert entry["action"] == "free_completed"
            assert live.pop(address) == size
    return highest, live


@pytest.mark.parametrize("arguments", CASES)
def test_the_replayed_peak_is_the_predicted_one(cli: Cli, arguments: tuple[str, ...]) -> None:
    report, snapshot, _ = planned(cli, *arguments)
    predicted = report["predicted"]
    highest, live = replayed(snapshot)
    assert highest == predicted["peak_memory_bytes"] - predicted["memory_by_category"]["reserve"]
    (segment,) = snapshot["segments"]
    blocks = {one["address"]: one["size"] for one in segment["blocks"] if one["state"] == "active_allocated"}
    assert blocks == live
    assert sum(one["size"] for one in segment["blocks"]) == segment["total_size"]


@pytest.mark.parametrize("arguments", CASES)
def test_live_bytes_of_the_peak_are_those_of_the_plan_by_category(cli: Cli, arguments: tuple[str, ...]) -> None:
    report, snapshot, _ = planned(cli, *arguments)
    live, highest, at_peak = dict[int, tuple[str, int]](), 0, dict[str, int]()
    for entry in snapshot["device_traces"][0][1:]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["frames"][0]["name"], entry["size"]
            total = sum(size for _, size in live.values())
            if total > highest:
                highest, at_peak = total, {}
                for category, size in live.values():
                    at_peak[category] = at_peak.get(category, 0) + size
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]
    wanted = report["predicted"]["memory_by_category"]
    for category in (wanted.keys() | at_peak.keys()) - {"reserve"}:
        # Each holding is rounded down to whole bytes, and what that takes is given to the largest.
        assert at_peak.get(category, 0) == pytest.approx(wanted.get(category, 0), abs=32), category


def test_pytorchs_own_functions_take_the_snapshot(cli: Cli) -> None:
    report, snapshot, _ = planned(cli, *CASES[1])
    assert "Summary of segments" in _memory_viz.segsum(snapshot)
    said = _memory_viz.trace(snapshot)
    assert said.count(" = cudaMalloc(") == 1
    assert said.count("MEM[") == 0  # every block lies in a known segment
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        inside = page.partition('"base64": "')[2].partition('"')[0]
        assert pickle.loads(b64decode(inside)) == snapshot
    (segment,) = snapshot["segments"]
    for flames in (_memory_viz.memory, _memory_viz.segments):
        lines = flames(snapshot, format_flamegraph=lambda lines: lines).splitlines()
        sizes = [(line.rpartition(" ")[0], int(line.rpartition(" ")[2])) for line in lines]
        assert sum(size for _, size in sizes) == segment["total_size"]
        assert sum(size for name, size in sizes if ";active_allocated;" in name) == segment["active_size"]
    still = _memory_viz.filter_alloc_free_pairs(deepcopy(snapshot))["device_traces"][0]
    assert {entry["addr"]: entry["size"] for entry in still if entry["action"] == "alloc"} == replayed(snapshot)[1]
    frames = [frame["name"] for entry in snapshot["device_traces"][0] for frame in entry["frames"]]
    assert any(name.startswith("forward of blocks.0.") for name in frames)
    assert report["predicted"]["peak_phase"] in frames


@pytest.mark.parametrize("arguments", CASES)
def test_the_timeline_lasts_as_long_as_the_step(cli: Cli, arguments: tuple[str, ...]) -> None:
    report, _, trace = planned(cli, *arguments)
    predicted = report["predicted"]
    spans = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    threads = {entry["tid"]: entry["args"]["name"] for entry in trace["traceEvents"] if entry["name"] == "thread_name"}
    # `owner` communicates on the compute stream.
    rows = {name.partition(":")[0] for name in threads.values()}
    assert rows == ({"computation"} if "*=owner" in arguments else {"computation", "communication"})
    tolerance_us = 1e-6 * predicted["step_time_s"] * 1e6
    # Nothing waits for nothing: together the streams are busy from the start to the end of the step.
    busy_us, end_us = 0.0, 0.0
    for start, end in sorted((one["ts"], one["ts"] + one["dur"]) for one in spans):
        busy_us += max(0.0, end - max(start, end_us))
        end_us = max(end_us, end)
    assert end_us == pytest.approx(predicted["step_time_s"] * 1e6, rel=1e-6)
    assert busy_us == pytest.approx(end_us, rel=1e-6)
    for thread in threads:
        here = sorted((one["ts"], one["dur"]) for one in spans if one["tid"] == thread)
        assert all(a + dur <= b + tolerance_us for (a, dur), (b, _) in pairwise(here))
    named = [one for one in spans if one["cat"] in ("forward", "backward")]
    assert {"blocks.0", "blocks.3"} <= {one["name"].split(" ")[1] for one in named}
    assert any(name == "blocks.0.attention.output" for one in named for name in one["args"]["operators"])
    optimizer_us = sum(one["dur"] for one in spans if one["cat"] == "optimizer")
    assert optimizer_us == pytest.approx(predicted["time_by_term"]["optimizer_s"] * 1e6, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--memory-snapshot", "m.json"), "FILE.pickle"),
        (("--timeline", "t.pickle"), "FILE.json"),
        (("--timeline", "no/t.json"), "mkdir -p no"),
        (("--timeline", "t.json", "--mem", "1GB,2GB"), "one limit"),
    ],
)
def test_what_cannot_be_written_is_refused(cli: Cli, arguments: tuple[str, ...], part: str) -> None:
    assert part in cli.refused("plan", "--model", "gpt2-tiny", "--cluster", "cpu-gloo", *arguments)
    assert not list(Path().glob("*"))


PINS: tuple[tuple[str, ...], ...] = (
    (),
    ("*=shard",),
    ("*=shard_grad", "blocks.*=recompute"),
    ("*=owner",),
    ("*=secondary_shard:2",),
    ("*=shard+offload",),
)
CLUSTERS = "titan-rtx-8", "a100-2x8", "cpu-gloo"


@pytest.mark.parametrize(("accumulation", "pins", "cluster"), some([*product((1, 3), PINS, CLUSTERS)], 5))
def test_moments_over_a_step_are_never_above_the_peak_and_once_at_it(
    accumulation: int, pins: tuple[str, ...], cluster: str
) -> None:
    """All of them together with --thorough; by default each has a turn."""
    target = load_cluster(cluster)
    ranks = target.nodes * target.gpus_per_node
    if target.gpus_per_node <= 2 and "*=secondary_shard:2" in pins:
        pytest.skip("a node of two ranks has no smaller group")
    graph = trace_once(load_model("gpt2-tiny"), "fp32", target.device.kind)
    asked = Request(4 << 30, micro_batch=2, global_batch=2 * ranks * accumulation, pins=tuple(map(parse_pin, pins)))
    run = plan_graph(graph, target, asked).as_run
    totals = [moment.total_bytes for moment in moments_of_step(run.options, run.load)]
    assert max(totals) == pytest.approx(run.peak.total_bytes - run.load.cluster.reserve_bytes, rel=1e-12)
    assert all(holding.size_bytes > 0 for one in moments_of_step(run.options, run.load) for holding in one.holdings)
