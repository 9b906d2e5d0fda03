"""From what was measured to a cluster file, which notes what does not fit together.

Where rings are faster, and the links for what was not measured, follow from the timings of collectives.  The links
invert `planner.collectives`: an all-gather over n ranks takes (n - 1) alpha + (n - 1) / n S / beta, so from its line
t = latency + S slope

    alpha = latency / (n - 1)        beta = (n - 1) / n / slope

`intra` comes from the groups of whole nodes; of one rank alone, which has none, it is assumed.  `inter` comes from
groups of one rank per node, which all work at once: beta is what one rank gets while all ranks of its node send.
"""

from collections.abc import Iterator, Sequence
from datetime import date
from itertools import takewhile

from osdp.planning.clusters import DEFAULT_CLUSTER, load_cluster
from osdp.profile.consistency import contradictions
from osdp.profile.fsdp_overhead import launch_of
from osdp.profile.session import Findings
from osdp.profile.time_collectives import Line
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster, Device, Launch, Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CallTimes, CollectiveTimes, Measured, RingRule, call_key, pass_launch_s
from profiler.cluster.piecewise_fit import MIN_POINTS, describe, fit
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph

RING_GAIN = 0.05
"""By how much a ring has to be faster."""
MOST_DISAGREEMENT = 0.15
"""Between the sum of calls and whole passes."""
MOST_SAVED_ERROR = 0.02
"""Between what a call keeps for backward in the trace and what it kept."""
SAVED_ROUNDING_BYTES = 4096
"""Beside that: the trace rounds every tensor up to 512 bytes."""
TAKEN = {
    "cuda": {
        "beside_the_allocator": "measured: what the device has given beside PyTorch's allocator, at the start or "
        "after all measurements, the larger"
    },
    "cpu": {"before_any_tensor": "measured: what the process held at the start"},
}
"""Name and source of what is taken beside tensors and their allocator, by device type."""
ALLOCATED = {
    "cuda": {
        "cublas_workspace": Figure(
            64.0 * MIB,
            "assumed: two workspaces, for the threads of forward and backward, of "
            "the 32 MiB that they have on Hopper, the most of the presets",
        ),
        "allocator_rounding": Figure(
            96.0 * MIB,
            "derived: 96 MiB for what the caching allocator loses to 512-byte blocks, to segments of 2 and 20 MiB, and "
            "to pages that a workspace of cuBLAS splits, as replayed (docs/benchmarks/allocator.md)",
        ),
    },
    "cpu": {"allocator_rounding": Figure(32.0 * MIB, "assumed: 32 MiB for what malloc keeps")},
}
"""What the allocator takes beside tensors, by device type; as in the presets of configs/clusters."""


def assemble(found: Findings, name: str) -> Cluster:
    """Return the cluster that was measured."""
    intra, inter = (found.link, None) if found.link else derived_links(found.times, found.nodes, found.ranks_per_node)
    overlap = found.overlap
    overlaps, overlap_source = _overlap(found)
    return Cluster(
        schema=Cluster.SCHEMA,
        name=name,
        description=f"{found.nodes} x {found.ranks_per_node} ranks, measured on {date.today()} ({found.versions})",
        nodes=found.nodes,
        gpus_per_node=found.ranks_per_node,
        device=_device(found),
        intra=intra,
        inter=inter,
        overlaps=overlaps,
        overlap_source=overlap_source,
        launch=_launch(found),
        ring=ring_rules(found.times),
        measured=Measured(
            date=date.today().isoformat(),
            versions=found.versions,
            repetitions=found.repetitions,
            collectives=found.times,
            calls=found.model.calls,
            optimizers=found.model.optimizers,
            overlapped_slowdown=overlap.slowdown if overlap else 1.0,
            asynchronous=overlap is not None and overlap.asynchronous,
            unit_overhead_s=None if found.link else found.unit.overhead_s,
            one_sided_overhead_s=found.unit.one_sided_overhead_s,
            notes=tuple(_notes(found)),
        ),
    )


def _overlap(found: Findings) -> tuple[bool, str]:
    """Return whether FSDP2's collectives run under computation, and the source of that."""
    overlap, on_cuda = found.overlap, found.device_type == "cuda"
    if overlap is None:
        how = "NCCL has a stream of its own" if on_cuda else "collectives of gloo on CPU tensors block"
        return on_cuda, f"assumed: {how}; one rank alone does not communicate"
    both = f"{overlap.both_s:.3g} s together, {overlap.computation_s:.3g} and {overlap.communication_s:.3g} s apart"
    how = "the device has streams" if overlap.on_streams else "without streams FSDP2 waits for each collective at once"
    return overlap.overlaps, f"measured: an all-reduce and matrix products take {both}; {how}"


def _launch(found: Findings) -> Launch | None:
    """Return what launching takes of the host: None on a CPU.  Without a model its kernels are as assumed of a cluster
    file's.
    """
    unit, graph = found.unit_launch, found.graph
    if unit is None:
        return None
    launches = sum(call.forward.launches + call.backward.launches for call in graph.calls) if graph else 0
    if graph is not None and launches:
        source = f"measured: launching {launches} kernels of {graph.name}, from Python to the driver"
        kernel_s = Figure(pass_launch_s(graph, found.model.calls) / launches, source)
    else:
        known = load_cluster(DEFAULT_CLUSTER).launch
        assert known is not None, "the default cluster has GPUs"
        kernel_s = Figure(known.kernel_s.value, f"assumed: as of {DEFAULT_CLUSTER}, as no model was measured")
    ranks = f"{found.nodes} x {found.ranks_per_node} ranks"
    how = f"measured: FSDP2's hooks around narrow layers in {found.precision}, over {ranks}"
    return launch_of(kernel_s, unit, how)


def _device(found: Findings) -> Device:
    memory, rates, times = found.memory, found.rates, f"median of {found.repetitions}, all ranks at once"
    on_cuda = found.device_type == "cuda"
    total = "measured: what the driver has" if on_cuda else "derived: the machine's memory over its ranks"
    nominal_bytes, products = -(-memory.total_bytes // GIB) * GIB, f"measured: large products, {times}"
    taken = {name: Figure(float(memory.taken_bytes), source) for name, source in TAKEN[found.device_type].items()}
    return Device(
        name=memory.name,
        kind=found.device_type,
        nominal_bytes=Figure(float(nominal_bytes), "derived: memory_bytes, rounded up to whole GiB"),
        memory_bytes=Figure(float(memory.total_bytes), total),
        matmul_flops_per_s={name: Figure(rate, products) for name, rate in rates.matmul_flops_per_s.items()},
        matmul_efficiency=Figure(1.0, "derived: the rates are of large products already"),
        memory_bytes_per_s=Figure(rates.memory_bytes_per_s, f"measured: mean of additions and GELU, {times}"),
        reserve_bytes=taken | ALLOCATED[found.device_type],
    )


def _notes(found: Findings) -> Iterator[str]:
    """Yield what does not fit together, and what could not be measured as it should be."""
    yield from contradictions(found.times, found.timings, found.ranks_per_node)
    disagreement = found.model.disagreement
    if abs(disagreement) > MOST_DISAGREEMENT:
        more = "less" if disagreement < 0 else "more"
        yield (
            f"the medians of the model's calls add up to {abs(disagreement):.0%} {more} than whole passes take, "
            "and were scaled so that they do not: profile again on an idle machine, or with more repetitions"
        )
    if not found.model.cut:
        yield (
            "passes of the model could not be cut at its blocks: its calls were timed while all of its activations "
            "lived, which takes more memory"
        )
    yield from _host_notes(found)
    if found.no_windows:
        yield f"pulls and pushes of odc were not measured: {found.no_windows}"
    if found.graph is not None:
        yield from _memory_notes(found.graph, found.model.calls)


def _host_notes(found: Findings) -> Iterator[str]:
    """Yield what takes the host's time and not the device's."""
    bound = [one for one in found.timings if one.is_host_bound]
    if bound:
        first = min(bound, key=lambda one: one.size_bytes)
        yield (
            f"{len(bound)} of {len(found.timings)} timings of collectives are host-bound, such as {first.line} of "
            f"{first.size_bytes} bytes: GPUs may have waited for Python"
        )
    if found.overlap is not None and found.overlap.is_host_bound:
        yield "the overlap of communication and computation is host-bound: GPUs may have waited for Python"
    if found.model.is_host_bound:
        yield (
            "the times of the model's calls are host-bound: its GPU may have waited for Python, as it does in training "
            "at such micro-batches"
        )


def _memory_notes(graph: ModelGraph, calls: tuple[CallTimes, ...]) -> Iterator[str]:
    """Yield the calls that keep other bytes for backward than in the trace."""
    traced = {call_key(graph, call): call for call in graph.calls}
    for times in calls:
        for micro_batch, kept in zip(times.micro_batches, times.saved_bytes, strict=True):
            expected = traced[times.key].saved_bytes(micro_batch)
            if abs(kept - expected) > MOST_SAVED_ERROR * max(kept, expected) + SAVED_ROUNDING_BYTES:
                yield (
                    f"{times.name} keeps {kept:.0f} bytes for backward at micro-batch {micro_batch}, where its "
                    f"trace says {expected:.0f}"
                )
                break


def ring_rules(times: Sequence[CollectiveTimes]) -> tuple[RingRule, ...]:
    """Return the groups, and the sizes from which on, where a ring reduce-scatter was faster at all sizes measured."""
    natives = {(one.operation, one.ranks, one.stride): dict(one.points) for one in times if one.algorithm == "native"}
    rules = []
    for ring in (one for one in times if one.algorithm == "ring"):
        native_s = natives.get((ring.operation, ring.ranks, ring.stride), {})
        ratios = [(size, ring_s / native_s[size]) for size, ring_s in reversed(ring.points) if size in native_s]
        if faster := list(takewhile(lambda point: point[1] < 1 - RING_GAIN, ratios)):
            rules.append(RingRule(ring.ranks, ring.stride, faster[-1][0]))
    return tuple(rules)


def derived_links(times: Sequence[CollectiveTimes], nodes: int, ranks_per_node: int) -> tuple[Link, Link | None]:
    """Return the links inside a node and between nodes; None on one node.

    With one rank per node there is nothing inside: `intra` is then as `inter`, with that as its source.  Raises
    OsdpError if the all-gathers that they come from were not measured.
    """
    inter = _link(times, nodes, ranks_per_node) if nodes > 1 else None
    if ranks_per_node > 1:
        return _link(times, ranks_per_node, 1), inter
    if inter is None:
        raise OsdpError("one rank alone has no links", expected="two ranks or more")
    source = f"assumed: as between nodes, which have one rank each ({inter.latency_s.source})"
    return Link(Figure(inter.latency_s.value, source), Figure(inter.bytes_per_s.value, source)), inter


def _link(times: Sequence[CollectiveTimes], ranks: int, stride: int) -> Link:
    """Return the link that the all-gathers of a group went over."""
    line = Line("all_gather", "native", ranks, stride)
    for one in times:
        if (one.operation, one.ranks, one.stride) == ("all_gather", ranks, stride) and len(one.points) >= MIN_POINTS:
            (segment,), residual = fit(one.points, max_pieces=1)
            largest_bytes, largest_s = one.points[-1]
            # Where larger tensors took no longer, the rate of the largest is one that was reached.
            slope = segment.s_per_byte or largest_s / largest_bytes
            source = f"derived: the line of {line}, {describe(residual)}"
            latency_s, bytes_per_s = segment.latency_s / (ranks - 1), (ranks - 1) / ranks / slope
            return Link(Figure(latency_s, source), Figure(bytes_per_s, source))
    raise OsdpError(f"{line} was not measured", expected="it, as the link is derived from it")
