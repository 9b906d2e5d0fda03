"""Time of a collective, or of a one-sided operation, on a cluster: alpha-beta.

For a collective that leaves S bytes on each of n ranks (reduce-scatter: starts from S bytes),

    all_gather, reduce_scatter   t = (n - 1) alpha + (n - 1) / n * S / beta
    all_reduce                   twice that
    broadcast, reduce            t = (n - 1) alpha + S / beta
    all_to_all                   t = (n - 1) alpha + S / n * max((m - 1) / intra, (n - m) / inter)
    pull, push                   t = (n - 1) alpha + (n - 1) / n * S / beta
    barrier                      t = (n - 1) alpha
    publish                      t = S / (rate of device memory)

(ring volumes as in Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009; broadcast and
reduce pass the tensor along a chain in chunks, so that every link carries all of it once: NCCL's
ring, whose bus bandwidth is S / t for both in nccl-tests, doc/PERFORMANCE.md).  In a pull one rank
reads the parts of its n - 1 peers and in a push it adds to theirs, each once and without a rendezvous;
a barrier signals every peer; publish copies on the device itself, S bytes read and written.
In an all-to-all, which only models run themselves, every rank sends each other one its part of S bytes directly, over
both links at once.
On a cluster whose backend is NCCL (`Cluster.nccl`), the others take what NCCL would choose (`planner.nccl`).
A group has m ranks on each node that it touches.  Inside one node alpha and beta are those of the
`intra` link.  Across nodes alpha is that of `inter`; the m ranks of a node drive the network
together, so beta = min(intra, m * inter), where `inter` is what one rank gets while all send.
"""

from typing import Literal

from planner.nccl import Links, choose
from profiler.cluster.cluster import Cluster
from profiler.cluster.measurements import CollectiveTimes

Operation = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_to_all",
    "pull",
    "push",
    "barrier",
    "publish",
]

PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "reduce": 1, "pull": 1, "push": 1}
"""How often a collective goes round the ring, and a one-sided operation to all peers."""
ONE_SIDED = ("pull", "push", "publish")
"""Operations in which no rank waits for another."""
CHAINS = ("broadcast", "reduce")
"""Collectives in which every link carries the whole tensor."""


def ranks_per_node(cluster: Cluster, ranks: int, stride: int) -> int:
    """Return how many ranks of the group {0, stride, 2 stride, ...} of that size share a node."""
    return max(1, min(ranks, -(-cluster.gpus_per_node // stride)))


def collective_s(operation: Operation, size_bytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> float:
    """Return the seconds of one operation over `ranks` ranks that are `stride` apart.

    `size_bytes` is the size of the whole tensor: gathered, not yet scattered, or the one that all get;
    of `publish` what one rank reads and writes, and of a barrier nothing.  A time measured in such a group takes
    precedence over the alpha-beta model; in a group that was not measured, the model is scaled by the ratio of
    measured to modelled time in the most similar group that was.
    """
    if ranks <= 1 or (size_bytes <= 0 and operation != "barrier"):
        return 0.0
    if (measured := cluster.measured) is not None:
        algorithm = cluster.algorithm(operation, ranks, stride, size_bytes)
        if (times := measured.times_of(operation, ranks, stride, algorithm)) is not None:
            return times.time_s(size_bytes)
        if (times := _nearest(operation, cluster, ranks, stride)) is not None:
            derived_s = _derived_s(operation, size_bytes, cluster, times.ranks, times.stride)
            return times.time_s(size_bytes) / derived_s * _derived_s(operation, size_bytes, cluster, ranks, stride)
    return _derived_s(operation, size_bytes, cluster, ranks, stride)


def algorithm_of(operation: Operation, size_bytes: float, cluster: Cluster, ranks: int, stride: int = 1) -> str:
    """Return what a collective is priced as: what was measured, NCCL's algorithm and protocol, or a ring."""
    if cluster.measured is not None and any(one.operation == operation for one in cluster.measured.collectives):
        return "measured"
    if cluster.nccl is None or operation in (*ONE_SIDED, "barrier"):
        return "one-sided" if operation in (*ONE_SIDED, "barrier") else "ring"
    return choose(operation, size_bytes, _links(cluster), ranks, ranks_per_node(cluster, ranks, stride))[1]


def _links(cluster: Cluster) -> Links:
    inter = cluster.inter or cluster.intra  # of one node there are no groups across
    assert cluster.nccl is not None
    own = cluster.intra.latency_s.value, cluster.intra.bytes_per_s.value
    return Links(cluster.nccl, *own, inter.latency_s.value, inter.bytes_per_s.value)


def _nearest(operation: Operation, cluster: Cluster, ranks: int, stride: int) -> CollectiveTimes | None:
    """Return the backend's collective in the most similar group that was measured, on the same side of the node."""
    assert cluster.measured is not None

    def crosses(ranks: int, stride: int) -> bool:
        return ranks_per_node(cluster, ranks, stride) < ranks

    alike = [
        one
        for one in cluster.measured.collectives
        if (one.operation, one.algorithm) == (operation, "native")
        and crosses(one.ranks, one.stride) == crosses(ranks, stride)
    ]
    return min(alike, key=lambda one: (one.stride != stride, abs(one.ranks - ranks), one.stride), default=None)


def _derived_s(operation: Operation, size_bytes: float, cluster: Cluster, ranks: int, stride: int) -> float:
    """Return the seconds by the alpha-beta model."""
    if operation == "publish":
        return size_bytes / cluster.device.memory_bytes_per_s.value
    together = ranks_per_node(cluster, ranks, stride)
    latency_s, bytes_per_s = cluster.intra.latency_s.value, cluster.intra.bytes_per_s.value
    if together < ranks:
        assert cluster.inter is not None, "Cluster checks that several nodes have a link"
        latency_s = cluster.inter.latency_s.value
        bytes_per_s = min(bytes_per_s, together * cluster.inter.bytes_per_s.value)
    if operation == "barrier":
        return (ranks - 1) * latency_s
    if operation == "all_to_all":
        far_s = (ranks - together) / cluster.inter.bytes_per_s.value if cluster.inter and together < ranks else 0.0
        near_s = (together - 1) / cluster.intra.bytes_per_s.value
        return (ranks - 1) * latency_s + size_bytes / ranks * max(near_s, far_s)
    if cluster.nccl is not None and operation not in ONE_SIDED:
        return choose(operation, size_bytes, _links(cluster), ranks, together)[0]
    carried = 1.0 if operation in CHAINS else (ranks - 1) / ranks
    return PASSES[operation] * ((ranks - 1) * latency_s + carried * size_bytes / bytes_per_s)
