"""PyTorch's collectives as its dispatcher has them: which an op is, among whom, and how large.

The names of the ops are those of the schemas that torch 2.13 registers as `c10d` and `_c10d_functional`; torch's own
`CommDebugMode` counts the same ones but not their groups or sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

NAMESPACES = frozenset({"c10d", "_c10d_functional"})
"""Of the ops that collectives are; private, read in torch 2.11 and 2.13."""
_OPERATIONS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "irecv": "recv",
    "isend": "send",
    "monitoredbarrier": "barrier",
    "recv": "recv",
    "reducescatter": "reduce_scatter",
}
"""By how an op's name begins, without underscores; one that is not listed keeps its name."""


@dataclass(frozen=True)
class Recorded:
    """One collective, as this rank issued it."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, broadcast, reduce, all_to_all, send, barrier, ..."""
    ranks: tuple[int, ...]
    """Global ranks of its process group, in the group's order."""
    size_bytes: int
    """Size of the whole tensor: what an all-gather makes, what a reduce-scatter takes."""
    dtype: torch.dtype


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an op's arguments by name."""
    return {**dict(zip((one.name for one in op._schema.arguments), args, strict=False)), **kwargs}


def group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the group of a collective, given to it by name, boxed or as it is; None of an op that has none."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    return _resolve_process_group(cast(Any, group)) if isinstance(group, str) else dist.ProcessGroup.unbox(group)


def recorded(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any = None) -> Recorded | None:
    """Return what collective an op is that has returned `out`; None if it only waits or wraps."""
    arguments = arguments_of(op, args, kwargs)
    if (group := group_of(arguments)) is None:
        return None
    name = op._schema.name.partition("::")[2].strip("_")
    begins, ranks = name.replace("_", ""), tuple(dist.get_process_group_ranks(group))
    operation = next((one for prefix, one in _OPERATIONS.items() if begins.startswith(prefix)), name)
    totals, dtype = [0], torch.uint8
    for value in (*arguments.values(), out):
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        totals.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        dtype = tensors[0].dtype if tensors else dtype
    if operation == "barrier":
        size_bytes = 0  # its tensor only says on which device
    elif operation in ("all_gather", "gather", "scatter"):  # not all are handed the whole
        size_bytes = min((total for total in totals if total), default=0) * len(ranks)
    else:
        size_bytes = max(totals)
    return Recorded(operation, ranks, size_bytes, dtype)
