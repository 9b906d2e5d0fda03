"""From what was measured to a cluster file, with what does not fit together said in it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from osdp.profile.consistency import contradictions
from osdp.profile.findings import derived_links, ring_rules
from osdp.profile.session import Findings
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster, Device
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CallTimes, Measured, call_key
from profiler.model_graph import ModelGraph

MOST_DISAGREEMENT = 0.15
"""Between the sum of calls and whole passes."""
MOST_SAVED_ERROR = 0.02
"""Between what the trace says that a call keeps for backward and what was kept."""
SAVED_ROUNDING_BYTES = 4096
"""Beside that: the trace rounds every tensor up to 512 bytes."""
TAKEN = {
    "cuda": {
        "beside_the_allocator": "measured: what the device has given beside PyTorch's allocator, at the start or "
        "after all measurements, the larger"
    },
    "cpu": {"before_any_tensor": "measured: what the process held at the start"},
}
"""Name and source of what is taken beside tensors and their allocator, by kind of device."""
ALLOCATED = {
    "cuda": {
        "cublas_workspace": Figure(
            64.0 * MIB,
            "assumed: two workspaces, for the threads of forward and backward, of "
            "the 32 MiB that they have on Hopper, the most of the presets",
        ),
        "allocator_rounding": Figure(
            64.0 * MIB,
            "assumed: 64 MiB for what the caching allocator loses to 512-byte blocks and to segments of 2 and 20 MiB",
        ),
    },
    "cpu": {"allocator_rounding": Figure(32.0 * MIB, "assumed: 32 MiB for what malloc keeps")},
}
"""What the allocator takes beside tensors, by kind of device; as the presets of configs/clusters have it."""


def assemble(found: Findings, name: str) -> Cluster:
    """Return the cluster that was measured."""
    intra, inter = derived_links(found.times, found.nodes, found.ranks_per_node)
    overlap = found.overlap
    both = f"{overlap.both_s:.3g} s together, {overlap.computation_s:.3g} and {overlap.communication_s:.3g} s apart"
    how = "the device has streams" if overlap.on_streams else "without streams FSDP2 waits for each collective at once"
    return Cluster(
        schema=Cluster.SCHEMA,
        name=name,
        description=f"{found.nodes} x {found.ranks_per_node} ranks, measured on {date.today()} ({found.versions})",
        nodes=found.nodes,
        gpus_per_node=found.ranks_per_node,
        device=_device(found),
        intra=intra,
        inter=inter,
        overlaps=overlap.overlaps,
        overlap_source=f"measured: an all-reduce and matrix products take {both}; {how}",
        ring=ring_rules(found.times),
        measured=Measured(
            date=date.today().isoformat(),
            versions=found.versions,
            repetitions=found.repetitions,
            collectives=found.times,
            calls=found.model.calls,
            optimizers=found.model.optimizers,
            overlapped_slowdown=overlap.slowdown,
            asynchronous=overlap.asynchronous,
            unit_overhead_s=found.unit.overhead_s,
            one_sided_overhead_s=found.unit.one_sided_overhead_s,
            notes=tuple(_notes(found)),
        ),
    )


def _device(found: Findings) -> Device:
    memory, rates, times = found.memory, found.rates, f"median of {found.repetitions}, all ranks at once"
    on_cuda = found.kind == "cuda"
    total = "measured: what the driver has" if on_cuda else "derived: the machine's memory over its ranks"
    nominal_bytes = -(-memory.total_bytes // GIB) * GIB
    return Device(
        name=memory.name,
        kind=found.kind,
        nominal_bytes=Figure(float(nominal_bytes), "derived: memory_bytes, rounded up to whole GiB"),
        memory_bytes=Figure(float(memory.total_bytes), total),
        matmul_flops_per_s={
            precision: Figure(rate, f"measured: large products, {times}")
            for precision, rate in rates.matmul_flops_per_s.items()
        },
        matmul_efficiency=Figure(1.0, "derived: the rates are of large products already"),
        memory_bytes_per_s=Figure(rates.memory_bytes_per_s, f"measured: mean of additions and GELU, {times}"),
        reserve_bytes={name: Figure(float(memory.taken_bytes), source) for name, source in TAKEN[found.kind].items()}
        | ALLOCATED[found.kind],
    )


def _notes(found: Findings) -> Iterator[str]:
    """Yield what does not fit together, and what could not be measured as it should be."""
    yield from contradictions(found.times, found.communication, found.ranks_per_node)
    disagreement = found.model.disagreement
    if abs(disagreement) > MOST_DISAGREEMENT:
        more = "less" if disagreement < 0 else "more"
        yield (
            f"the medians of the model's calls add up to {abs(disagreement):.0%} {more} than whole passes take, "
            "and were scaled so that they do not: profile again on an idle machine, or with more "
            "repetitions"
        )
    if not found.model.cut:
        yield (
            "passes of the model could not be cut at its blocks: its calls were timed while all of its activations "
            "lived, which takes more memory"
        )
    if found.graph is not None:
        yield from _memory_notes(found.graph, found.model.calls)


def _memory_notes(graph: ModelGraph, calls: tuple[CallTimes, ...]) -> Iterator[str]:
    """Yield the kinds of calls that keep other bytes for backward than the trace says."""
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
