"""Split over all ranks; gathered across the n nodes, then inside each node of g ranks.

    forward, backward    AG(n, e_p P/g), then AG(g, e_p P)
    reduction            RS(g, e_r T), then RS(n, e_r T/g)

Each rank gathers the shards of the ranks that have its place in other nodes, and nodes then gather what their
ranks have got: the network between nodes carries each byte once per node.  The result is not in the order of ranks,
so the whole tensor is permuted once, which reads and writes it on the device (`Hierarchical.extra_s`) and holds

    AGX, AGH    (1 + 1/g) AG more: the permuted tensor, and what passes between nodes
    RSX         (1 + 1/g) RSI                                                         `Hierarchical.temporaries`
"""

from dataclasses import dataclass

from planner.strategies.spec import Collective, Strategy, StrategySpec, Volume
from profiler.cluster.cluster import Cluster


@dataclass(frozen=True)
class Hierarchical(StrategySpec):
    """Gathered and reduced in two phases."""

    def groups(self, cluster: Cluster) -> tuple[int, ...]:
        return super().groups(cluster) if cluster.nodes > 1 and cluster.gpus_per_node > 1 else ()

    def collectives(self, volume: Volume, strategy: Strategy, cluster: Cluster) -> tuple[Collective, ...]:
        nodes, node = cluster.nodes, cluster.gpus_per_node
        return (
            Collective("all_gather", nodes, node, volume.gathered // node, "forward"),
            Collective("all_gather", node, 1, volume.gathered, "forward"),
            Collective("all_gather", nodes, node, volume.gathered // node, "backward"),
            Collective("all_gather", node, 1, volume.gathered, "backward"),
            Collective("reduce_scatter", node, 1, volume.reduced, "reduce"),
            Collective("reduce_scatter", nodes, node, volume.reduced // node, "reduce"),
        )

    def extra_s(self, collective: Collective, cluster: Cluster) -> float:
        # The phase inside nodes is the one that the whole tensor takes part in.
        is_whole = collective.stride == 1
        return 2 * collective.size_bytes / cluster.device.memory_bytes_per_s.value if is_whole else 0.0

    def temporaries(self, size_bytes: int, ranks_per_node: int) -> tuple[int, ...]:
        return size_bytes, size_bytes // ranks_per_node


SPEC = Hierarchical(
    "hierarchical", 50, "sharded over all ranks; all-gathered across nodes, then inside", wrapping="hierarchical"
)
