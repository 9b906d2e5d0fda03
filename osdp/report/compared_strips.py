"""Two plans' strips above each other, and between them what differs."""

from collections.abc import Iterator
from dataclasses import replace

from osdp.cli.reports.rows import choice_name
from osdp.report.figure import IN_COLOUR_OF_TEXT, Figure, colours_of, hover_text
from osdp.report.model_strip import Cell, ModelStrip, strategy_bars, strip_layout, strip_rows

MARKS_BASE, MARKS_HEIGHT, BEFORE_BASE = 2.25, 0.5, 2.9
"""Heights of the row of marks, and of the first plan's rows; the second's are below."""
PARTED_BY_MARKS = {"height": 420}


def compared_strips_figure(before: ModelStrip, after: ModelStrip) -> Figure:
    """Return the first plan's strip above the second's; operators that differ are marked if both have the same."""
    rows = [
        replace(row, label=f"{which}: {row.label}")
        for which, strip, base in (("before", before, BEFORE_BASE), ("after", after, 0.0))
        for row in strip_rows(strip, base)
    ]
    pairs = list(_differing(before, after))
    cells = (*before.operators, *after.operators, *before.blocks, *after.blocks)
    traces, layout = strategy_bars(rows, colours_of(cell.strategy for cell in cells)), strip_layout(rows)
    if pairs:
        marks = {
            "type": "bar",
            "name": "differs",
            "x": [cell.first + cell.count / 2 for cell, _ in pairs],
            "width": [cell.count for cell, _ in pairs],
            "base": [MARKS_BASE] * len(pairs),
            "y": [MARKS_HEIGHT] * len(pairs),
            "hovertext": [hover_text(_change(*pair)) for pair in pairs],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "meta": IN_COLOUR_OF_TEXT,
        }
        traces.append(marks)
        axis = layout["yaxis"]
        axis["ticktext"] = [*axis["ticktext"], "differs"]
        axis["tickvals"] = [*axis["tickvals"], MARKS_BASE + MARKS_HEIGHT / 2]
    return Figure(traces, layout | PARTED_BY_MARKS)


def has_same_operators(before: ModelStrip, after: ModelStrip) -> bool:
    """Return whether both strips are of the same operators, so that their choices can be compared."""
    return [cell.name for cell in before.operators] == [cell.name for cell in after.operators]


def _differing(before: ModelStrip, after: ModelStrip) -> Iterator[tuple[Cell, Cell]]:
    """Yield the operators whose strategy or recomputation differs."""
    if has_same_operators(before, after):
        for one, other in zip(before.operators, after.operators, strict=True):
            if (one.strategies, one.recompute) != (other.strategies, other.recompute):
                yield one, other


def _change(one: Cell, other: Cell) -> list[str]:
    return [
        f"{one.name} ({one.kind})",
        f"before: {choice_name(one.strategy, one.recompute)}",
        f"after: {choice_name(other.strategy, other.recompute)}",
    ]
