"""Records the collectives that PyTorch issues: which, among whom, and how large.

    with record_collectives() as record:
        loss = model(batch)
        loss.backward()
    print(record)

A dispatch mode sees every collective of `torch.distributed`, whoever issues it: FSDP2 and DDP (also
from their hooks in backward), DTensor through functional collectives, or a user.  Barriers count as
well, with no bytes.  The source of the operators' names is the schemas that torch 2.13
registers as `c10d` and `_c10d_functional`; torch's own `CommDebugMode` counts the same ones but
not their groups or sizes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from profiler.simulated_ranks import NAMESPACES

OPERATIONS = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "irecv": "recv",
    "isend": "send",
    "monitoredbarrier": "barrier",
    "recv": "recv",
    "reducescatter": "reduce_scatter",
}
"""By how an operator's name in torch begins, without underscores; one that is not listed keeps its name."""


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


@contextmanager
def record_collectives() -> Iterator[list[Recorded]]:
    """Give a list that grows by one entry per collective that this rank issues, in their order."""
    record: list[Recorded] = []
    with CollectiveLog(record):
        yield record


class CollectiveLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends to a list what it sees."""

    def __init__(self, record: list[Recorded]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor_class, DTensor) for tensor_class in types):
            return NotImplemented  # DTensor unwraps itself; the collectives that it needs come back here
        out = func(*args, **kwargs or {})
        namespace, _, name = func.name().partition("::")
        if namespace in NAMESPACES:
            names = [argument.name for argument in func._schema.arguments]
            arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            group = arguments.get("process_group", arguments.get("group_name"))
            if group is not None:  # else it only waits or wraps
                self.record.append(_recorded(name.strip("_"), _ranks(group), arguments, out))
        return out


def _recorded(name: str, ranks: tuple[int, ...], arguments: Mapping[str, Any], out: Any) -> Recorded:
    """Describe a collective by its operator's name, arguments and result."""
    begins = name.replace("_", "")
    operation = next((operation for prefix, operation in OPERATIONS.items() if begins.startswith(prefix)), name)
    totals = []
    dtype = torch.uint8
    for value in (*arguments.values(), out):
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        totals.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        dtype = tensors[0].dtype if tensors else dtype
    if operation == "barrier":
        size_bytes = 0  # its tensor only says on which device
    elif operation in ("gather", "scatter"):  # only the root has the whole
        size_bytes = min(total for total in totals if total) * len(ranks)
    else:
        size_bytes = max(totals)
    return Recorded(operation, ranks, size_bytes, dtype)


def _ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group, given as operators get it: by name, boxed, or itself."""
    if isinstance(group, str):
        group = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))
