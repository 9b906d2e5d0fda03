"""What a plan is made for: cluster, optimizer, precision, micro-batch; and how fast a device computes.

Roofline of one direction of a call (Williams et al., "Roofline", CACM 2009), matrix products and
other kernels apart because they do not overlap on one stream:

    t = max(matmul_flops / (efficiency * peak), matmul_bytes / bandwidth) + other_bytes / bandwidth
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.imbalance import NO_WAITS, Waits
from planner.unit_memory import OPTIMIZERS, Optimizer
from profiler.cluster import Cluster
from profiler.errors import OsdpError
from profiler.graph import Work


@dataclass(frozen=True, eq=False)
class Workload:
    """One point of the outer sweep: everything but the plan and the model. Compared by identity."""

    cluster: Cluster
    optimizer_name: str
    precision: str
    micro_batch: int
    """Samples per rank in one forward."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    waits: Waits = NO_WAITS
    """How long ranks wait for the slowest."""

    def __post_init__(self) -> None:
        if self.optimizer_name not in OPTIMIZERS:
            raise OsdpError("unknown optimizer", got=self.optimizer_name, expected=", ".join(OPTIMIZERS))
        rates = self.cluster.device.matmul_flops_per_s
        if self.precision not in rates:
            raise OsdpError(f"{self.cluster.device.name} has no rate for this precision", got=self.precision,
                            expected=", ".join(rates), advice="another --precision, or another --cluster")  # fmt: skip

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer's description."""
        return OPTIMIZERS[self.optimizer_name]

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks together train on in one step."""
        return self.cluster.world_size * self.micro_batch * self.accumulation

    def compute_s(self, work: Work) -> float:
        """Return the seconds that one direction of a call computes."""
        device, batch = self.cluster.device, self.micro_batch
        rate = device.matmul_flops_per_s[self.precision].value * device.matmul_efficiency.value
        bandwidth = device.memory_bytes_per_s.value
        matmul_s = max(work.matmul_flops(batch) / rate, work.matmul_bytes(batch) / bandwidth)
        return matmul_s + work.other_bytes(batch) / bandwidth

    def optimizer_s(self, parameter_bytes: float, offloaded_bytes: float = 0.0) -> float:
        """Return the seconds of one optimizer step over fp32 shards of so many bytes on the device and on the host.

        The host steps after the device; without figures of it, it takes no time.
        """
        device, host = self.cluster.device, self.cluster.host
        seconds = parameter_bytes / device.memory_bytes_per_s.value
        seconds += offloaded_bytes / host.memory_bytes_per_s.value if host else 0.0
        return self.optimizer.touched * seconds
