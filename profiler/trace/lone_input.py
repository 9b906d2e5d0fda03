"""What of a block's input would be freed if it were offloaded: what nothing else holds.

It is seen in two passes.  Where blocks are kept, no other block saves it, is handed it or keeps it, recomputed
selectively, as what its last matrix product returned.  And in a forward in which blocks save nothing
(`Recompute.OFFLOADED`), it is gone when the next call begins: neither the code around blocks holds it, in a list or for
a later sum, nor does what autograd saves there, nor another argument of the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from profiler.offloaded_input import offloaded_argument
from profiler.rerun_arguments import copied
from profiler.trace.live_storage import LiveStorage


class LoneInput:
    """The input of one run of a block that would be offloaded."""

    def __init__(self, storage: LiveStorage) -> None:
        self._storage = storage
        self.lone_bytes = 0
        """Its bytes, if nothing else saves it; 0 before that is known."""
        self.is_let_go = False
        """Whether it is gone when a block that saves nothing is over."""

    def note_savers(self, number: int) -> None:
        """Note whether any but the block, an execution of this number, saves it."""
        storage = self._storage
        is_lone = storage.taken_by == [number] and storage.savers.keys() <= {number} and not storage.is_product
        self.lone_bytes = storage.bytes if is_lone else 0

    def note_holders(self) -> None:
        """Note whether anything holds it as the next call begins."""
        self.is_let_go = self._storage() is None


def lone_input(args: Sequence[Any], kwargs: Mapping[str, Any], live: Mapping[int, LiveStorage]) -> LoneInput | None:
    """Return the input that would be offloaded of a block's arguments, None if there is none or it is a part only."""
    name = offloaded_argument(args, kwargs)
    if name is None:
        return None
    tensor: Tensor = args[name] if isinstance(name, int) else kwargs[name]
    storage = live.get(tensor.untyped_storage()._cdata)
    return LoneInput(storage) if storage is not None and storage.bytes == tensor.nbytes else None


def version_of_offloaded(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return how often the argument that would be offloaded was changed in place."""
    name = offloaded_argument(args, kwargs)
    return None if name is None else (args[name] if isinstance(name, int) else kwargs[name])._version


def without_offloaded(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return a block's arguments but for that which is offloaded: recomputation holds on to these, as they are now."""
    name = offloaded_argument(args, kwargs)
    others = [copied(one) for place, one in enumerate(args) if place != name]
    return others, {key: copied(one) for key, one in kwargs.items() if key != name}


def note_products(handed: Iterable[LiveStorage], returned: Iterable[LiveStorage], made: Iterable[LiveStorage]) -> None:
    """Note which of what a block returned without running are products: as of what a block like it made."""
    others = {one.key for one in handed}
    own = (one for one in returned if one.key not in others)
    for storage, like in zip(own, made, strict=False):
        storage.is_product = like.is_product


@contextmanager
def saving_nothing() -> Iterator[None]:
    """Have autograd save nothing: no backward may follow."""

    def nothing(_: Tensor) -> Any: ...

    with torch.autograd.graph.saved_tensors_hooks(nothing, nothing):
        yield
