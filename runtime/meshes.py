"""Process groups and device meshes: one group per distinct set of ranks, shared by all units.

Ranks are numbered node by node.  A group over n ranks that are `stride` apart is, for rank r, the
one of the world's such groups that r is in; every rank makes all of them, in the same order, as
`torch.distributed.new_group` demands.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from profiler.errors import OsdpError
from runtime.torch_compat import default_timeout, no_modes


def check_process_group(before: str = "OSDP(...)") -> None:
    """Raise OsdpError if there is no process group."""
    if not dist.is_initialized():
        what = "there is no process group"
        advice = "start the script with torchrun, which sets the environment that init_process_group reads"
        raise OsdpError(what, expected=f"torch.distributed.init_process_group() before {before}", advice=advice)


def check_world(nodes: int, ranks_per_node: int) -> None:
    """Raise OsdpError if there is no process group, or one of another size than a plan's."""
    check_process_group()
    if dist.get_world_size() != nodes * ranks_per_node:
        what, advice = "the plan is for another number of ranks", "start that many ranks, or make a plan for these"
        got = f"{dist.get_world_size()} in the process group"
        expected = f"{nodes * ranks_per_node}: {nodes} x {ranks_per_node}, as in the plan"
        raise OsdpError(what, got=got, expected=expected, advice=advice)


Groups = dict[tuple[int, ...], dist.ProcessGroup]
"""By their ranks."""
MeshesByShape = dict[tuple[str | int, ...], DeviceMesh]
"""By device type, shape and stride."""


@lru_cache(maxsize=1)
def _made_in(world: dist.ProcessGroup) -> tuple[Groups, MeshesByShape]:
    """Return the process groups besides the default one, and the meshes, that were made; all models share them."""
    return {}, {}


class Meshes:
    """Makes the groups and meshes of the default process group's ranks and remembers them."""

    def __init__(self, device_type: str, nodes: int, ranks_per_node: int) -> None:
        check_world(nodes, ranks_per_node)
        self.device_type, self.world_size = device_type, nodes * ranks_per_node
        self._groups, self._meshes = _made_in(dist.group.WORLD)

    def _rows(self, ranks: int, stride: int) -> list[tuple[int, ...]]:
        """Return all groups of `ranks` ranks that are `stride` apart."""
        if ranks < 1 or stride < 1 or self.world_size % (ranks * stride):
            what = "the groups of a strategy do not divide the world size"
            got = f"groups of {ranks} ranks that are {stride} apart, among {self.world_size}"
            expected, advice = f"a divisor of {self.world_size}", "plan again for this number of ranks"
            raise OsdpError(what, got=got, expected=expected, advice=advice)
        span = ranks * stride
        firsts = [start + offset for start in range(0, self.world_size, span) for offset in range(stride)]
        return [tuple(range(first, first + span, stride)) for first in firsts]

    def _group_among(self, groups: Iterable[tuple[int, ...]]) -> dist.ProcessGroup:
        """Return the one of these groups that this rank is in. A collective call."""
        mine = None
        for members in groups:
            if len(members) == self.world_size:
                return cast(dist.ProcessGroup, dist.group.WORLD)
            if members not in self._groups:
                self._groups[members] = dist.new_group(list(members), timeout=default_timeout())
            if dist.get_rank() in members:
                mine = self._groups[members]
        assert mine is not None
        return mine

    def group(self, ranks: int, stride: int = 1) -> dist.ProcessGroup:
        """Return this rank's group of `ranks` ranks that are `stride` apart. A collective call.

        Raises OsdpError if such groups do not divide the world.
        """
        return self._group_among(self._rows(ranks, stride))

    def across(self, shards: int, stride: int = 1) -> dist.ProcessGroup:
        """Return the group of ranks with equal places in groups of `shards` ranks. A collective call."""
        return self._group_among(zip(*self._rows(shards, stride), strict=True))

    def group_mesh(self, ranks: int, stride: int = 1) -> DeviceMesh:
        """Return the mesh of this rank's group alone, of one dimension. A collective call."""
        key, group = (self.device_type, ranks, stride), self.group(ranks, stride)
        if key not in self._meshes:
            with no_modes():
                self._meshes[key] = DeviceMesh.from_group(group, self.device_type, mesh_dim_names=("shard",))
        return self._meshes[key]

    def mesh(self, shards: int, stride: int = 1) -> DeviceMesh:
        """Return the mesh over which a copy is split among `shards` ranks that are `stride` apart. A collective call.

        One dimension if that is all ranks, else (copies, shards).
        """
        if shards == self.world_size:
            return self.group_mesh(shards)
        key = (self.device_type, self.world_size // shards, shards, stride)
        groups, names = [self.across(shards, stride), self.group(shards, stride)], ("replicate", "shard")
        if key not in self._meshes:
            with no_modes():
                ranks = torch.tensor(self._rows(shards, stride))
                self._meshes[key] = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=names)
        return self._meshes[key]
