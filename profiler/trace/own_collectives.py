"""What the collectives that a model runs itself are priced as: operation, group and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._ops import OpOverload

from profiler.collective_ops import arguments_of, recorded


class Kind(NamedTuple):
    """Collectives that are priced alike, but for their sizes."""

    operation: str
    """As of `planner.collectives`."""
    ranks: int
    stride: int
    """Between neighbouring ranks of the group."""


_PRICED = {
    **{one: one for one in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce")},
    "gather": "all_gather",  # to one rank, which has as much to receive
    "scatter": "reduce_scatter",  # from one rank, which has as much to send
    "recv": "broadcast",  # among two; what is sent meanwhile takes no more time
    "barrier": "barrier",
}
"""By operation, as what it is priced."""


def own_collective(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Kind, int] | None:
    """Return what an op of PyTorch's collectives is priced as, and its bytes; None if it is not, as waiting is not.

    The bytes are those of the whole tensor, as `planner.collectives.collective_s` takes it.
    """
    found = recorded(op, args, kwargs)
    if found is None or found.operation not in _PRICED:
        return None
    ranks = found.ranks
    if found.operation == "recv":
        source = arguments_of(op, args, kwargs).get("src")
        ranks = ranks[:2] if source is None else (dist.get_rank(), ranks[source])
    stride = abs(ranks[1] - ranks[0]) if len(ranks) > 1 else 1
    return Kind(_PRICED[found.operation], len(ranks), stride), found.size_bytes
