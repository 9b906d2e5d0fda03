"""Where ranks cannot have windows: the same shards, communicated by FSDP2's collectives.

Units of `odc:G` become `group_shard:G`, or `shard` where G is all ranks, before anything is wrapped.  Pulls become
all-gathers and pushes reduce-scatters of the same sizes in the same groups, and the means are the same;
but ranks wait for each other in every micro-batch.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal

import torch.distributed as dist

from planner.strategies.odc import OneSided
from runtime.meshes import Meshes
from runtime.odc.choose_transport import why_none_anywhere
from runtime.odc.dry_run_windows import rehearses
from runtime.schedule import Schedule, ScheduledUnit

IN_PLACE: dict[str, Literal["all_gather", "reduce_scatter", "all_reduce"]] = {
    "pull": "all_gather",
    "push": "reduce_scatter",
    "all_reduce": "all_reduce",
}
"""What is sent in place of what; meetings and publishing are left out."""


def with_windows_or_without(schedule: Schedule, meshes: Meshes) -> Schedule:
    """Return the schedule, without one-sided units if any group's ranks cannot have windows. Collective.

    Rank 0 warns of that, once for a model.
    """
    groups = sorted({unit.strategy.group for unit in schedule.units if unit.strategy.spec.one_sided})
    if not groups or rehearses():
        return schedule
    reason = why_none_anywhere([meshes.group(group) for group in groups], meshes.device_type)
    if not reason:
        return schedule
    units = tuple(_with_collectives(unit, schedule.world_size) for unit in schedule.units)
    if dist.get_rank() == 0:
        taken = {
            str(unit.strategy): str(other.strategy)
            for unit, other in zip(schedule.units, units, strict=True)
            if unit != other
        }
        warnings.warn(
            f"{', '.join(f'{name} runs as {other}' for name, other in taken.items())}, because {reason}. "
            "Results are the same, but all ranks must run equally many micro-batches, and wait for each "
            "other in each.",
            stacklevel=2,
        )
    return replace(schedule, units=units)


def _with_collectives(unit: ScheduledUnit, world_size: int) -> ScheduledUnit:
    strategy = unit.strategy
    if not isinstance(strategy.spec, OneSided):
        return unit
    sent = tuple(
        replace(one, operation=IN_PLACE[one.operation]) for one in unit.collectives if one.operation in IN_PLACE
    )
    return replace(unit, strategy=strategy.spec.without_windows(strategy, world_size), collectives=sent)
