"""Ranks that are not there: a model that runs collectives itself is traced, and run dry, by one process.

Losses that compare the samples of all ranks, statistics over them and tokens sent to the ranks of their experts need a
process group.  `simulated_ranks` makes PyTorch's fake one, whose collectives return at once; `exchanged` says what they
leave if all ranks hold the same, as the lengths that ranks tell each other before they exchange rows.  The
temporaries that backends allocate themselves are those of `in_one_piece`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.testing._internal.distributed.fake_pg import FakeStore  # private; the same in torch 2.11 to 2.13

NAMESPACES = frozenset({"c10d", "_c10d_functional"})
"""Of the ops that collectives are; private, read in torch 2.11 and 2.13."""


@contextmanager
def simulated_ranks(world_size: int | None, rank: int = 0) -> Iterator[None]:
    """Be one rank of a process group that sends nothing, unless there is a process group; None: leave it at that."""
    if world_size is None or dist.is_initialized():
        yield
        return
    hook = sys.excepthook  # which gets one around it that says the rank of each line
    debugging: Any = dist  # of which PyTorch's hints leave out what follows
    level = debugging.get_debug_level()
    debugging.set_debug_level(debugging.DebugLevel.OFF)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wants other ranks that answer
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    finally:
        debugging.set_debug_level(level)
    try:
        yield
    finally:
        sys.excepthook = hook
        if dist.is_initialized():
            dist.destroy_process_group()


class Exchange(NamedTuple):
    """What a tensor holds after a collective of ranks that hold the same."""

    target: Tensor
    source: Tensor
    elements: int
    """Of the source, from its beginning: the target holds them over and over."""

    @property
    def is_even(self) -> bool:
        """Whether the target holds them a whole number of times."""
        return self.elements <= self.source.numel() and not self.target.numel() % max(1, self.elements)


def exchanged(op: OpOverload, args: Sequence[Any], out: Any) -> Iterator[Exchange]:
    """Yield what a collective has received.

    What it reduces in place stays as it is: the largest of equal numbers is that of lengths, for which models ask.
    """
    kind = op.overloadpacket
    if kind in _GATHERED:
        for targets, source in zip(args[0], args[1], strict=True):
            yield from (Exchange(target, source, source.numel()) for target in targets)
    elif kind is c10d._allgather_base_:
        yield Exchange(args[0], args[1], args[1].numel())
    elif kind is c10d.alltoall_:
        yield from (Exchange(target, args[1][0], target.numel()) for target in args[0])
    elif kind is c10d.alltoall_base_:
        yield Exchange(args[0], args[1], args[0].numel() // dist.ProcessGroup.unbox(args[2]).size())
    elif isinstance(out, Tensor) and isinstance(args[0], Tensor):
        yield Exchange(out, args[0], min(out.numel(), args[0].numel()))


c10d = torch.ops.c10d
_GATHERED = (c10d.allgather_, c10d.gather_)


def repeated(values: Tensor, elements: int, shape: Sequence[int]) -> Tensor:
    """Return a tensor of a shape that holds the first `elements` of the values over and over."""
    first = values.reshape(-1)[:elements]
    return first.repeat(prod(shape) // max(1, elements)).view(shape)


def objects_alike() -> AbstractContextManager[Any]:
    """Have every rank send the same Python objects."""

    def all_gather_object(objects: list[Any], one: Any, *rest: Any, **options: Any) -> None:
        objects[:] = [one] * len(objects)

    def unchanged(*rest: Any, **options: Any) -> None:
        """What rank 0 sends is there."""

    return patch.multiple(dist, all_gather_object=all_gather_object, broadcast_object_list=unchanged)


def in_one_piece() -> Mapping[str, Callable[..., Any]]:
    """Return kernels, by the name of the op, of collectives that take lists.

    Backends send one tensor, so they allocate one of all ranks' parts (`newLikeFlat` in ProcessGroupNCCL.cpp and
    ProcessGroupGloo.cpp), and copy.
    """
    return {
        "allgather_": partial(_with_flat, c10d.allgather_.default, 0),
        "reduce_scatter_": partial(_with_flat, c10d.reduce_scatter_.default, 1),
    }


def _with_flat(op: OpOverload, lists: int, *args: Any) -> Any:
    """Run an op while there is memory for each of its lists of tensors, which are the argument of that position."""
    flat = [parts[0].new_empty(sum(part.numel() for part in parts)) for parts in args[lists]]
    with torch._C._AutoDispatchBelowAutograd():
        out = op(*args)
    del flat
    return out
