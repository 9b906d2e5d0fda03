"""Parameters of what the model runs again itself while a unit runs back: they are gathered beside those of the unit.

A checkpoint of the model's own around several units runs all of them again when the backward of the last begins, which
is unsharded by then.  The runtime shards each again when it has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.cost.stage_costs import StageFrame, UnitCosts
from planner.cost.staged_unit import StagedUnit
from planner.cost.unit_memory import UnitBytes
from planner.model.fsdp_units import stage_units


def gathered_again(
    frame: StageFrame, costs: UnitCosts, own: Sequence[StagedUnit], j: int, *, sees_below: bool
) -> Iterator[tuple[int, int]]:
    """Yield what is unsharded, and what buffers there are, for each of the parts that run again as call j runs back.

    Strategies of other stages are not known: they are taken to be those of the units that this one has of its `own`.
    What is kept to its backward is unsharded as it is, and counted so.  What runs back next has been prefetched, and
    is counted so: a unit of this stage, or of that below.
    """
    call, stages = frame.stage.calls[j], frame.model.stages
    sharded = [unit for unit in own if not unit.strategy.keeps_unsharded]
    for rerun in call.reruns:
        block = None if rerun.blocks_back is None else (call.block or 0) - rerun.blocks_back
        at = (rerun.operator in one.operators if block is None else one.block == block for one in stages)
        index = next((number for number, found in enumerate(at) if found), None)
        parts = list[tuple[UnitBytes, bool]]()
        if index is not None and index != frame.index:
            is_next, stage = sees_below and index == frame.index - 1, stages[index]
            for strategy in dict.fromkeys(unit.strategy for unit in sharded):
                units = stage_units(frame.model, stage, ((strategy,) for _ in stage.operators))
                parts += [(costs(one.operators, strategy)[0], is_next and one is units[-1]) for one in units]
        elif index is not None:
            before = sorted((unit for unit in own if unit.last < j), key=lambda unit: unit.last)
            next_back = [] if sees_below else [unit for unit in before if not unit.stalls][-1:]
            parts = [(unit.bytes, unit in next_back) for unit in before if unit in sharded]
        yield max((_gathered(unit, is_there=there) for unit, there in parts), key=sum, default=(0, 0))


def _gathered(unit: UnitBytes, *, is_there: bool) -> tuple[int, int]:
    """Return what a unit takes as it is gathered and unsharded; what has been prefetched `is_there` by then."""
    if is_there:
        return unit.unsharded, unit.unshard_temporary
    gathering = max(unit.gather_temporary, unit.regather_temporary) - unit.unsharded  # before that
    return unit.unsharded, unit.gathered + max(unit.unshard_temporary, gathering)
