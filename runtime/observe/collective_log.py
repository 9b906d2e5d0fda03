"""Records the collectives that PyTorch issues: which, among whom, and how large.

    with record_collectives() as record:
        loss = model(batch)
        loss.backward()
    print(record)

A dispatch mode sees every collective of `torch.distributed`, whoever issues it: FSDP2 and DDP (also
from their hooks in backward), DTensor through functional collectives, or a user.  Barriers count as
well, with no bytes (`profiler.collective_ops`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.collective_ops import NAMESPACES, Recorded, recorded


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
        if func.namespace in NAMESPACES and (found := recorded(func, args, kwargs or {}, out)) is not None:
            self.record.append(found)
        return out
