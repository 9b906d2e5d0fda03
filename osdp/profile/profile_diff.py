"""Two profiles side by side: every figure that both have, or one alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from profiler.cluster.cluster import Cluster
from profiler.cluster.measurements import CollectiveTimes, Measured

SIZES_BYTES = (2**16, 2**20, 2**24)
"""At which the fits of collectives are compared, where both measured so large ones."""

LAUNCHES = {
    "kernel": "kernel_s",
    "gather and reduction": "unit_s",
    "tensor of those": "unit_tensor_s",
    "tensor of an optimizer": "stepped_tensor_s",
}
"""What the host launches, and the figure of it."""


@dataclass(frozen=True)
class Row:
    """One figure of both."""

    part: str
    """`device`, `links`, `collectives`, `calls`, `units`, `host` or `optimizers`."""
    what: str
    unit: str
    """`s`, `B/s` or `FLOP/s`."""
    before: float | None
    """None: not measured there."""
    after: float | None

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before and self.after is not None else None


def compare_profiles(before: Cluster, after: Cluster) -> tuple[Row, ...]:
    return (*_device(before, after), *_links(before, after), *_collectives(before, after), *_calls(before, after))


def _device(before: Cluster, after: Cluster) -> Iterator[Row]:
    rates = before.device.matmul_flops_per_s, after.device.matmul_flops_per_s
    for name in dict.fromkeys((*rates[0], *rates[1])):
        one, other = (found[name].value if name in found else None for found in rates)
        yield Row("device", f"matmul {name}", "FLOP/s", one, other)
    memory = before.device.memory_bytes_per_s.value, after.device.memory_bytes_per_s.value
    yield Row("device", "memory rate", "B/s", *memory)


def _links(before: Cluster, after: Cluster) -> Iterator[Row]:
    for name, one, other in (("in a node", before.intra, after.intra), ("between nodes", before.inter, after.inter)):
        if one is not None or other is not None:
            for what, field, unit in (("bandwidth", "bytes_per_s", "B/s"), ("latency", "latency_s", "s")):
                values = [None if link is None else getattr(link, field).value for link in (one, other)]
                yield Row("links", f"{what} {name}", unit, *values)


def _collectives(before: Cluster, after: Cluster) -> Iterator[Row]:
    found = [{_name(one): one for one in _measured(cluster).collectives} for cluster in (before, after)]
    for name in dict.fromkeys((*found[0], *found[1])):
        both = [times.get(name) for times in found]
        largest = min(one.points[-1][0] for one in both if one is not None)
        for size in SIZES_BYTES:
            if size <= largest:
                one, other = (None if times is None else times.time_s(size) for times in both)
                yield Row("collectives", f"{name}, {size // 1024} KiB", "s", one, other)


def _name(one: CollectiveTimes) -> str:
    ring = "ring " if one.algorithm == "ring" else ""
    apart = f" {one.stride} apart" if one.stride > 1 else ""
    return f"{ring}{one.operation.replace('_', '-')} over {one.ranks} ranks{apart}"


def _calls(before: Cluster, after: Cluster) -> Iterator[Row]:
    sides = [_measured(cluster).calls for cluster in (before, after)]
    known = [{(one.key, size): (one, i) for one in side for i, size in enumerate(one.micro_batches)} for side in sides]
    for key in dict.fromkeys((*known[0], *known[1])):
        both = [found.get(key) for found in known]
        name = next(one[0].name for one in both if one is not None)
        for direction in ("forward", "backward"):
            seconds = [None if one is None else getattr(one[0], f"{direction}_s")[one[1]] for one in both]
            yield Row("calls", f"{name}, {direction}, micro-batch {key[1]}", "s", *seconds)
    overheads = [one.measured.unit_overhead_s if one.measured else None for one in (before, after)]
    if overheads != [None, None]:
        yield Row("units", "each gather and reduction", "s", *overheads)
    for what, name in LAUNCHES.items():
        figures = [getattr(one.launch, name) if one.launch else None for one in (before, after)]
        launches = [None if figure is None else figure.value for figure in figures]
        if launches != [None, None]:
            yield Row("host", f"launching each {what}", "s", *launches)
    pulled = [one.measured.one_sided_overhead_s if one.measured else None for one in (before, after)]
    if any(one is not None for one in pulled):
        yield Row("units", "each pull and push", "s", *pulled)
    steps = [{one.name: one.step_s(100, 1e9) for one in _measured(cluster).optimizers} for cluster in (before, after)]
    for name in dict.fromkeys((*steps[0], *steps[1])):
        yield Row("optimizers", f"{name}, 100 tensors, 1 GB", "s", *(found.get(name) for found in steps))


def _measured(cluster: Cluster) -> Measured:
    return cluster.measured or Measured("", "", 0)
