"""Split inside a group of G ranks of a node, which read and write each other's memory (On-Demand Communication).

    forward          pull(G, e_p P)
    backward         pull(G, e_p P)
    reduction        push(G, e_r T)
    once per step    barrier, AR(N/G, e_r T/G), publish, barrier

Each rank has a window that all ranks of its group map: the published shard, and A = 1 accumulator for its gradient.
Ranks wait for each other once per step: at the first barrier all pushes are over and the accumulator becomes the
gradient, at the second all shards are published.  Units of the same G share both barriers, and one all-reduce of all
accumulators (`planner.cost.shared_collectives`).  Publish reads the fp32 shard and writes it in compute dtype, and
reads, copies out and clears the accumulators.  What others push is added as it comes, so that the last bits of a sum
differ from run to run (not so in `planner.strategies.odc_ordered`).

    W    (e_p P + A e_r T)/G, always there; of a unit that is never called there is none
    RSI  is pushed as it was computed, e_p T: the accumulators are in fp32 all the same (a link carries fp32)
    SG   is copied out of the accumulator once per step; AG and RSI are what is pulled and pushed

With `+offload`, windows stay on the device and are filled from the host: S and SG are copied once per step (not run
on a GPU).  The search offers it where micro-batches are uneven, which is what it is for, and on the device.
"""

from dataclasses import dataclass, replace

from planner.collectives import Operation
from planner.strategies.spec import Collective, Phase, Strategy, StrategySpec, Volume
from profiler.cluster.cluster import Cluster


@dataclass(frozen=True)
class OneSided(StrategySpec):
    """Pulled and pushed inside a group."""

    wrapping: str = "one_sided"
    gather: Operation = "pull"
    reduction: Operation = "push"
    one_sided: bool = True
    offload_buffers: bool = False

    def groups(self, cluster: Cluster) -> tuple[int, ...]:
        return tuple(g for g in range(2, cluster.gpus_per_node + 1) if cluster.gpus_per_node % g == 0)

    def offered(self, strategy: Strategy, uneven: bool) -> bool:
        return uneven and not strategy.offload

    def collectives(self, volume: Volume, strategy: Strategy, cluster: Cluster) -> tuple[Collective, ...]:
        pulled, again, pushed, across = super().collectives(volume, strategy, cluster)
        # The first accumulator is read and written to the gradient, each other is read and added; all are cleared.
        moved = 4 * self.accumulators(strategy) - 1
        copied = volume.rested + volume.gathered + moved * volume.reduced
        publish = Collective("publish", strategy.group, 1, copied // strategy.group, "step")
        barrier = Collective("barrier", strategy.group, 1, 0, "step", shared=True)
        across = replace(across, shared=not self.ordered)
        return pulled, again, pushed, barrier, across, publish, barrier

    def host_copies(self, strategy: Strategy, cluster: Cluster) -> tuple[tuple[Phase, bool], ...]:
        return ("step", False), ("step", True)

    def accumulators(self, strategy: Strategy) -> int:
        return strategy.group if self.ordered else 1

    def without_windows(self, strategy: Strategy, world_size: int) -> Strategy:
        """Return what runs in place of one of its strategies where ranks cannot map each other's memory."""
        name = "shard" if strategy.group == world_size else "group_shard"
        return Strategy(name, strategy.group, strategy.offload)


SPEC = OneSided(
    "odc", 80, "sharded inside a node; one-sided pulls and pushes, synchronized once per step", argument="group"
)
