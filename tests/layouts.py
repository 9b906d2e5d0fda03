"""How DTensors of four ranks may be laid out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from runtime.torch_compat import uneven_dtensor

LayOut = Callable[[Tensor], Tensor]


def layouts_of_four(rank: int) -> tuple[LayOut, LayOut, LayOut, LayOut]:
    """Return what lays a whole tensor out: in rows, whole on rank 2, in rows of two groups, and whole on all."""
    mesh, groups = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))

    def laid_out(whole: Tensor, *placements: Placement) -> Tensor:
        on = mesh if len(placements) == 1 else groups
        return distribute_tensor(whole.clone(), on, placements, src_data_rank=None)

    def sharded(whole: Tensor) -> Tensor:
        return laid_out(whole, Shard(0))

    def owned(whole: Tensor) -> Tensor:
        return uneven_dtensor(whole.clone() if rank == 2 else whole[:0].clone(), mesh, whole.shape)

    def sharded_in_groups(whole: Tensor) -> Tensor:
        return laid_out(whole, Replicate(), Shard(0))

    def replicated(whole: Tensor) -> Tensor:
        return laid_out(whole, Replicate())

    return sharded, owned, sharded_in_groups, replicated
