"""Reads a cluster, published or measured, from its YAML file and validates it."""

from collections.abc import Iterator
from pathlib import Path

from profiler.cluster.cluster import Cluster, Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import Measured
from profiler.yaml_files import Problem, read_yaml

DEVICE_TYPES = ("cuda", "cpu")
PRECISIONS = ("fp32", "bf16", "fp16")


def read_cluster(path: Path) -> Cluster:
    """Return the cluster in the file at `path`; raises OsdpError with the line of what is wrong."""
    return read_yaml(path, Cluster, schema=Cluster.SCHEMA, check=_problems)


def _problems(cluster: Cluster) -> Iterator[Problem]:
    """Find values that have the right type but are impossible."""
    device = cluster.device
    if device.kind not in DEVICE_TYPES:
        yield Problem(("device", "kind"), "is not known", repr(device.kind), f"one of {', '.join(DEVICE_TYPES)}")
    if "fp32" not in device.matmul_flops_per_s:
        yield Problem(("device", "matmul_flops_per_s", "fp32"), "is missing")
    for precision, figure in device.matmul_flops_per_s.items():
        at = ("device", "matmul_flops_per_s", precision)
        if precision not in PRECISIONS:
            yield Problem(at, "is not known", precision, f"one of {', '.join(PRECISIONS)}")
        yield from _positive(at, figure)
    yield from _positive(("device", "memory_bytes"), device.memory_bytes)
    yield from _positive(("device", "memory_bytes_per_s"), device.memory_bytes_per_s)
    for name in ("matmul_efficiency", "fp32_efficiency"):
        fraction: Figure | None = getattr(device, name)
        if fraction is not None and not 0 < fraction.value <= 1:
            yield Problem(("device", name, "value"), "is wrong", str(fraction.value), "more than 0 and at most 1")
    if cluster.reserve_bytes >= device.memory_bytes.value:
        got, expected = f"{cluster.reserve_bytes:.0f} bytes in all", "less than memory_bytes"
        yield Problem(("device", "reserve_bytes"), "is too large", got, expected)
    yield from _link_problems("intra", cluster.intra)
    if cluster.inter is not None:
        yield from _link_problems("inter", cluster.inter)
    if cluster.measured is not None:
        yield from _measured_problems(cluster.measured)
    for name in ("kernel_s", "unit_s", "unit_tensor_s", "stepped_tensor_s") if cluster.launch else ():
        launching: Figure | None = getattr(cluster.launch, name)
        if launching is not None and launching.value > 1:
            at = ("launch", name, "value")
            yield Problem(at, "is wrong", f"{launching.value} s", "at most 1 second", "it is in seconds")
    if cluster.host is not None:
        yield from _positive(("host", "link_bytes_per_s"), cluster.host.link_bytes_per_s)
        yield from _positive(("host", "memory_bytes_per_s"), cluster.host.memory_bytes_per_s)


def _measured_problems(measured: Measured) -> Iterator[Problem]:
    """Find inconsistent measurements."""
    seen = set()
    for number, times in enumerate(measured.collectives):
        at = ("measured", "collectives", str(number))
        starts, sizes = [piece.from_bytes for piece in times.pieces], [size for size, _ in times.points]
        if not starts or starts[0] != 0 or sorted(starts) != starts:
            expected = "one or more in order of from_bytes, the first from 0"
            yield Problem((*at, "pieces"), "is wrong", f"{len(starts)} pieces", expected)
        if not sizes or sorted(sizes) != sizes:
            yield Problem((*at, "points"), "is wrong", f"{len(sizes)} points", "one or more, by size")
        line = times.operation, times.ranks, times.stride, times.algorithm
        if line in seen:
            got = f"{times.algorithm} {times.operation}, {times.ranks} ranks that are {times.stride} apart"
            yield Problem(at, "is given twice", got, "each collective once for each group size and stride")
        seen.add(line)
    for number, call in enumerate(measured.calls):
        sizes = list(call.micro_batches)
        counts = {len(values) for values in (sizes, call.forward_s, call.backward_s, call.saved_bytes)}
        if len(counts) != 1 or not sizes or sorted(set(sizes)) != sizes:
            field = ("measured", "calls", str(number), "micro_batches")
            yield Problem(field, "is wrong", str(sizes), "ascending numbers, and one time of each for every number")


def _link_problems(name: str, link: Link) -> Iterator[Problem]:
    yield from _positive((name, "bytes_per_s"), link.bytes_per_s)
    if link.latency_s.value > 1:
        at = (name, "latency_s", "value")
        yield Problem(at, "is wrong", f"{link.latency_s.value} s", "at most 1 second", "it is in seconds")


def _positive(at: tuple[str, ...], figure: Figure) -> Iterator[Problem]:
    if figure.value <= 0:
        yield Problem((*at, "value"), "is wrong", str(figure.value), "more than 0")
