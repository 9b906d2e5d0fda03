"""Windows for rehearsals: one process stands for one rank, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.odc.windows import Transport, Window, WindowSpec

_rehearses = False


class RehearsedTransport(Transport):
    """Holds what one rank's windows take, in ordinary (or fake) tensors."""

    device_type = "cpu"

    def __init__(
        self, group: dist.ProcessGroup, specs: Sequence[WindowSpec], timeout_s: float, ordered: bool = False
    ) -> None:
        """Make the tensors; asks no other rank."""
        self.ranks, self.rank = tuple(dist.get_process_group_ranks(group)), group.rank()
        self.timeout_s, self.ordered, self.meetings = timeout_s, ordered, 0
        self.windows = tuple(Window(self, index, spec) for index, spec in enumerate(specs))
        self._unusable = ""
        self.published = [torch.empty(spec.shard_numel, dtype=spec.dtype) for spec in specs]
        accumulators = len(self.ranks) if ordered else 1
        self.sums = [torch.zeros(accumulators, spec.gradient_numel) for spec in specs]

    def publish(self, index: int, shards: Sequence[Tensor]) -> None:
        """Send nothing."""

    def pull(self, index: int, out: Tensor) -> None:
        """Leave `out` as it is."""

    def push(self, index: int, full: Tensor) -> None:
        """Send nothing."""

    def take_gradient(self, index: int) -> Tensor:
        return self.sums[index][0].clone()

    def wait_for_all(self, number: int, note: float, timeout_s: float) -> tuple[float, ...]:
        return (note,) * len(self.ranks)

    def release(self) -> None:
        self.published.clear()
        self.sums.clear()


def rehearses() -> bool:
    """Whether windows are for a rehearsal."""
    return _rehearses


@contextmanager
def rehearsed_windows() -> Iterator[None]:
    """Let windows that are opened within be for a rehearsal."""
    global _rehearses
    _rehearses = True
    try:
        yield
    finally:
        _rehearses = False
