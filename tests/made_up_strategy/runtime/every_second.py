"""Wrapping by `fully_shard` over every second rank."""

from __future__ import annotations

from runtime.schedule import ScheduledUnit
from runtime.strategies.fully_sharded import FullyShardedUnit, shard
from runtime.strategies.wrap_context import WrapContext


def wrap(unit: ScheduledUnit, context: WrapContext) -> FullyShardedUnit:
    """Shard a unit over ranks 0, 2, .. and over ranks 1, 3, .., which are replicas of each other."""
    return shard(unit, context, context.meshes.mesh(unit.strategy.group, unit.strategy.spec.stride))
