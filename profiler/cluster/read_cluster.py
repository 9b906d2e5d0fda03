"""Reads a cluster, published or measured, from its YAML file and checks that it makes sense."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from profiler.cluster.cluster import Cluster, Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CallTimes, CollectiveTimes, Measured, RingRule
from profiler.yaml_files import Problem, read_yaml

KINDS = ("cuda", "cpu")
PRECISIONS = ("fp32", "bf16")


def read_cluster(path: Path) -> Cluster:
    """Return the cluster in the file at `path`; raises OsdpError with the line of what is wrong."""
    return read_yaml(path, Cluster, schema=Cluster.SCHEMA, check=_problems)


def _problems(cluster: Cluster) -> Iterator[Problem]:
    """Find values that have the right type and yet cannot be."""
    device = cluster.device
    if device.kind not in KINDS:
        yield Problem(("device", "kind"), "is not known", repr(device.kind), f"one of {', '.join(KINDS)}")
    if "fp32" not in device.matmul_flops_per_s:
        yield Problem(("device", "matmul_flops_per_s", "fp32"), "is missing")
    for precision, figure in device.matmul_flops_per_s.items():
        at = ("device", "matmul_flops_per_s", precision)
        if precision not in PRECISIONS:
            yield Problem(at, "is not known", precision, f"one of {', '.join(PRECISIONS)}")
        yield from _positive(at, figure)
    yield from _positive(("device", "memory_bytes"), device.memory_bytes)
    yield from _positive(("device", "memory_bytes_per_s"), device.memory_bytes_per_s)
    if not 0 < device.matmul_efficiency.value <= 1:
        at = ("device", "matmul_efficiency", "value")
        yield Problem(at, "is wrong", str(device.matmul_efficiency.value), "more than 0 and at most 1")
    if cluster.reserve_bytes >= device.memory_bytes.value:
        got, expected = f"{cluster.reserve_bytes:.0f} bytes in all", "less than memory_bytes"
        yield Problem(("device", "reserve_bytes"), "is too large", got, expected)
    yield from _link_problems("intra", cluster.intra)
    if cluster.inter is not None:
        yield from _link_problems("inter", cluster.inter)
    if cluster.measured is not None:
        yield from _measured_problems(cluster.measured)
    for number, rule in enumerate(cluster.ring):
        yield from _ring_problems(number, rule)
    if cluster.host is not None:
        yield from _positive(("host", "link_bytes_per_s"), cluster.host.link_bytes_per_s)
        yield from _positive(("host", "memory_bytes_per_s"), cluster.host.memory_bytes_per_s)


def _measured_problems(measured: Measured) -> Iterator[Problem]:
    """Find measurements that cannot be, or that do not fit together in number."""
    if not measured.overlapped_slowdown >= 1:
        at = ("measured", "overlapped_slowdown")
        yield Problem(at, "is wrong", str(measured.overlapped_slowdown), "at least 1: a factor of time")
    yield from _not_negative(("measured", "unit_overhead_s"), measured.unit_overhead_s)
    yield from _not_negative(("measured", "one_sided_overhead_s"), measured.one_sided_overhead_s or 0.0)
    seen = set()
    for number, times in enumerate(measured.collectives):
        place = ("measured", "collectives", str(number))
        yield from _collective_problems(place, times)
        line = times.operation, times.ranks, times.stride, times.algorithm
        if line in seen:
            yield Problem(
                place,
                "is given twice",
                f"{times.algorithm} {times.operation}, {times.ranks} ranks that are {times.stride} apart",
                "each collective once in each kind of group",
            )
        seen.add(line)
    for number, call in enumerate(measured.calls):
        yield from _call_problems(("measured", "calls", str(number)), call)


def _collective_problems(at: tuple[str, ...], times: CollectiveTimes) -> Iterator[Problem]:
    yield from _group_problems(at, times.ranks, times.stride)
    pieces, sizes = times.pieces, [size for size, _ in times.points]
    if not pieces or pieces[0].from_bytes != 0 or sorted(pieces, key=lambda one: one.from_bytes) != list(pieces):
        yield Problem(
            (*at, "pieces"), "is wrong", f"{len(pieces)} pieces", "one or more in order of from_bytes, the first from 0"
        )
    for index, piece in enumerate(pieces):
        yield from _not_negative((*at, "pieces", str(index), "s_per_byte"), piece.s_per_byte)
    if not sizes or sorted(sizes) != sizes:
        yield Problem((*at, "points"), "is wrong", f"{len(sizes)} points", "one or more, by size")


def _call_problems(at: tuple[str, ...], call: CallTimes) -> Iterator[Problem]:
    counts = {len(values) for values in (call.micro_batches, call.forward_s, call.backward_s, call.saved_bytes)}
    if len(counts) != 1 or not call.micro_batches or sorted(set(call.micro_batches)) != list(call.micro_batches):
        yield Problem(
            (*at, "micro_batches"),
            "is wrong",
            str(list(call.micro_batches)),
            "ascending numbers, and as many of every time",
        )
    for name in ("forward_s", "backward_s", "saved_bytes"):
        for index, value in enumerate(getattr(call, name)):
            yield from _not_negative((*at, name, str(index)), value)


def _ring_problems(number: int, rule: RingRule) -> Iterator[Problem]:
    at = ("ring", str(number))
    yield from _group_problems(at, rule.ranks, rule.stride)
    yield from _not_negative((*at, "from_bytes"), rule.from_bytes)


def _group_problems(at: tuple[str, ...], ranks: int, stride: int) -> Iterator[Problem]:
    if ranks < 2:
        yield Problem((*at, "ranks"), "is wrong", str(ranks), "2 or more")
    if stride < 1:
        yield Problem((*at, "stride"), "is wrong", str(stride), "1 or more")


def _link_problems(name: str, link: Link) -> Iterator[Problem]:
    yield from _positive((name, "bytes_per_s"), link.bytes_per_s)
    if link.latency_s.value > 1:
        at = (name, "latency_s", "value")
        yield Problem(at, "is wrong", f"{link.latency_s.value} s", "at most 1 second", "it is in seconds")


def _positive(at: tuple[str, ...], figure: Figure) -> Iterator[Problem]:
    if figure.value <= 0:
        yield Problem((*at, "value"), "is wrong", str(figure.value), "more than 0")


def _not_negative(at: tuple[str, ...], value: float) -> Iterator[Problem]:
    if value < 0:
        yield Problem(at, "is wrong", str(value), "0 or more")
