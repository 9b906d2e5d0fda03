"""Process groups and device meshes: one group per distinct set of ranks, shared by all units.

Ranks are numbered node by node.  A group over n ranks that are `stride` apart is, for rank r, the
one of the world's such groups that r is in; every rank makes all of them, in the same order, as
`torch.distributed.new_group` demands.
"""

from __future__ import annotations

from functools import lru_cache

import torch.distributed as dist
from torch import tensor
from torch.distributed.device_mesh import DeviceMesh

from profiler.errors import OsdpError
from runtime.torch_compat import default_timeout


def check_process_group(before: str = "OSDP(...)") -> None:
    """Raise OsdpError if there is no process group."""
    if not dist.is_initialized():
        raise OsdpError(
            "there is no process group",
            expected=f"torch.distributed.init_process_group() before {before}",
            advice="start the script with torchrun, which sets what init_process_group needs",
        )


def check_world(nodes: int, ranks_per_node: int) -> None:
    """Raise OsdpError if there is no process group, or one of another size than a plan's."""
    check_process_group()
    if dist.get_world_size() != nodes * ranks_per_node:
        raise OsdpError(
            "the plan is for another number of ranks",
            got=f"{dist.get_world_size()} in the process group",
            expected=f"{nodes * ranks_per_node}: {nodes} x {ranks_per_node}, as in the plan",
            advice="start that many ranks, or plan again for the ranks that there are",
        )


@lru_cache(maxsize=1)
def _groups_of(world: dist.ProcessGroup) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return the groups that were made beside the default group, by their ranks; all models share them."""
    return {}


@lru_cache(maxsize=1)
def _meshes_of(world: dist.ProcessGroup) -> dict[tuple[str, tuple[int, ...]], DeviceMesh]:
    """Return the meshes that were made, by device type and shape; all models share them."""
    return {}


class Meshes:
    """Makes the groups and meshes of the default process group's ranks and remembers them."""

    def __init__(self, device_type: str, nodes: int, ranks_per_node: int) -> None:
        check_world(nodes, ranks_per_node)
        self.device_type, self.world_size = device_type, nodes * ranks_per_node
        self._groups = _groups_of(dist.group.WORLD)
        self._meshes = _meshes_of(dist.group.WORLD)

    def group(self, ranks: int, stride: int = 1) -> dist.ProcessGroup:
        """Return this rank's group of `ranks` ranks that are `stride` apart. A collective call.

        Raises OsdpError if such groups do not divide the world.
        """
        if ranks < 1 or stride < 1 or self.world_size % (ranks * stride):
            raise OsdpError(
                "a mesh does not divide the world",
                got=f"groups of {ranks} ranks that are {stride} apart, among {self.world_size}",
                expected=f"a divisor of {self.world_size}",
                advice="plan again for this number of ranks",
            )
        if ranks == self.world_size:
            group = dist.group.WORLD
            assert group is not None
            return group
        mine = None
        for start in range(0, self.world_size, ranks * stride):
            for first in range(start, start + stride):
                members = tuple(range(first, first + ranks * stride, stride))
                if members not in self._groups:
                    self._groups[members] = dist.new_group(list(members), timeout=default_timeout())
                if dist.get_rank() in members:
                    mine = self._groups[members]
        assert mine is not None
        return mine

    def group_mesh(self, ranks: int) -> DeviceMesh:
        """Return the mesh of this rank's group of `ranks` neighbours alone, of one dimension. A collective call."""
        if ranks == self.world_size:
            return self.mesh(ranks)
        group, key = self.group(ranks), (f"{self.device_type} group", (ranks,))
        if key not in self._meshes:
            self._meshes[key] = DeviceMesh.from_group(group, self.device_type, mesh_dim_names=("shard",))
        return self._meshes[key]

    def mesh(self, shards: int) -> DeviceMesh:
        """Return the mesh over which a copy is split among `shards` neighbours. A collective call.

        One dimension if that is all ranks, else (copies, shards).
        """
        if shards == self.world_size:
            shape: tuple[int, ...] = (shards,)
            groups = [self.group(shards)]
        else:
            shape = (self.world_size // shards, shards)
            groups = [self.group(self.world_size // shards, stride=shards), self.group(shards)]
        key = (self.device_type, shape)
        if key not in self._meshes:
            if len(groups) == 1:
                self._meshes[key] = DeviceMesh.from_group(groups[0], self.device_type, mesh_dim_names=("shard",))
            else:
                ranks = tensor(range(self.world_size)).view(shape)
                names = ("replicate", "shard")
                self._meshes[key] = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=names)
        return self._meshes[key]
