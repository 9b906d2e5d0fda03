"""What NCCL would run a collective as, and how long that takes: its own model of algorithms and protocols.

NCCL predicts every algorithm and protocol and takes the fastest,

    t = latency + S / (busbw x ratio)

with the constants of `src/graph/tuning.cc` in NCCL 2.28.3 (`ncclTunerConstantsDefaults`, `ncclTopoTuneModel`,
`ncclTopoGetAlgoTime`).  For r ranks, m on each of n nodes, with i and e the latencies of a step inside and between
nodes and c those of starting,

    ring        all-gather, reduce-scatter      c + (r - n) i + (n - 1) e       busbw r / (r - 1)
                all-reduce                      twice the steps                 busbw r / 2 (r - 1)
                broadcast, reduce               c + i, between nodes c + r e    busbw
    tree        all-reduce                      c + 2 (m - 1) i + 2 log2(n) e   0.92 busbw / 2, less at medium sizes
    PAT         all-gather, reduce-scatter      c + log2(n) e / 3.5 + 2.8 us r  0.75 busbw; one rank on each node
    NVLS        in a node                       c + i                           NVLink SHARP: see `NVLS_SHARE`
    NVLS tree   all-reduce across nodes         c + i + 2 log2(n) e             busbw r / 2 (r - 1), at 2 nodes twice

`busbw` is that of the cluster's file: what rings reach with Simple, the protocol of large messages; LL and LL128 have
fractions of it (`_share`).  The file's latencies are those of a step of such a ring, and scale the table's others.
Limits per channel, which these links do not reach, and what needs InfiniBand switches that reduce (CollNet) are left
out.
"""

from functools import lru_cache
from math import floor, log2
from typing import NamedTuple

from profiler.cluster.cluster import Nccl

PROTOCOLS = ("LL", "LL128", "Simple")
US = 1e-6
START_S = {
    "ring": (6.6 * US, 14.0 * US, 8.4 * US),
    "tree": (6.8 * US, 14.0 * US, 8.4 * US),
    "PAT": (8.0 * US, 8.0 * US, 8.0 * US),
    "NVLS": (0.0, 0.0, 0.0),
    "NVLS tree": (0.0, 0.0, 0.0),
}
"""Latency of starting, by protocol (`baseLatencies`)."""
STEP_S = {
    "NVLink": {"ring": (0.6 * US, 1.9 * US, 3.4 * US), "tree": (0.6 * US, 1.25 * US, 4.0 * US), "NVLS": (25 * US,) * 3},
    "PCI": {"ring": (1.0 * US, 2.5 * US, 5.7 * US), "tree": (1.0 * US, 1.9 * US, 4.0 * US)},
    "network": {
        "ring": (2.7 * US, 4.0 * US, 14.0 * US),
        "tree": (5.0 * US, 8.5 * US, 14.0 * US),
        "NVLS tree": (14 * US,) * 3,
    },
}
"""Latency of a step, by protocol (`hwLatencies`)."""
PROXY_S = (1.0 * US, 1.0 * US, 3.0 * US)
"""The least that a step of a ring across nodes takes (`getNetOverhead`, thrice for Simple)."""
LL_MOST = {"turing": (39e9, 39e9, 20.4e9), "ampere": (87.7e9, 22.5e9, 19e9), "hopper": (141e9, 39e9, 20.4e9)}
"""Bus bandwidth that LL does not exceed on 1, 2 and more nodes (`llMaxBws`): in a node by the GPU, across nodes by the
processor, taken to be AMD's beside Ampere (as in the DGX A100) and Intel's beside others (DGX H100)."""
LL_SHARE, LL128_SHARE = 0.5, 0.92
"""Of a ring's bus bandwidth."""
TREE_SHARE, TREE_LL_SHARE, TREE_LL128_SHARES = 0.92, 1 / 3.8, (7 / 9, 120 / 128)
"""Of a tree's to a ring's, of LL's to a tree's, and LL128's in a node and across nodes."""
TREE_FITS = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
"""Correction of a tree's bandwidth at 64 B, 128 B, ... 256 MiB by protocol (`treeCorrectionFactor`); here linear
between, so that more bytes never take less time."""
PAT_SHARE, PAT_RANK_S, PAT_STEPS = 0.75, 2.8 * US, 3.5
RING_PLATEAU = {"turing": 1.9, "ampere": 1.4, "hopper": 1.4}
"""What all-reduces of rings across nodes take longer to start from 64 bytes for each rank and channel on."""
CHANNELS = 16
NVLS_SHARE = 480 / 370
"""Bus bandwidth of NVLink SHARP's all-reduce to that of a ring, measured on 8 H100 (NVIDIA/nccl-tests #212, NVIDIA/nccl
#2140); NCCL itself counts on 2 x 0.85 x 15 / 16."""
NVLS_GATHER_SHARE = 0.85 * 15 / 16
"""The same of all-gather and reduce-scatter, times (m - 1) / m (`nvlsEfficiency`)."""


class Links(NamedTuple):
    """What NCCL's model needs of a cluster."""

    nccl: Nccl
    latency_s: float
    bytes_per_s: float
    inter_latency_s: float
    inter_bytes_per_s: float


class Choice(NamedTuple):
    """One algorithm and protocol for a collective in one group."""

    name: str
    latency_s: float
    bytes_per_s: float
    fits: tuple[float, ...] = ()
    """Corrections of the bandwidth by size."""
    plateau: tuple[float, float] = (float("inf"), 1.0)
    """From how many bytes on the latency is so many times as long."""

    def time_s(self, size_bytes: float) -> float:
        """Return the seconds for a tensor of so many bytes."""
        latency_s = self.latency_s * (self.plateau[1] if size_bytes >= self.plateau[0] else 1.0)
        return latency_s + size_bytes / (self.bytes_per_s * (_fit(self.fits, size_bytes) if self.fits else 1.0))


def choose(operation: str, size_bytes: float, links: Links, ranks: int, together: int) -> tuple[float, str]:
    """Return the seconds of what NCCL would choose for `ranks` ranks, `together` on each node, and its name."""
    return min((choice.time_s(size_bytes), choice.name) for choice in _choices(operation, links, ranks, together))


def _fit(fits: tuple[float, ...], size_bytes: float) -> float:
    place = log2(max(size_bytes, 64.0) / 64.0)
    low = min(floor(place), len(fits) - 1)
    high = min(low + 1, len(fits) - 1)
    return fits[low] + (fits[high] - fits[low]) * min(place - low, 1.0)


@lru_cache(maxsize=4096)
def _choices(operation: str, links: Links, ranks: int, together: int) -> tuple[Choice, ...]:
    nccl, nodes = links.nccl, -(-ranks // together)
    inside = "NVLink" if nccl.nvlink else "PCI"
    scale, inter_scale = links.latency_s / STEP_S[inside]["ring"][2], links.inter_latency_s / (14 * US)
    busbw = links.bytes_per_s if nodes == 1 else min(links.bytes_per_s, together * links.inter_bytes_per_s)
    hops, passes = log2(nodes), 2 if operation == "all_reduce" else 1
    found = []
    for number, protocol in enumerate(PROTOCOLS):
        if protocol == "LL128" and not nccl.nvlink:
            continue
        step_s = scale * STEP_S[inside]["ring"][number]
        # With one rank on each node nothing hides a step's latency, and NCCL takes the tree's.
        across_s = inter_scale * STEP_S["network"]["tree" if together == 1 else "ring"][number]
        start_s, share = START_S["ring"][number], _share(links, protocol, busbw, nodes)
        if operation in ("broadcast", "reduce"):
            chain_s = step_s if nodes == 1 else ranks * inter_scale * STEP_S["network"]["tree"][number]
            found.append(Choice(f"ring, {protocol}", start_s + chain_s, share))
            continue
        step_s = max(step_s, PROXY_S[number]) if nodes > 1 else step_s
        ring_s = start_s + passes * ((ranks - nodes) * step_s + (nodes - 1) * across_s)
        has_plateau = operation == "all_reduce" and protocol == "Simple" and nodes > 1
        plateau = (64.0 * CHANNELS * ranks, RING_PLATEAU[nccl.architecture]) if has_plateau else (float("inf"), 1.0)
        found.append(Choice(f"ring, {protocol}", ring_s, share * ranks / (passes * (ranks - 1)), plateau=plateau))
        if operation == "all_reduce":
            inner_s = scale * STEP_S[inside]["tree"][number]
            outer_s = inter_scale * STEP_S["network"]["tree"][number]
            tree_s = START_S["tree"][number] + 2 * ((together - 1) * inner_s + floor(hops) * outer_s)
            bandwidth = TREE_SHARE * busbw
            if protocol == "LL":
                bandwidth = min(TREE_LL_SHARE * bandwidth, _ll_most(links, nodes))
            elif protocol == "LL128":
                bandwidth *= TREE_LL128_SHARES[nodes > 1]
            found.append(Choice(f"tree, {protocol}", tree_s, bandwidth / 2, TREE_FITS[number]))
    if operation in ("all_gather", "reduce_scatter") and together == 1 and nodes > 1:
        pat_s = START_S["PAT"][2] + floor(hops) * inter_scale * 14 * US / PAT_STEPS + ranks * PAT_RANK_S
        found.append(Choice("PAT, Simple", pat_s, PAT_SHARE * busbw))
    if nccl.nvls and together > 1:
        found += _with_switches(operation, links, ranks, together, nodes, scale, inter_scale)
    return tuple(found)


def _with_switches(
    operation: str, links: Links, ranks: int, together: int, nodes: int, scale: float, inter_scale: float
) -> list[Choice]:
    """Return what NVLink's switches reduce and multicast."""
    inside_s, per_rank = scale * 25 * US, ranks / (ranks - 1)
    if operation == "all_reduce":
        bandwidth = NVLS_SHARE * links.bytes_per_s
        if nodes == 1:
            return [Choice("NVLS, Simple", inside_s, bandwidth * per_rank / 2)]
        bandwidth = min(bandwidth, together * links.inter_bytes_per_s * (2 if nodes == 2 else 1))
        latency_s = inside_s + 2 * floor(log2(nodes)) * inter_scale * 14 * US
        return [Choice("NVLS tree, Simple", latency_s, bandwidth * per_rank / 2)]
    if nodes == 1 and operation in ("all_gather", "reduce_scatter"):
        bandwidth = NVLS_GATHER_SHARE * (together - 1) / together * links.bytes_per_s
        return [Choice("NVLS, Simple", inside_s, bandwidth * per_rank)]
    return []


def _share(links: Links, protocol: str, busbw: float, nodes: int) -> float:
    """Return a ring's bus bandwidth with one protocol."""
    if protocol == "LL":
        return min(LL_SHARE * busbw, _ll_most(links, nodes))
    return LL128_SHARE * busbw if protocol == "LL128" else busbw


def _ll_most(links: Links, nodes: int) -> float:
    return LL_MOST[links.nccl.architecture][min(nodes, 3) - 1]
