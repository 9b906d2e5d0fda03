"""Collectives that all units of one strategy send together, once per step (`Collective.shared`).

With t(S) the seconds of what they share for S bytes of gradients, B those of the whole model, called and trained, and
b_u those of unit u, a plan is charged for each of its strategies

    t(0) + sum_u b_u / B * (t(B) - t(0))

latencies once, and bytes by unit.  That is t(sum_u b_u) where t is a latency and a rate, as alpha-beta is; where it is
not (NCCL's choice, measured times), bytes take what they take if all units are of the strategy.  In the sum over
stages, which the search looks at, each unit has its share of what the whole model would take, and a whole plan the rest
of the latencies that shares do not make up:

    share of a unit    b_u / B * t(B)                        `SharedCollectives.share_s`
    rest of a plan     (1 - sum_u b_u / B) * t(0)            `rest_s`

The rest is nothing where all units that train are of the strategy.  In other plans the search's bound is lower by it,
at most the latencies of one step for each strategy, and so is valid; what whole plans take has it.  A plan that is
slower in the sum over stages and has less of it can be passed over, which the gap covers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.strategies.spec import Strategy, Volume
from profiler.cluster.cluster import Cluster
from profiler.model_graph import Parameter

ROUNDING = 1e-9
"""What parts that add up to a whole may lack of it."""


@dataclass(frozen=True, slots=True)
class SharedCollectives:
    """What all units of one strategy share."""

    strategy: Strategy
    """Without offload, as units on the device and on the host share it."""
    model_bytes: int
    """B."""
    latency_s: float
    """t(0)."""
    whole_s: float
    """t(B)."""

    @classmethod
    def of(cls, strategy: Strategy, model_bytes: int, cluster: Cluster) -> SharedCollectives | None:
        """Return what units of a strategy share; None if they share nothing."""
        alike = replace(strategy, offload=False) if strategy.offload else strategy
        sent = strategy.spec.collectives(Volume(0, model_bytes, 0), alike, cluster)
        shared = [one for one in sent if one.shared and one.ranks > 1]
        if not shared:
            return None
        # A collective of no bytes is none, so that its latency is that of one byte.
        latency_s = sum(replace(one, size_bytes=min(1, one.size_bytes)).time_s(cluster) for one in shared)
        return cls(alike, model_bytes, latency_s, sum(one.time_s(cluster) for one in shared))

    def part(self, size_bytes: int) -> float:
        """Return b_u / B of a unit, whose trained gradients have so many bytes."""
        return size_bytes / self.model_bytes if size_bytes else 0.0

    def share_s(self, size_bytes: int) -> float:
        """Return the seconds that a unit is charged for."""
        return self.part(size_bytes) * self.whole_s


Parts = tuple[tuple[SharedCollectives, float], ...]
"""What units share, and which part of the model's gradients they have."""


def trained_bytes(parameters: Iterable[Parameter]) -> int:
    """Return the bytes of gradients in reduce dtype: not padded, so that those of slices are those of the whole."""
    return sum(parameter.reduce_bytes * parameter.numel for parameter in parameters if parameter.trainable)


def added(parts: Iterable[tuple[Parts, int]]) -> Parts:
    """Return the sum of parts, each so many times."""
    found = dict[SharedCollectives, float]()
    for some, times in parts:
        for shared, part in some:
            found[shared] = found.get(shared, 0.0) + times * part
    return tuple(found.items())


def rest_s(parts: Iterable[tuple[Parts, int]]) -> float:
    """Return the seconds of latencies in a step that the shares of stages, each so many times, do not make up."""
    missing = ((shared, 1.0 - part) for shared, part in added(parts))
    return sum(part * shared.latency_s for shared, part in missing if part > ROUNDING)
