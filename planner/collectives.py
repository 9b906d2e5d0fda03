"""Time of a collective on a cluster: alpha-beta along a ring.

For a collective that leaves S bytes on each of n ranks (reduce-scatter: starts from S bytes),

    all_gather, reduce_scatter   t = (n - 1) alpha + (n - 1) / n * S / beta
    all_reduce                   twice that

(ring volumes as in Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
A group has m ranks on each node that it touches.  Inside one node alpha and beta are those of the
`intra` link.  Across nodes alpha is that of `inter`; the m ranks of a node drive the network
together, so beta = min(intra, m * inter), where `inter` is what one rank gets while all send.
"""

from __future__ import annotations

from typing import Literal

from profiler.cluster import Cluster

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]


def ranks_per_node(cluster: Cluster, ranks: int, stride: int) -> int:
    """Return how many ranks of the group {0, stride, 2 stride, ...} of that size share a node."""
    return max(1, min(ranks, -(-cluster.gpus_per_node // stride)))


def collective_s(operation: Operation, size_bytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> float:
    """Return the seconds of one collective over `ranks` ranks that are `stride` apart.

    `size_bytes` is the size of the gathered (or the not yet scattered) tensor.
    """
    if ranks <= 1 or size_bytes <= 0:
        return 0.0
    together = ranks_per_node(cluster, ranks, stride)
    latency_s, bytes_per_s = cluster.intra.latency_s.value, cluster.intra.bytes_per_s.value
    if together < ranks:
        assert cluster.inter is not None, "Cluster checks that several nodes have a link"
        latency_s = cluster.inter.latency_s.value
        bytes_per_s = min(bytes_per_s, together * cluster.inter.bytes_per_s.value)
    passes = 2 if operation == "all_reduce" else 1
    return passes * ((ranks - 1) * latency_s + (ranks - 1) / ranks * size_bytes / bytes_per_s)
