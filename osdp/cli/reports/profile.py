"""What `osdp profile` prints: what was measured, how well it fits, and two profiles side by side."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from osdp.cli.reports.figures import format_rate, format_seconds
from osdp.cli.terminal import make_table, print_section
from osdp.planning.clusters import reserve_use
from osdp.profile.profile_diff import Row
from planner.cost.workload import Workload
from profiler.byte_sizes import format_bytes
from profiler.cluster.cluster import Cluster
from profiler.cluster.measurements import CollectiveTimes, Measured, call_key
from profiler.cluster.piecewise_fit import is_bad
from profiler.model_graph import ModelGraph

SCHEMA = "osdp.profile_comparison/1"
UNIT_TENSORS = 12
"""Of a unit whose host time is printed, as many as a layer of GPT-2 has."""


def print_profile(console: Console, cluster: Cluster, graph: ModelGraph | None, path: Path) -> None:
    """Print what was measured; `graph` is of the model whose calls were."""
    measured = cluster.measured
    assert measured is not None, "`osdp profile` measures it"
    title = f"{cluster.nodes} x {cluster.gpus_per_node} ranks, measured on {measured.date}: {measured.versions}; "
    print_section(console, title + f"medians of {measured.repetitions}, all ranks at once", _rates(cluster))
    if measured.collectives:
        headline = "Collectives, including the copies that FSDP2 makes before and after them"
        print_section(console, headline, _collectives(measured), _rings(cluster))
    if graph is not None:
        print_section(console, f"Operators of {graph.name}, {graph.precision}", _calls(cluster, graph))
    for note in measured.notes:
        print_section(console, "Note", note)
    console.print(f"Written to {path}. Plan with it: osdp plan --cluster {path}")


def _rates(cluster: Cluster) -> Table:
    device, measured = cluster.device, cluster.measured
    assert measured is not None
    table = make_table("figure", ">measured", "")
    for precision, rate in device.matmul_flops_per_s.items():
        table.add_row(f"matrix products, {precision}", format_rate(rate.value, "FLOP/s"), "")
    table.add_row("memory-bound kernels", format_rate(device.memory_bytes_per_s.value, "B/s"), "")
    reserved = f"{format_bytes(cluster.reserve_bytes)} of it reserved for {reserve_use(device)}"
    table.add_row("memory per rank", format_bytes(device.memory_bytes.value), reserved)
    if (launch := cluster.launch) is not None:
        table.add_row(
            "host, launching a kernel", format_seconds(launch.kernel_s.value), "as a mean of the model's calls"
        )
        unit_s = launch.unit_s.value + UNIT_TENSORS * launch.unit_tensor_s.value
        what = f"host, gather or reduction of an FSDP unit of {UNIT_TENSORS} tensors"
        table.add_row(what, format_seconds(unit_s), "hooks and launches")
        if launch.stepped_tensor_s is not None:
            table.add_row("host, stepping a tensor", format_seconds(launch.stepped_tensor_s.value), "fused")
    if not measured.collectives:
        link = format_rate(cluster.intra.bytes_per_s.value, "B/s")
        table.add_row("communication", "", f"not measured, as there is one rank; a link of {link} is assumed")
        return _with_optimizers(table, measured)
    longer = f"computation then takes {measured.overlapped_slowdown:.2f} times as long"
    table.add_row("communication overlaps computation", *(("yes", longer) if measured.asynchronous else ("no", "")))
    table.add_row("FSDP2 overlaps them", "yes" if cluster.overlaps else "no", "")
    if measured.unit_overhead_s is not None:
        unit = format_seconds(measured.unit_overhead_s)
        table.add_row("overhead per collective of an FSDP unit", unit, "hook overhead and straggler wait")
    if measured.one_sided_overhead_s is not None:
        table.add_row("overhead per pull or push of an ODC unit", format_seconds(measured.one_sided_overhead_s), "")
    return _with_optimizers(table, measured)


def _with_optimizers(table: Table, measured: Measured) -> Table:
    for one in measured.optimizers:
        table.add_row(f"{one.name}, 100 tensors, 1 GB", format_seconds(one.step_s(100, 1e9)), "")
    return table


def _collectives(measured: Measured) -> Table:
    """Return the fits: time of size 0, last slope, times of some sizes; the largest error and the number of lines."""
    table = make_table("=collective", ">latency", ">bandwidth", ">64 KiB", ">1 MiB", ">16 MiB", "fit")
    for one in measured.collectives:
        first, last = one.pieces[0], one.pieces[-1]
        rate = format_rate(1 / last.s_per_byte, "B/s") if last.s_per_byte else "flat"
        largest = one.points[-1][0]
        times = [format_seconds(one.time_s(size)) if size <= largest else "" for size in (2**16, 2**20, 2**24)]
        fit = f"{one.residual:.0%}, {len(one.pieces)}" + " (bad)" * is_bad(one.residual)
        table.add_row(_name(one), format_seconds(first.latency_s), rate, *times, fit)
    return table


def _name(one: CollectiveTimes) -> str:
    ring = "ring " * (one.algorithm == "ring")
    return f"{ring}{one.operation.replace('_', '-')}, {_ranks(one.ranks, one.stride)}"


def _ranks(ranks: int, stride: int) -> str:
    return f"{ranks} ranks" if stride == 1 else f"{ranks} ranks {stride} apart"


def _rings(cluster: Cluster) -> str:
    rules = [f"{_ranks(rule.ranks, rule.stride)} from {format_bytes(rule.from_bytes)}" for rule in cluster.ring]
    if not rules:
        return "Reduce-scatters are left to the backend: rings were not measured to be faster."
    return f"Reduce-scatters run as rings, which was faster, over {'; '.join(rules)}."


def _calls(cluster: Cluster, graph: ModelGraph) -> Table:
    """Return a table of measured times beside those that the roofline of the measured rates gives."""
    assert cluster.measured is not None
    table = make_table("operator", ">count", ">batch", ">forward", ">roofline", ">backward", ">roofline", ">saved")
    by_key = {call_key(graph, call): call for call in graph.calls}
    counts = {key: sum(call_key(graph, call) == key for call in graph.calls) for key in by_key}
    for one in cluster.measured.calls:
        call, name = by_key[one.key], (one.name.removeprefix(f"{graph.name} "), str(counts[one.key]))
        for index, micro_batch in enumerate(one.micro_batches):
            load = Workload.of(graph, cluster, "adam", micro_batch)
            forward = one.forward_s[index], load.compute_s(call.forward, graph.matmul_precision)
            backward = one.backward_s[index], load.compute_s(call.backward, graph.matmul_precision)
            times, saved = map(format_seconds, (*forward, *backward)), format_bytes(one.saved_bytes[index])
            table.add_row(*(("", "") if index else name), str(micro_batch), *times, saved)
    return table


def comparison_object(rows: Sequence[Row], before: str, after: str) -> dict[str, Any]:
    """Return two profiles as plain data."""
    figures = [asdict(row) | {"ratio": row.ratio} for row in rows]
    return {"schema": SCHEMA, "before": before, "after": after, "figures": figures}


def print_comparison(console: Console, rows: Sequence[Row], before: str, after: str) -> None:
    """Print two profiles side by side."""
    for part, found in groupby(rows, key=lambda row: row.part):
        table = make_table("figure", ">before", ">after", ">ratio")
        for row in found:
            values = [_value(value, row.unit) for value in (row.before, row.after)]
            table.add_row(row.what, *values, "" if row.ratio is None else f"{row.ratio:.2f}")
        print_section(console, f"{part.capitalize()}: {before} against {after}", table)


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_seconds(value) if unit == "s" else format_rate(value, unit)
