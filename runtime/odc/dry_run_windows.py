"""Windows for dry runs: one process stands for one rank, and nothing is sent."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.odc.windows import Transport, WindowSpec


class DryRunTransport(Transport):
    """Holds what one rank's windows take, in ordinary (or fake) tensors."""

    device_type = "cpu"

    def __init__(
        self, group: dist.ProcessGroup, specs: Sequence[WindowSpec], timeout_s: float, ordered: bool = False
    ) -> None:
        super().__init__(group, specs, timeout_s, ordered)
        self.published = [torch.empty(spec.shard_numel, dtype=spec.dtype) for spec in specs]
        self.accumulated = [torch.zeros(self.accumulators, spec.gradient_numel) for spec in specs]

    def _check_same(self, specs: Sequence[WindowSpec]) -> None:
        """Ask no other rank."""

    def publish(self, index: int, shards: Sequence[Tensor]) -> None:
        """Send nothing."""

    def pull(self, index: int, out: Tensor) -> None:
        """Leave `out` as it is."""

    def push(self, index: int, full: Tensor) -> None:
        """Send nothing."""

    def all_reduce(self, across: dist.ProcessGroup) -> None:
        """Send nothing."""

    def sums(self) -> Tensor:
        return torch.cat([sums.view(-1) for sums in self.accumulated])

    def take_gradient(self, index: int) -> Tensor:
        return self.accumulated[index][0].clone()

    def wait_for_all(self, number: int, note: float, timeout_s: float) -> tuple[float, ...]:
        return (note,) * len(self.ranks)

    def release(self) -> None:
        self.published.clear()
        self.accumulated.clear()


def is_dry_run() -> bool:
    """Whether the process group is that of a dry run (`runtime.observe.dry_run`)."""
    return dist.get_backend() == "fake"
