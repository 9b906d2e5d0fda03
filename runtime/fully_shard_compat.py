"""What `fully_shard` does otherwise while a unit is wrapped, or a dry run's model: patches of its private parts.

Run on torch 2.13.0, 2.12.1 and 2.11.0.

    share_secondary_mesh         `reshard_after_forward=K` makes a new mesh, and so new process groups,
                                 for every call; here all units with equal K get one
    containers_with_forward      2.11 refuses lists of modules that have a forward, such as parametrizations
    managing_all                 FSDP2 leaves out parameters of modules inside those that it has wrapped already
    few_chunks                   FSDP2 cuts a parameter into as many chunks as there are ranks
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest.mock import patch

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fully_shard


def share_secondary_mesh(mesh: DeviceMesh) -> AbstractContextManager[object]:
    """Let `fully_shard(reshard_after_forward=K)` use `mesh`, of shape (N / K, K), instead of a new one."""
    return patch.object(_fsdp_init, "DeviceMesh", lambda device_type, ranks: mesh)


def containers_with_forward() -> AbstractContextManager[object]:
    """Let `fully_shard` take lists and dicts of modules that have a forward of their own, as from 2.13 on."""
    check = cast(Any, _fully_shard)._validate_module

    def validate(module: Any, func_name: str) -> None:
        if getattr(type(module), "forward", None) is nn.Module.forward:  # of several modules it is given the list
            check(module, func_name)

    return patch.object(_fully_shard, "_validate_module", validate)


def managing_all(parameters: Collection[nn.Parameter]) -> AbstractContextManager[object]:
    """Let `fully_shard` take these parameters, also where the modules that own them lie in what is wrapped already.

    As of an embedding inside a wrapped backbone, which the model itself multiplies its outputs with.
    """
    find = cast(Any, _fsdp_init)._get_managed_modules

    def managed(roots: tuple[nn.Module, ...], *args: Any, **kwargs: Any) -> list[nn.Module]:
        found: list[nn.Module] = find(roots, *args, **kwargs)
        inside = (module for root in roots for module in root.modules())
        owners = [module for module in inside if any(one in parameters for one in module._parameters.values())]
        return list(dict.fromkeys([*owners, *found]))

    return patch.object(_fsdp_init, "_get_managed_modules", managed)


def few_chunks() -> AbstractContextManager[object]:
    """Let `fully_shard` chunk a parameter lazily: only the chunks that it looks at, not one for every rank.

    For dry runs of a thousand ranks, where cutting fake tensors would take minutes.
    """
    return patch.object(_fsdp_param, "_chunk_with_empty", _Chunks)


class _Chunks(Sequence[Tensor]):
    """`torch.chunk(tensor, count, dim)`, filled up with empty ones, of which each is made when asked for."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self.tensor, self.parts, self.dim = tensor, count, dim
        self.rows = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self.parts

    def __getitem__(self, index: Any) -> Any:
        size = self.tensor.size(self.dim)
        start = min(index * self.rows, size)
        if start == size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.rows, size - start))
