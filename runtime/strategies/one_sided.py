"""Wrapping with windows: ranks pull parameters and push gradients, and synchronize once per step (`runtime.odc`).

Where ranks cannot have windows, units are sharded by FSDP2's collectives before anything is wrapped: those of
`odc:G` become `group_shard:G`, or `shard` where G is all ranks.  Pulls become all-gathers and pushes
reduce-scatters of the same sizes in the same groups, and the means are the same; but ranks wait for each other in
every micro-batch.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch.distributed as dist

from planner.strategies.odc import OneSided
from runtime.meshes import Meshes
from runtime.odc.choose_transport import why_none_anywhere
from runtime.odc.dry_run_windows import is_dry_run
from runtime.odc.one_sided_unit import OneSidedUnit
from runtime.odc.step_protocol import Exchange, Sharing
from runtime.schedule import Schedule, ScheduledUnit
from runtime.sharded_model import WrappedUnit
from runtime.strategies.fully_sharded import FullyShardedUnit, shard
from runtime.strategies.wrap_context import WrapContext

COLLECTIVES: dict[str, Literal["all_gather", "reduce_scatter", "all_reduce"]] = {
    "pull": "all_gather",
    "push": "reduce_scatter",
    "all_reduce": "all_reduce",
}
"""What is sent in place of what; barriers and publishing are left out."""


class WindowedUnit(FullyShardedUnit):
    """Modules that `fully_shard` has wrapped, and that communicate through a window."""

    def __init__(self, unit: ScheduledUnit, wrapped: FullyShardedUnit, context: WrapContext) -> None:
        super().__init__(unit, wrapped.module, wrapped.modules)
        self.reduces_in_last_backward = False  # but in the optimizer's step, by the `Exchange`
        self.replicas = context.schedule.world_size // unit.strategy.group
        self.sharing = Sharing(unit.strategy.group, unit.strategy.spec.ordered)
        self.one_sided = OneSidedUnit(unit.name, wrapped.module, context.compute_dtype(unit))


def wrap(unit: ScheduledUnit, context: WrapContext) -> WindowedUnit:
    """Shard a unit inside its group only: with replicas, FSDP2 would all-reduce across them in every backward."""
    wrapped = shard(unit, context, context.meshes.group_mesh(unit.strategy.group))
    return WindowedUnit(unit, wrapped, context)


def finish(context: WrapContext, units: Sequence[WindowedUnit]) -> list[WrappedUnit]:
    """Open the windows of all units."""
    alike: dict[Sharing, list[OneSidedUnit]] = {}
    for unit in units:
        alike.setdefault(unit.sharing, []).append(unit.one_sided)
    return [Exchange(alike, context.meshes, context.schedule.accumulation)]


def substitute(schedule: Schedule, meshes: Meshes) -> Schedule:
    """Return the schedule, without windows if any group's ranks cannot have them. Collective.

    Rank 0 warns of that, once for a model.
    """
    mine = [unit for unit in schedule.units if isinstance(unit.strategy.spec, OneSided)]
    if is_dry_run():
        return schedule
    groups = sorted({(unit.strategy.group, unit.strategy.spec.ordered) for unit in mine})
    reason = why_none_anywhere([(meshes.group(size), ordered) for size, ordered in groups], meshes.device_type)
    if not reason:
        return schedule
    others = {unit.name: _with_collectives(unit, schedule.world_size) for unit in mine}
    if dist.get_rank() == 0:
        taken = {str(unit.strategy): str(others[unit.name].strategy) for unit in mine}
        what = f"{', '.join(f'{name} runs as {other}' for name, other in taken.items())}, because {reason}"
        cost = "all ranks must run equally many micro-batches, and wait for each other in each"
        warnings.warn(f"{what}. Results are the same, but {cost}.", stacklevel=2)
    return replace(schedule, units=tuple(others.get(unit.name, unit) for unit in schedule.units))


def _with_collectives(unit: ScheduledUnit, world_size: int) -> ScheduledUnit:
    sent = tuple(
        replace(one, operation=COLLECTIVES[one.operation], shared=False)
        for one in unit.collectives
        if one.operation in COLLECTIVES
    )
    spec = unit.strategy.spec
    assert isinstance(spec, OneSided)
    return replace(unit, strategy=spec.without_windows(unit.strategy, world_size), collectives=sent)
