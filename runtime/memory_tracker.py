"""Adds up the bytes of live tensor storages, on any device and on fake tensors.

    with LiveBytes() as live:
        live.hold([*model.parameters(), *states])
        loss = model(batch)
        loss.backward()
    print(live.peak_bytes)

PyTorch reports peak memory for CUDA only.  `LiveBytes` is a dispatch mode and so works on CPU and on
fake tensors too: it sees every tensor that an operator returns, every `resize_` of a storage (which
is how FSDP2 allocates and frees unsharded parameters), and every storage's death.  Views share their
storage, which counts once.  What a kernel or a communication library allocates for itself is
invisible to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

BLOCK_BYTES = 512
"""The CUDA caching allocator hands out multiples of this (c10/core/AllocatorConfig.h, kMinBlockSize)."""


def rounded(size_bytes: int) -> int:
    """Return what a caching allocator hands out for a request."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Peak:
    """The allocation after which most was live."""

    total_bytes: int
    """Live bytes after it."""
    phase: str
    """`LiveBytes.phase` at that time."""
    op: str
    """Operator that allocated."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is made while it is entered, and what it was told of by `hold`.

    Each storage counts rounded up to `BLOCK_BYTES`, so that a figure taken on CPU is comparable with
    the allocator's on CUDA.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = 0
        """Live now."""
        self.phase = ""
        """Name of what runs now; the user's to set, the peak remembers it."""
        self.peak = Peak(0, "", "")
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once since the start or `reset_peak`."""
        return self.peak.total_bytes

    def reset_peak(self) -> None:
        """Forget the peak; what is live now is the new one."""
        self.peak = Peak(self.total_bytes, self.phase, "reset_peak")

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before: parameters, optimizer states, a batch.

        Of a DTensor the local part counts. One that is known already does not count again.
        """
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._count(local.untyped_storage(), "hold")

    def __enter__(self) -> LiveBytes:
        tracker, resize = self, torch.UntypedStorage.resize_
        self._resize = resize

        def resize_(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
            resize(storage, size_bytes)
            tracker._count(storage, "resize_")
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # DTensor and its like unwrap themselves; their inner ops come back here
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), str(func))
        return out

    def _count(self, storage: torch.UntypedStorage, op: str) -> None:
        """Count a storage with its present size."""
        key, size = storage._cdata, rounded(storage.nbytes())
        if key not in self._live:
            self._live[key] = (weakref.ref(storage, partial(self._release, key)), 0)
        reference, known = self._live[key]
        self._live[key] = (reference, size)
        self.total_bytes += size - known
        if self.total_bytes > self.peak.total_bytes:
            self.peak = Peak(self.total_bytes, self.phase, op)

    def _release(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        """Stop counting a storage that died; its address may already be another's."""
        known, size = self._live[key]
        if known is reference:
            del self._live[key]
            self.total_bytes -= size
