"""A full copy on every rank, G = 1: nothing is gathered, and gradients are all-reduced once per step, AR(N, e_r T).

Plans that take nothing else run as DistributedDataParallel runs them (`planner.cost.ddp`).  With `+offload`, S is
copied to the device before forward and before backward, and SG back once per step.
"""

from dataclasses import dataclass

from planner.strategies.spec import Strategy, StrategySpec
from profiler.cluster.cluster import Cluster


@dataclass(frozen=True)
class Replicate(StrategySpec):
    """A full copy on every rank."""

    def groups(self, cluster: Cluster) -> tuple[int, ...]:
        return (1,)


SPEC = Replicate(
    "replicate", 10, "a full copy on every rank; gradients all-reduced once per step", baseline="DDP", by_ddp=True
)
COPY = Strategy(SPEC.name, 1)
"""A copy on the device."""
FIRST_BUCKET_BYTES = 1 << 20
"""Where all is replicated: the first bucket of gradients is closed by the parameter that makes it this large.

As torch does (`_DEFAULT_FIRST_BUCKET_BYTES`).
"""
BUCKET_BYTES = 25 << 20
"""The same for all other buckets (torch: `bucket_cap_mb`)."""
