"""Tensors of which every rank holds some parts, as `torch.distributed.checkpoint` saves and loads them.

DCP asks an object what to write (`__create_write_items__`), what to read (`__create_chunk_list__`)
and where the data is (`__get_tensor_shard__`).  A DTensor answers for one part a rank; a GlobalTensor
does for any number of parts, anywhere.  Parts that several ranks hold are written by one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from profiler.errors import OsdpError

Part = tuple[tuple[int, ...], Tensor]
"""Where a part starts in the whole tensor, and its data."""


class NoTensorError(OsdpError, AttributeError):
    """Says that parts are used as a tensor."""


@dataclass(frozen=True, eq=False)
class GlobalTensor:
    """The parts that this rank holds of a tensor; they do not overlap."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    parts: tuple[Part, ...]
    """None where this rank holds nothing."""

    def __post_init__(self) -> None:
        for offsets, data in self.parts:
            ends = [start + size for start, size in zip(offsets, data.shape, strict=True)]
            if data.dtype != self.dtype or any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise ValueError(f"{data.dtype} {tuple(data.shape)} at {offsets} is no part of {self}")

    def copy_to_cpu(self) -> GlobalTensor:
        """Return a copy whose data does not change when training goes on."""
        copies = tuple((offsets, data.to("cpu", copy=True)) for offsets, data in self.parts)
        return GlobalTensor(self.shape, self.dtype, copies)

    def detach(self) -> GlobalTensor:
        """Return itself: its parts have no history."""
        return self

    def clone(self) -> GlobalTensor:
        """Return a copy, as loops keep of the best state dict so far."""
        return GlobalTensor(self.shape, self.dtype, tuple((offsets, data.clone()) for offsets, data in self.parts))

    def cpu(self) -> GlobalTensor:
        """Return it on the host."""
        return GlobalTensor(self.shape, self.dtype, tuple((offsets, data.cpu()) for offsets, data in self.parts))

    def gather(self, device: torch.device) -> Tensor:
        """Return the whole tensor, on a device. A collective call."""
        full = torch.zeros(self.shape, dtype=self.dtype, device=device)
        for offsets, data in self.parts:
            full[tuple(slice(start, start + size) for start, size in zip(offsets, data.shape, strict=True))] = data
        # All ranks that have a byte have the same, and the others zero.
        dist.all_reduce(full.reshape(-1).view(torch.uint8), op=dist.ReduceOp.MAX)
        return full

    def __getattr__(self, name: str) -> NoReturn:
        """Raise for what tensors have and this has not: an AttributeError too, for whoever asks whether it has."""
        if name.startswith("__"):
            raise AttributeError(name)
        what = "a value of a sharded state dict is no tensor: one rank owns the parameter, or its layer is split"
        advice = "use model.full_state_dict(rank0_only=False), or osdp.averaging.AveragedParameters(model) for averages"
        raise NoTensorError(what, got=f".{name} of {self}", advice=advice)

    def _compute(self, *_: object) -> NoReturn:
        self.__getattr__("+, -, * or /")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _compute

    def __repr__(self) -> str:
        parts = ", ".join(f"{tuple(data.shape)} at {offsets}" for offsets, data in self.parts)
        return f"GlobalTensor({self.shape}, {self.dtype}: {parts or 'nothing here'})"

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), data.size()) for offsets, data in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, data in self.parts:
            if torch.Size(offsets) == index.offset:
                return data
        raise ValueError(f"{index.fqn}: this rank holds nothing at {index.offset}")


class GlobalSavePlanner(DefaultSavePlanner):
    """Plans the saving of a flat dict of GlobalTensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the data to be written; DCP's own looks into tensors only."""
        part: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return part


class GlobalLoadPlanner(DefaultLoadPlanner):
    """Plans loading into a flat dict of GlobalTensors, in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the targets as they are; DCP's own replaces what is no tensor by None."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the data to be overwritten."""
        part: Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return part
