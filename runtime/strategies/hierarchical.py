"""Communication with groups: all-gather and reduce-scatter in two phases, for nodes with slow links.

With n nodes of g ranks, rank (node, l) and a shard of s elements per rank,

    all-gather        across nodes, n ranks with equal l:  n s elements, of which (n - 1) s cross the network
                      inside the node, g ranks:            g n s elements, in the order (l, node)
                      permuted to (node, l)
    reduce-scatter    permuted to (l, node), then the same phases the other way round

so that each rank receives (n - 1) s elements over the network, where a ring over all ranks sends
every shard over every node's link.  They plug into `fully_shard` as custom communication.  Either phase
of a reduce-scatter is the backend's, or a ring (`runtime.strategies.ring_reduce_scatter`).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.meshes import Meshes
from runtime.schedule import ScheduledUnit
from runtime.strategies.fully_sharded import FullyShardedUnit, shard, uses_ring
from runtime.strategies.ring_reduce_scatter import ring_reduce_scatter
from runtime.strategies.wrap_context import WrapContext
from runtime.torch_compat import AllGather, OrdinaryMemory, ReduceScatter, all_gather, reduce_scatter

Rings = tuple[bool, bool]
"""Whether the phase inside nodes, and the one across them, of a reduce-scatter is a ring."""


class _Phases(OrdinaryMemory):
    """The groups of both phases."""

    def __init__(self, meshes: Meshes, nodes: int, ranks_per_node: int) -> None:
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.across = meshes.group(nodes, stride=ranks_per_node)
        self.inside = meshes.group(ranks_per_node)


class TwoPhaseAllGather(_Phases, AllGather):
    """All-gather across nodes, then inside."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather `input_tensor` (s,) of every rank into `output_tensor` (nodes * ranks_per_node * s,)."""
        size = input_tensor.numel()
        of_nodes = input_tensor.new_empty(self.nodes * size)
        all_gather(of_nodes, input_tensor, self.across)
        gathered = torch.empty_like(output_tensor)
        all_gather(gathered, of_nodes, self.inside)
        by_node = gathered.view(self.ranks_per_node, self.nodes, size).transpose(0, 1)
        output_tensor.view(self.nodes, self.ranks_per_node, size).copy_(by_node)


class TwoPhaseReduceScatter(_Phases, ReduceScatter):
    """Reduce-scatter inside nodes, then across."""

    def __init__(self, meshes: Meshes, nodes: int, ranks_per_node: int, rings: Rings = (False, False)) -> None:
        super().__init__(meshes, nodes, ranks_per_node)
        self.inside_nodes, self.across_nodes = (ring_reduce_scatter if ring else reduce_scatter for ring in rings)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor` (nodes * ranks_per_node * s,) and leave this rank's part in `output_tensor` (s,).

        The mean of the nodes' means is the mean, as nodes have equally many ranks.
        """
        size = output_tensor.numel()
        by_node = input_tensor.view(self.nodes, self.ranks_per_node, size)
        by_rank = by_node.transpose(0, 1).contiguous().view(-1)
        of_node = output_tensor.new_empty(self.nodes * size)
        # A ring overwrites its input, but nobody reads these again.
        self.inside_nodes(of_node, by_rank, op, self.inside)
        self.across_nodes(output_tensor, of_node, op, self.across)


def wrap(unit: ScheduledUnit, context: WrapContext) -> FullyShardedUnit:
    """Shard a unit over all ranks, and let it communicate in two phases."""
    wrapped = shard(unit, context, context.meshes.mesh(context.schedule.world_size))
    phases = context.meshes, context.schedule.nodes, context.schedule.ranks_per_node
    inside, across = uses_ring(unit) or (False, False)  # Nothing is reduced where nothing is trained.
    wrapped.module.set_custom_all_gather(TwoPhaseAllGather(*phases))
    wrapped.module.set_custom_reduce_scatter(TwoPhaseReduceScatter(*phases, (inside, across)))
    return wrapped
