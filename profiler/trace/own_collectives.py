"""What the collectives are that a model runs itself, so that they can be priced: operation, group and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._ops import OpOverload

from profiler.simulated_ranks import group_of
from profiler.trace.op_tensors import output_tensors


class Kind(NamedTuple):
    """Collectives that are priced alike, but for their sizes."""

    operation: str
    """As of `planner.collectives`."""
    ranks: int
    stride: int
    """Between neighbouring ranks of the group."""


_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "all_gather",  # to one rank, which has as much to receive
    "scatter": "reduce_scatter",  # from one rank, which has as much to send
    "monitoredbarrier": "barrier",
    "barrier": "barrier",
}
"""By how an op's name begins, without underscores; the first that fits."""
_RECEIVING = ("recv", "irecv")
"""What waits for another rank; what is sent to others meanwhile takes no more time."""


def own_collective(op: OpOverload, args: Sequence[Any]) -> tuple[Kind, int] | None:
    """Return what an op of PyTorch's collectives is, and its bytes; None if it is not one, as waiting for one is not.

    The bytes are those of the whole tensor, as `planner.collectives.collective_s` takes it.
    """
    name = op._schema.name.split("::")[1].replace("_", "")
    sizes = [size for arg in args if (size := _bytes_of(arg))]
    group = group_of(op, args)
    if group is None:
        return None
    if name.startswith(_RECEIVING):
        source = next((one for one in args if isinstance(one, int)), group.rank())
        return Kind("broadcast", 2, max(1, abs(source - group.rank()))), max(sizes, default=0)
    operation = next((one for begins, one in _OPERATIONS.items() if name.startswith(begins)), None)
    if operation is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    # Those that are not the one which gives or gets all have their own part only.
    is_of_parts = name.startswith(("allgather", "gather", "scatter"))
    whole = len(ranks) * min(sizes, default=0) if is_of_parts else max(sizes, default=0)
    return Kind(operation, len(ranks), stride), 0 if operation == "barrier" else whole


def _bytes_of(argument: Any) -> int:
    """Return the bytes of a tensor, or of all in a list of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in output_tensors(argument))
