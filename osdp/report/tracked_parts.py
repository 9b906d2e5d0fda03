"""What lived at most while each part of a plan ran, from a step that was run: beside the predicted curve."""

from collections.abc import Sequence
from dataclasses import replace

from osdp.report.memory_curve import MemoryCurve
from planner.analysis.explain import OpenPlan
from runtime.observe.part_peaks import PartPeak


def with_tracked(curve: MemoryCurve, view: OpenPlan, parts: Sequence[PartPeak], name: str) -> MemoryCurve:
    """Return a curve with a second line, of that name, at what was tracked; with the reserve, as the predicted one."""
    most = most_of_parts(view, parts)
    reserve_bytes = view.prediction.reserve_bytes
    tracked = (most.get((held.phase, held.part)) for held in curve.held)
    return replace(
        curve,
        tracked=tuple(None if size_bytes is None else size_bytes + reserve_bytes for size_bytes in tracked),
        tracked_name=name,
    )


def most_of_parts(view: OpenPlan, parts: Sequence[PartPeak]) -> dict[tuple[str, str], int]:
    """Return the most bytes by phase and name of the stage; of the optimizer, the name is empty.

    Modules outside all stages, such as a tied head, count as the stage that ran before them, or as the first.
    """
    names, found = _stage_of(view), dict[tuple[str, str], int]()
    stage = view.space.model.stages[0].name
    for part in parts:
        stage = _lookup(names, part.name) or stage
        key = part.phase, "" if part.phase == "optimizer" else stage
        found[key] = max(found.get(key, 0), part.total_bytes)
    return found


def _stage_of(view: OpenPlan) -> dict[str, str]:
    """Return the name of each stage by the paths of its block or of its operators' modules."""
    model, names = view.space.model, dict[str, str]()
    for stage in model.stages:
        if stage.block is not None:
            names[model.graph.blocks[stage.block].name] = stage.name
        else:
            for operator in (model.graph.operators[index] for index in stage.operators):
                names |= dict.fromkeys((operator.name, *operator.modules), stage.name)
    return names


def _lookup(names: dict[str, str], path: str) -> str | None:
    """Return the stage of a module, or of the nearest module around it that has one."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return names.get(path)
