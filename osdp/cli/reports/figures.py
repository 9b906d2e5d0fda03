"""Numbers as reports print them, and where those of a cluster come from."""

from collections import Counter
from collections.abc import Iterator

from planner.plan import ModelRef
from profiler.byte_sizes import format_bytes
from profiler.cluster.cluster import Cluster, Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import Measured
from profiler.path_labels import path_label

KINDS = ("measured", "datasheet", "paper", "derived", "assumed")
"""What a source can be, the firmest first."""


def figures_of(cluster: Cluster) -> Iterator[tuple[str, str, str]]:
    """Yield (field, value with unit, source) of everything that a cluster file claims."""
    device = cluster.device
    yield "memory", format_bytes(device.memory_bytes.value), device.memory_bytes.source
    for precision, figure in device.matmul_flops_per_s.items():
        yield f"matmul {precision}", format_rate(figure.value, "FLOP/s"), figure.source
    yield "matmul efficiency", f"{device.matmul_efficiency.value:.0%}", device.matmul_efficiency.source
    if (of_fp32 := device.fp32_efficiency) is not None:
        yield "matmul efficiency, fp32", f"{of_fp32.value:.0%}", of_fp32.source
    yield "memory rate", format_rate(device.memory_bytes_per_s.value, "B/s"), device.memory_bytes_per_s.source
    for name, figure in device.reserve_bytes.items():
        yield f"reserve: {name.replace('_', ' ')}", format_bytes(figure.value), figure.source
    yield from _link_figures("in a node", cluster.intra)
    if cluster.inter is not None:
        yield from _link_figures("between nodes", cluster.inter)
    if (nccl := cluster.nccl) is not None:
        links = "NVLink with SHARP" if nccl.nvls else "NVLink" if nccl.nvlink else "PCI Express"
        yield "NCCL's tuning", f"{nccl.architecture}, {links}", nccl.source
    if cluster.host is not None:
        link, memory = cluster.host.link_bytes_per_s, cluster.host.memory_bytes_per_s
        yield "link to the host", format_rate(link.value, "B/s"), link.source
        yield "host memory rate", format_rate(memory.value, "B/s"), memory.source
    if (launch := cluster.launch) is not None:
        yield "host, launching a kernel", format_seconds(launch.kernel_s.value), launch.kernel_s.source
        yield "host, gather or reduction of a unit", format_seconds(launch.unit_s.value), launch.unit_s.source
        yield "and for each tensor of it", format_seconds(launch.unit_tensor_s.value), launch.unit_tensor_s.source
        if (stepped := launch.stepped_tensor_s) is not None:
            yield "host, stepping a tensor", format_seconds(stepped.value), stepped.source
    yield "overlap", "yes" if cluster.overlaps else "no", cluster.overlap_source
    if cluster.measured is not None:
        yield from _measured_figures(cluster.measured)


def _measured_figures(measured: Measured) -> Iterator[tuple[str, str, str]]:
    how = f"measured: {measured.date}, {measured.versions}, medians of {measured.repetitions}"
    if measured.collectives:
        worst = max(one.residual for one in measured.collectives)
        yield "times of collectives", f"{len(measured.collectives)} fits", f"{how}; within {worst:.0%}"
    if measured.calls:
        yield "times of operators", f"{len(measured.calls)} kinds", how
    if measured.collectives:
        if measured.unit_overhead_s is not None:
            yield "overhead of an FSDP unit", format_seconds(measured.unit_overhead_s), how
        yield "slowdown while communicating", f"{measured.overlapped_slowdown:.2f} x", how
    for one in measured.optimizers:
        yield f"{one.name}, 100 tensors, 1 GB", format_seconds(one.step_s(100, 1e9)), one.s_per_byte.source


def _link_figures(where: str, link: Link) -> Iterator[tuple[str, str, str]]:
    yield f"bandwidth {where}", format_rate(link.bytes_per_s.value, "B/s"), link.bytes_per_s.source
    yield f"latency {where}", format_seconds(link.latency_s.value), link.latency_s.source


def source_kind(source: str) -> str:
    """Return what a source is: `datasheet`, `assumed`, ..."""
    return source.partition(":")[0]


def sources_of(cluster: Cluster) -> str:
    """Return how many of a cluster's figures have which kind of source."""
    counts = Counter(source_kind(source) for _, _, source in figures_of(cluster))
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])


def assumed_of(cluster: Cluster) -> list[str]:
    """Return which of a cluster's figures are assumed."""
    return [name for name, _, source in figures_of(cluster) if source_kind(source) == "assumed"]


def rates(cluster: Cluster, model: ModelRef) -> str:
    """Return the rates that the predicted times of a model rest on, each with the kind of its source."""
    device = cluster.device

    def sourced(text: str, figure: Figure) -> str:
        return f"{text} ({source_kind(figure.source)})"

    name = device.rate_name(model.autocast) or device.rate_name(model.precision)
    peak, efficiency = device.matmul_flops_per_s[name], device.efficiency(name)
    matmul = sourced(f"{name} {format_rate(peak.value, 'FLOP/s')}", peak)
    parts = [
        matmul + sourced(f" at {efficiency.value:.0%}", efficiency),
        sourced(f"memory {format_rate(device.memory_bytes_per_s.value, 'B/s')}", device.memory_bytes_per_s),
        sourced(f"link {format_rate(cluster.intra.bytes_per_s.value, 'B/s')}", cluster.intra.bytes_per_s),
    ]
    if cluster.inter is not None and cluster.nodes > 1:
        inter = cluster.inter.bytes_per_s
        parts.append(sourced(f"between nodes {format_rate(inter.value, 'B/s')}", inter))
    overlap = "communication overlaps" if cluster.overlaps else "communication does not overlap"
    parts.append(f"{overlap} ({source_kind(cluster.overlap_source)})")
    if (found := cluster.measured) is not None:
        collectives = f"{len(found.collectives)} collectives and " if found.collectives else ""
        parts.append(f"{collectives}{len(found.calls)} kinds of operators timed (measured)")
    return ", ".join(parts)


def format_rate(per_s: float, unit: str) -> str:
    """Return a rate with an SI prefix: `571.2 GB/s`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if float(f"{per_s / factor * 1e3:.4g}") >= 1e3:  # as it would be printed without the prefix
            return f"{per_s / factor:.4g} {prefix}{unit}"
    return f"{per_s:.4g} {unit}"


def format_seconds(seconds: float, signed: bool = False) -> str:
    """Return a duration as `1.234 s`, `12.3 ms` or `5.7 us`."""
    sign, size = "+" if signed else "", abs(seconds)
    if round(size * 1e3, 1) >= 1e3:  # as it would be printed
        return f"{seconds:{sign}.3f} s"
    if round(size * 1e6, 1) >= 1e3:
        return f"{seconds * 1e3:{sign}.1f} ms"
    return f"{seconds * 1e6:{sign}.1f} us" if size >= 5e-8 else "0 s"


def format_count(count: float) -> str:
    """Return a rate of things with about four digits: `6.806`, `81.4`, `12,345`."""
    digits = next((digits for digits, most in ((3, 10), (2, 100), (1, 1000)) if round(count, digits) < most), 0)
    return f"{count:,.{digits}f}"


def format_parameters(count: int) -> str:
    """Return a number of parameters: `1.56 B`, `82.0 M`, `3.2 K`."""
    for factor, prefix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= factor:
            scaled = count / factor
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {prefix}"
    return str(count)


def name_phase(phase: str) -> str:
    """Return a plan's `peak_phase` as reports print it after "in"."""
    if phase.endswith(" of "):
        return phase + path_label("")
    return "the optimizer step" if phase == "optimizer" else phase


def bar(share: float, width: int = 20) -> str:
    """Return a bar for a share from 0 to 1."""
    return "#" * min(width, round(share * width))
