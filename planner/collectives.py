"""Time of a collective on a cluster: alpha-beta along a ring.

For a collective that leaves S bytes on each of n ranks (reduce-scatter: starts from S bytes),

    all_gather, reduce_scatter   t = (n - 1) alpha + (n - 1) / n * S / beta
    all_reduce                   twice that
    broadcast, reduce            t = (n - 1) alpha + S / beta

(ring volumes as in Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009; broadcast and
reduce pass the tensor along a chain in pieces, so that every link carries all of it once: NCCL's
ring, whose bus bandwidth is S / t for both in nccl-tests, doc/PERFORMANCE.md).
A group has m ranks on each node that it touches.  Inside one node alpha and beta are those of the
`intra` link.  Across nodes alpha is that of `inter`; the m ranks of a node drive the network
together, so beta = min(intra, m * inter), where `inter` is what one rank gets while all send.
"""

from __future__ import annotations

from typing import Literal

from profiler.cluster import Cluster

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"]

PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "reduce": 1}
"""How often a collective goes round the ring."""
CHAINS = ("broadcast", "reduce")
"""Collectives in which every link carries the whole tensor."""


def ranks_per_node(cluster: Cluster, ranks: int, stride: int) -> int:
    """Return how many ranks of the group {0, stride, 2 stride, ...} of that size share a node."""
    return max(1, min(ranks, -(-cluster.gpus_per_node // stride)))


def collective_s(operation: Operation, size_bytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> float:
    """Return the seconds of one collective over `ranks` ranks that are `stride` apart.

    `size_bytes` is the size of the whole tensor: gathered, not yet scattered, or the one that all get.
    """
    if ranks <= 1 or size_bytes <= 0:
        return 0.0
    together = ranks_per_node(cluster, ranks, stride)
    latency_s, bytes_per_s = cluster.intra.latency_s.value, cluster.intra.bytes_per_s.value
    if together < ranks:
        assert cluster.inter is not None, "Cluster checks that several nodes have a link"
        latency_s = cluster.inter.latency_s.value
        bytes_per_s = min(bytes_per_s, together * cluster.inter.bytes_per_s.value)
    carried = 1.0 if operation in CHAINS else (ranks - 1) / ranks
    return PASSES[operation] * ((ranks - 1) * latency_s + carried * size_bytes / bytes_per_s)
