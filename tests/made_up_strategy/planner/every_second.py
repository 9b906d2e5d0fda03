"""Split over every second rank, replicated over the ranks in between."""

from __future__ import annotations

from dataclasses import dataclass

from planner.strategies.spec import StrategySpec
from profiler.cluster.cluster import Cluster


@dataclass(frozen=True)
class EverySecond(StrategySpec):
    """A shard over every second rank."""

    def groups(self, cluster: Cluster) -> tuple[int, ...]:
        return (cluster.world_size // 2,) if cluster.world_size > 2 and cluster.world_size % 2 == 0 else ()


SPEC = EverySecond("every_second", 45, "split over every second rank", wrapping="every_second", stride=2)
