"""How much headroom a plan has where the user does not say, and when a step is shorter with more of it.

A plan that fills its limit with tensors makes CUDA's caching allocator give cached memory back in the middle of a step,
as memory of one stream is not another's.  For each such retry the device waits, and the host loses its lead.  So a
step is taken to last

    t = t_predicted + RETRY_S x retries

with the retries that plans of eight models and limits had on an H200 (docs/benchmarks/gpu.md#headroom).  Retries are
in no other prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

from osdp.planning.memory_options import NO_HEADROOM, Headroom
from profiler.cluster.cluster import Cluster

RETRY_S = 0.010
"""Of a step, for each retry: 6 to 13 ms, measured on an H200, of the four plans that did not wait for the host."""


@dataclass(frozen=True)
class AllocatorHeadroom:
    """A headroom, and how often a step makes the allocator give cached memory back with it."""

    headroom: Headroom
    retries: float
    """Of a step, the mean of the plans measured, interpolated in the headroom."""

    @property
    def retries_s(self) -> float:
        """What they make a step longer by."""
        return self.retries * RETRY_S


TIGHT = AllocatorHeadroom(Headroom(share=0.015), retries=3.1)
"""What the allocator needs for fragments with `expandable_segments:True`, beyond the 96 MiB that the clusters' files
keep for its rounding: derived in docs/benchmarks/allocator.md."""
ROOMY = AllocatorHeadroom(Headroom(share=0.15), retries=0.7)
LEAST_SHARE = 0.02
"""Of a step that retries have to take for another plan to be looked for; more than what predictions are off."""


def default_headroom(cluster: Cluster) -> Headroom:
    """Return what is left free where the user does not say: room for fragments, where there is CUDA's allocator."""
    return TIGHT.headroom if cluster.device.kind == "cuda" else NO_HEADROOM


def roomier_headroom(cluster: Cluster) -> Headroom | None:
    """Return what is left free in place of `default_headroom` where a step is shorter for it; None: never."""
    return ROOMY.headroom if cluster.device.kind == "cuda" else None
