"""Split inside a group of G neighbours, replicated across the N/G groups.

    forward          AG(G, e_p P)
    backward         AG(G, e_p P)
    reduction        RS(G, e_r T)
    once per step    AR(N/G, e_r T/G)

`fully_shard` on a mesh of two dimensions (HSDP, MiCS).  With `+offload`, SG waits on the device for the all-reduce.
"""

from dataclasses import dataclass
from functools import cache

from planner.strategies.spec import StrategySpec
from profiler.cluster.cluster import Cluster


def group_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Return the divisors of the world that split neither a node nor a group of nodes unevenly."""
    return _group_sizes(cluster.gpus_per_node, cluster.world_size)


@cache
def _group_sizes(node: int, world: int) -> tuple[int, ...]:
    return tuple(g for g in range(2, world) if world % g == 0 and (node % g == 0 or g % node == 0))


@dataclass(frozen=True)
class GroupShard(StrategySpec):
    """Split inside a group, replicated across groups."""

    def groups(self, cluster: Cluster) -> tuple[int, ...]:
        return group_sizes(cluster)


SPEC = GroupShard(
    "group_shard", 40, "sharded inside a group, replicated across groups (HSDP)", argument="group", baseline="HSDP"
)
