"""Ranks that are not there: a model that runs collectives itself is traced, and run dry, by one process.

Losses that compare the samples of all ranks, statistics over them and tokens sent to the ranks of their experts need a
process group.  `simulated_ranks` makes PyTorch's fake one, whose collectives return at once; `exchanged` says what they
leave if all ranks hold the same, as the lengths that ranks tell each other before they exchange rows.  The
temporaries that backends allocate themselves are those of `in_one_piece`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore  # private; the same in torch 2.11 to 2.13
from torch.utils._pytree import tree_map_only

from profiler.collective_ops import arguments_of, group_of


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


def without_sending(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a collective of tensors that have data, and send none of it: other ranks may not trace."""
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, dict(kwargs)))
    return op(*args, **kwargs)


class Part(NamedTuple):
    """What of a tensor a collective hands on: elements, each times a factor."""

    start: int
    elements: int
    factor: int = 1

    def repeated(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a tensor of a shape that holds this part of `values` over and over."""
        part = values.reshape(-1)[self.start : self.start + self.elements]
        every = part.repeat(prod(shape) // self.elements).view(shape)
        return every * self.factor if self.factor != 1 else every


class Exchange(NamedTuple):
    """What a tensor holds after a collective of ranks that hold the same."""

    target: Tensor
    source: Tensor
    part: Part

    @property
    def is_known(self) -> bool:
        """Whether it is known: the source has the part, and the target holds it a whole number of times."""
        start, elements, factor = self.part
        has_it = 0 < elements <= self.source.numel() - start
        return has_it and factor > 0 and not self.target.numel() % elements


def exchanged(op: OpOverload, args: Sequence[Any], out: Any) -> list[Exchange]:
    """Return what is known of what a collective leaves; of all else that it writes to nothing is."""
    kind, group = op.overloadpacket, group_of(arguments_of(op, args, {}))
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    factor = _factor(_last_reduction[-1] if _last_reduction else None, size)
    if kind in _REDUCED:
        return [Exchange(one, one, Part(0, one.numel(), factor)) for one in args[0] if factor]
    if kind in _GATHERED:
        pairs = zip(args[0], args[1], strict=False)  # those that do not get it have no lists
        return [Exchange(one, own, Part(0, own.numel())) for every, own in pairs for one in every]
    if kind is c10d.reduce_scatter_:
        own = [parts[rank] for parts in args[1]]
        return [Exchange(one, part, Part(0, part.numel(), factor)) for one, part in zip(args[0], own, strict=True)]
    if kind is c10d.alltoall_:
        return [Exchange(one, args[1][rank], Part(0, args[1][rank].numel())) for one in args[0]]
    if kind is c10d.broadcast_:
        return [Exchange(one, one, Part(0, one.numel())) for one in args[0]]
    target, source, *others = args if op.namespace == "c10d" else (out, *args)
    if not isinstance(target, Tensor) or not isinstance(source, Tensor):
        return []
    part = _part(kind, target.numel(), source.numel(), others, rank, size, factor)
    return [] if part is None else [Exchange(target, source, part)]


def _part(kind: Any, filled: int, given: int, others: Sequence[Any], rank: int, size: int, factor: int) -> Part | None:
    """Return what of one tensor of `given` elements a collective hands on, to fill another; None: it is not known.

    `others`: its arguments after the tensors; `factor`: that of the last reduction which an object told.
    """
    if kind in (c10d._allgather_base_, functional.all_gather_into_tensor, *_UNCHANGED):
        return Part(0, given)
    if kind in (functional.all_reduce, functional.all_reduce_):
        return Part(0, given, _factor(others[0], size))
    if kind is functional.reduce_scatter_tensor:
        factor = _factor(others[0], size)
    if kind in (c10d._reduce_scatter_base_, functional.reduce_scatter_tensor):
        return Part(rank * filled, filled, factor)
    if kind in (c10d.alltoall_base_, functional.all_to_all_single):
        received, sent = others[1:3] if kind is c10d.alltoall_base_ else others[:2]
        are_alike = len(set(received)) <= 1 and len(set(sent)) <= 1
        return Part(rank * (filled // size), filled // size) if are_alike else None
    return None


c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
_REDUCED = (c10d.allreduce_, c10d.allreduce_coalesced_, c10d.reduce_)
_GATHERED = (c10d.allgather_, c10d.gather_)
_UNCHANGED = [getattr(functional, name, None) for name in ("broadcast", "wait_tensor", "_wrap_tensor_autograd")]


def _factor(reduction: Any, size: int) -> int:
    """Return by what equal numbers of so many ranks are multiplied; 0 if that is not known."""
    name = str(getattr(reduction, "name", reduction)).lower()
    return {"sum": size, "max": 1, "min": 1, "avg": 1}.get(name, 0)


_last_reduction: list[Any] = []
"""The operation of the collective that reduces now: to PyTorch's ops it is an object that tells nothing."""


def _noting(options: type) -> type:
    """Return a class of options of collectives that notes the reduction which it is given."""

    class Noting(options):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "reduceOp":
                _last_reduction[:] = [value]
            super().__setattr__(name, value)

    return Noting


@contextmanager
def alike_ranks() -> Iterator[None]:
    """Note how collectives reduce, and have every rank send the same Python objects.

    Not seen are functions for objects that a file has imported by name.
    """

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *rest: Any, **options: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def broadcast_object_list(object_list: list[Any], *rest: Any, **options: Any) -> None:
        """What rank 0 sends is there."""

    with ExitStack() as patched:
        patched.callback(_last_reduction.clear)
        for function in (all_gather_object, gather_object, broadcast_object_list):
            patched.enter_context(patch.object(dist, function.__name__, function))
        for name in _WITH_REDUCTIONS:
            options = _noting(getattr(distributed_c10d, name))
            patched.enter_context(patch.object(distributed_c10d, name, options))
        yield


_WITH_REDUCTIONS = ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions")
"""Classes by which PyTorch's functions hand on the reduction; the same in 2.11 and 2.13."""


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
