"""Split over all ranks, with a second copy inside groups of K ranks that serves the backward.

    forward      AG(N, e_p P)
    backward     AG(K, e_p P)
    reduction    RS(N, e_r T)

H = e_p P/K, the secondary copy, lives from forward to backward.  `fully_shard(reshard_after_forward=K)` (ZeRO++'s hpZ).
With `+offload`, S is copied to the device before forward only.
"""

from dataclasses import dataclass

from planner.strategies.group_shard import group_sizes
from planner.strategies.spec import Collective, Strategy, StrategySpec, Volume
from profiler.cluster.cluster import Cluster


@dataclass(frozen=True)
class SecondaryShard(StrategySpec):
    """Split over all ranks; backward gathers inside a group."""

    def on(self, cluster: Cluster) -> tuple[Strategy, ...]:
        return tuple(Strategy(self.name, cluster.world_size, secondary=k) for k in group_sizes(cluster))

    def backward_gathers(self, volume: Volume, strategy: Strategy) -> tuple[Collective, ...]:
        return (Collective("all_gather", strategy.secondary, 1, volume.gathered, "backward"),)


SPEC = SecondaryShard(
    "secondary_shard", 60, "sharded over all ranks; backward gathers a copy inside a group (hpZ)", argument="secondary"
)
