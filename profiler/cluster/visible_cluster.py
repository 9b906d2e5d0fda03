"""The cluster of the visible GPUs, where no preset describes them: figures of the table of cards, or derived.

    a card of the table              rates of its datasheet
    a MIG slice of such a card       the same, by its part of the multiprocessors and of the memory
    any other card                   multiprocessors x operations per clock x clock; 2 x memory clock x bus

Of GPUs that are not alike each figure is the least of theirs, as ranks wait for each other.  Links are NVLink where
NVML finds a ring of it, otherwise PCI Express.  Nothing here needs torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cards import Card, card_of, generation_of, slice_of
from profiler.cluster.cluster import Cluster, Device, Host, Launch, Link, Nccl
from profiler.cluster.figure import Figure
from profiler.cluster.visible_gpus import Connections, Gpu

VISIBLE = "visible"
"""Name of this cluster for `--cluster`; plans have it with the names of the GPUs behind it."""

_STREAMED = 0.85
"""Part of the rate of memory that streaming kernels reach, as in the presets."""
_ASSUMED_CLOCK_HZ = 1.5e9
_ASSUMED_MEMORY_BYTES_PER_S = 8e9
"""For each multiprocessor: T4, A10 and RTX 4090 have 8, cards with HBM more."""
_NVLINK_REACHED = 0.77
_ASSUMED_NVLINK_BYTES_PER_S = 25e9
_PCIE_BYTES_PER_S = {1: 3e9, 2: 6e9, 3: 12e9, 4: 24e9, 5: 48e9, 6: 96e9}
"""By generation, 16 lanes, as NCCL counts them."""
_CONTEXT_BYTES, _CONTEXT_BYTES_PER_MULTIPROCESSOR = 300 * MIB, 4.2 * MIB
_BESIDE_AN_H200 = "assumed: as measured beside an H200, on a virtual machine (docs/benchmarks/gpu.md)"
_LAUNCH = Launch(*(Figure(seconds, _BESIDE_AN_H200) for seconds in (32e-6, 680e-6, 43e-6, 11e-6)))
NO_NVML = "NVML told nothing"


@dataclass(frozen=True, slots=True)
class _Rates:
    """What one GPU computes and moves."""

    matmul_flops_per_s: dict[str, Figure]
    efficiency: Figure
    memory_bytes_per_s: Figure


def visible_cluster(gpus: Sequence[Gpu], connections: Connections) -> Cluster:
    """Return one node of these GPUs."""
    names = sorted({gpu.name for gpu in gpus})
    slug = re.sub(r"[^a-z0-9]+", "-", "-and-".join(names).lower()).strip("-")
    return Cluster(
        schema=Cluster.SCHEMA,
        name=f"{VISIBLE}-{slug}",
        description=f"{len(gpus)} x {' and '.join(names)}, as torch sees them",
        nodes=1,
        gpus_per_node=len(gpus),
        device=_device(gpus, connections),
        intra=_link(gpus, connections),
        inter=None,
        overlaps=True,
        overlap_source="assumed: NCCL has a stream of its own, beside the one that computes",
        nccl=_nccl(gpus, connections),
        host=_host(gpus, connections),
        launch=_LAUNCH,
    )


def _least(figures: Sequence[Figure]) -> Figure:
    return min(figures, key=lambda figure: figure.value)


def _device(gpus: Sequence[Gpu], connections: Connections) -> Device:
    names, rates = sorted({gpu.name for gpu in gpus}), [_rates(gpu) for gpu in gpus]
    memory_bytes = min(gpu.memory_bytes for gpu in gpus)
    precisions = [name for name in ("fp32", "bf16", "fp16") if all(name in one.matmul_flops_per_s for one in rates)]
    of_which = "" if len(names) == 1 else ", the least of the visible GPUs"
    return Device(
        name=names[0] if len(names) == 1 else f"the least of {' and '.join(names)}",
        kind="cuda",
        nominal_bytes=Figure(float(-(-memory_bytes // GIB) * GIB), "derived: memory_bytes, rounded up to whole GiB"),
        memory_bytes=Figure(float(memory_bytes), f"measured: total_memory of the device's properties{of_which}"),
        matmul_flops_per_s={name: _least([one.matmul_flops_per_s[name] for one in rates]) for name in precisions},
        matmul_efficiency=_least([one.efficiency for one in rates]),
        memory_bytes_per_s=_least([one.memory_bytes_per_s for one in rates]),
        reserve_bytes=_reserve_bytes(gpus, connections),
    )


# --- rates -----------------------------------------------------------------------------------


def _rates(gpu: Gpu) -> _Rates:
    part = slice_of(gpu.name)
    card = card_of(gpu.name, gpu.memory_bytes) if part is None else card_of(part.card)
    if card is None:
        return _derived_rates(gpu)
    efficiency = Figure(0.8, "assumed: four fifths of the rate at boost clock")
    whole = {"fp32": card.fp32_flops_per_s, "bf16": card.bf16_flops_per_s, "fp16": card.fp16_flops_per_s}
    share = gpu.multiprocessors / card.multiprocessors
    if part is None and share == 1:
        flops = {name: Figure(rate, f"{card.kind}: {card.document}") for name, rate in whole.items() if rate}
        return _Rates(flops, efficiency, _streamed(card.memory_bytes_per_s, card.document))
    source = f"derived: {gpu.multiprocessors} of the {card.multiprocessors} multiprocessors in {card.document}"
    flops = {name: Figure(share * rate, source) for name, rate in whole.items() if rate}
    return _Rates(flops, efficiency, _memory_of_part(card, share if part is None else part.memory_gb / card.memory_gib))


def _memory_of_part(card: Card, share: float) -> Figure:
    return _streamed(min(1.0, share) * card.memory_bytes_per_s, f"{card.document}, of which this is a part")


def _streamed(peak_bytes_per_s: float, whose: str) -> Figure:
    peak = f"{peak_bytes_per_s / 1e9:.0f} GB/s"
    source = f"derived: 85 % of {peak} ({whose}), an assumed fraction for streaming kernels"
    return Figure(_STREAMED * peak_bytes_per_s, source)


def _derived_rates(gpu: Gpu) -> _Rates:
    """Return the rates of a card that the table does not have."""
    generation, capability = generation_of(gpu.capability)
    own = "{}.{}".format(*gpu.capability)
    is_known = gpu.clock_hz is not None and capability == own
    clock_hz = gpu.clock_hz or _ASSUMED_CLOCK_HZ
    kind = "derived" if is_known else "assumed"
    per_clock = {"fp32": generation.fp32_flops_per_clock, "bf16": generation.bf16_flops_per_clock}
    if generation.halved_on and re.search(generation.halved_on, gpu.name, re.IGNORECASE):
        per_clock["bf16"] = (per_clock["bf16"] or 0) // 2
    clock = f"{clock_hz / 1e9:.2f} GHz{'' if gpu.clock_hz else ', which nothing tells'}"
    older = (
        "" if capability == own else f", as of compute capability {capability} and not {own}, which is not known here"
    )

    def matmul(flops_per_clock: int) -> Figure:
        source = f"{kind}: {gpu.multiprocessors} multiprocessors x {flops_per_clock} FLOP per clock at {clock}{older}"
        return Figure(gpu.multiprocessors * flops_per_clock * clock_hz, source)

    flops = {name: matmul(each) for name, each in per_clock.items() if each}
    efficiency = Figure(0.7, "assumed: seven tenths of the rate at the highest clock, below which large products run")
    # Of a slice, the bus is the whole card's.
    if gpu.memory_clock_hz is None or gpu.memory_bus_bits is None or slice_of(gpu.name):
        each = f"{_ASSUMED_MEMORY_BYTES_PER_S / 1e9:.0f} GB/s for each multiprocessor, as cards with GDDR6 have"
        rate = _ASSUMED_MEMORY_BYTES_PER_S * gpu.multiprocessors
        return _Rates(flops, efficiency, Figure(rate, f"assumed: {each}; the clock of its memory is not known"))
    bus = f"2 x {gpu.memory_clock_hz / 1e6:.0f} MHz x {gpu.memory_bus_bits} bits"
    return _Rates(flops, efficiency, _streamed(2 * gpu.memory_clock_hz * gpu.memory_bus_bits / 8, bus))


# --- memory that tensors cannot use ----------------------------------------------------------


def _reserve_bytes(gpus: Sequence[Gpu], connections: Connections) -> dict[str, Figure]:
    multiprocessors, newest = max(gpu.multiprocessors for gpu in gpus), max(gpu.capability for gpu in gpus)
    context_bytes = float(max(_CONTEXT_BYTES, _CONTEXT_BYTES_PER_MULTIPROCESSOR * multiprocessors))
    if newest >= (9, 0):
        workspace = Figure(64.0 * MIB, "assumed: two workspaces of 32 MiB, as on Hopper (pytorch/pytorch #120925)")
    else:
        workspace = Figure(17039360.0, "derived: two workspaces of PyTorch's default :4096:2:16:8, 8519680 bytes each")
    return {
        "cuda_context": Figure(
            context_bytes,
            "assumed: 300 MiB as on older cards (pytorch/pytorch #107667), or 4.2 MiB for each multiprocessor",
        ),
        "nccl_buffers": _nccl_buffers(gpus, connections),
        "cublas_workspace": workspace,
        "allocator_rounding": Figure(
            96.0 * MIB,
            "derived: 96 MiB for what the caching allocator loses to 512-byte blocks, to segments of 2 and 20 MiB, and "
            "to pages that a workspace of cuBLAS splits, as replayed (docs/benchmarks/allocator.md)",
        ),
    }


def _nccl_buffers(gpus: Sequence[Gpu], connections: Connections) -> Figure:
    # Links that may be there cost memory, even if their rate is not counted on.
    may_have = not connections.from_nvml and any(generation_of(gpu.capability)[0].nvlink_bytes_per_s for gpu in gpus)
    if connections.nvlinks or (may_have and not any(slice_of(gpu.name) for gpu in gpus)):
        if max(gpu.capability for gpu in gpus) >= (9, 0):
            return Figure(1024.0 * MIB, "assumed: as on H100 with NVLink (NVIDIA/nccl #864)")
        return Figure(512.0 * MIB, "assumed: as on A100 with NVLink, 24 channels (NVIDIA/nccl #864)")
    return Figure(80.0 * MIB, "assumed: 2 channels with 4 connections of about 9 MiB, as over PCI Express")


# --- links -----------------------------------------------------------------------------------


def _link(gpus: Sequence[Gpu], connections: Connections) -> Link:
    if connections.nvlinks:
        known_bytes_per_s = min(generation_of(gpu.capability)[0].nvlink_bytes_per_s for gpu in gpus)
        per_link = known_bytes_per_s or _ASSUMED_NVLINK_BYTES_PER_S
        rate = _NVLINK_REACHED * connections.nvlinks * per_link
        links = f"{connections.nvlinks} NVLinks of {per_link / 1e9:.0f} GB/s each way, which NVML finds"
        source = f"derived: 77 % of {links}, the part that nccl-tests reaches on A100 (NVIDIA/nccl #1048)"
        latency = "derived: one step of a ring in NCCL's tuning table (graph/tuning.cc), Simple protocol, NVLink"
        return Link(Figure(3.4e-6, latency), Figure(rate, source))
    generation, lanes, kind, bus = _pcie(gpus, connections)
    part = 0.8 if connections.peer_access else 0.5
    how = "with peer access" if connections.peer_access else "because without peer access each byte passes the host"
    peak_bytes_per_s = _PCIE_BYTES_PER_S[generation] * lanes / 16
    source = f"{kind}: {part:.0%} of {peak_bytes_per_s / 1e9:.3g} GB/s, {bus} as NCCL counts it, {how}"
    latency = "derived: one step of a ring in NCCL's tuning table (graph/tuning.cc), Simple protocol, PCI"
    return Link(Figure(5.7e-6, latency), Figure(part * peak_bytes_per_s, source))


def _pcie(gpus: Sequence[Gpu], connections: Connections) -> tuple[int, int, str, str]:
    """Return generation and lanes, the kind of their source, and what to say of them."""
    told, lanes = connections.pcie_generation, connections.pcie_lanes or 16
    generation = told or min(_pcie_generation(gpu) for gpu in gpus)
    generation = max(min(generation, max(_PCIE_BYTES_PER_S)), 1)
    bus = f"PCI Express {generation}.0 x{lanes}"
    if told and connections.pcie_lanes:
        return generation, lanes, "derived", f"{bus} (NVML)"
    return generation, lanes, "assumed", f"{bus}, since {NO_NVML}"


def _pcie_generation(gpu: Gpu) -> int:
    part = slice_of(gpu.name)
    card = card_of(gpu.name if part is None else part.card)
    return card.pcie_generation if card else generation_of(gpu.capability)[0].pcie_generation


def _nccl(gpus: Sequence[Gpu], connections: Connections) -> Nccl:
    oldest = min(gpu.capability for gpu in gpus)
    architecture: Literal["turing", "ampere", "hopper"] = "hopper"
    if oldest < (9, 0):
        architecture = "turing" if oldest < (8, 0) else "ampere"
    found = f"{connections.nvlinks} NVLinks (NVML)" if connections.from_nvml else f"no NVLink, since {NO_NVML}"
    kind = "derived" if connections.from_nvml and oldest < (10, 0) else "assumed"
    source = f"{kind}: compute capability {oldest[0]}.{oldest[1]}, which is priced as {architecture.title()}; {found}"
    return Nccl(architecture, connections.nvlinks > 0, connections.switched and oldest >= (9, 0), source)


def _host(gpus: Sequence[Gpu], connections: Connections) -> Host:
    generation, lanes, _, bus = _pcie(gpus, connections)
    # Copies from pinned memory get a little more than NCCL counts.
    sharing = 1 if len(gpus) == 1 else 2
    rate = _PCIE_BYTES_PER_S[generation] * lanes / 16 / sharing
    half = "" if sharing == 1 else "half of "
    why = "" if sharing == 1 else ", as two GPUs may share a switch's uplink"
    memory = "assumed: an eighth of 70 % of 256 GB/s, two sockets with six channels of DDR4-2666, as titan-rtx-8"
    return Host(Figure(rate, f"assumed: {half}what copies reach of {bus}{why}"), Figure(22.4e9, memory))
