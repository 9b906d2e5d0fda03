"""The model as a strip: every block and operator in execution order, with its strategy, what it takes and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from typing import Any

from osdp.cli.reports.figures import format_parameters, format_rate, format_seconds
from osdp.cli.reports.rows import RECOMPUTED, choice_name
from osdp.report.figure import HATCHED, Figure, colours_of, hover_text
from planner.analysis.explain import TIED, Alternative, OpenPlan, Part, Target, alternatives, parts
from planner.cost.stage_option import StageCandidate
from planner.model.operator_split import slice_starts
from profiler.byte_sizes import format_bytes
from profiler.model_graph import ModelGraph, Operator, Recompute

HATCH = {None: "", Recompute.NOTHING: "", Recompute.SELECTIVE: ".", Recompute.EVERYTHING: "/", Recompute.OFFLOADED: "x"}
WHY = {
    "memory": "limited by memory: a faster choice does not fit",
    "time": "limited by time: no choice is faster",
    "pin": "pinned: a faster choice fits",
    "nothing": "a faster choice fits (osdp plan --best looks for every one)",
}
SHOWN_PRICES = 5
"""Alternatives in the text of what is pointed at; the page's table has all."""
MOST_CELLS = 3000
"""Operators that are drawn one by one."""
MOST_OUTLINED = 120
"""Operators whose bars have an outline, which would hide more and thinner ones."""


class PricesWanted(Enum):
    """How thoroughly the alternatives of a plan are priced."""

    NONE = auto()
    SAMPLED = auto()
    """For one stage of each part, in its middle: a fraction of a second."""
    ALL = auto()
    """As `osdp explain`, for all stages: some seconds."""


@dataclass(frozen=True)
class Cell:
    """A block, or an operator."""

    name: str
    kind: str
    """Class name."""
    first: int
    """Index of its first operator."""
    count: int
    """Number of its operators."""
    strategies: tuple[str, ...]
    """Distinct strategies of its operators."""
    recompute: Recompute | None
    """None outside blocks."""
    parameters: int
    """Number of parameters."""
    parameters_bytes: int
    """Bytes of them, unsharded, as they rest."""
    forward_flops: float
    """FLOPs of matrix products, convolutions and attention in the forward of a micro-batch."""
    backward_flops: float
    """The same in backward, without recomputation."""
    part: int | None
    """Index into `ModelStrip.parts`."""
    rest_bytes: int | None = None
    """Parameters, optimizer states and windows of its stage on one rank; None where it has no stage of its own."""
    communication_s: float | None = None
    """Seconds of its stage's collectives in a micro-batch."""

    @property
    def strategy(self) -> str:
        return " and ".join(self.strategies)


@dataclass(frozen=True)
class Prices:
    """Cells with the same choice: what keeps them from being faster, and every other choice for one of them."""

    label: str
    choice: str
    count: int
    binds: str
    """`memory`, `time`, `pin` or `nothing`."""
    alternatives: tuple[Alternative, ...]
    """The fastest first."""

    @property
    def why(self) -> str:
        """What keeps them from being faster, in words."""
        return WHY[self.binds]


@dataclass(frozen=True)
class ModelStrip:
    """All cells in execution order."""

    blocks: tuple[Cell, ...]
    """Blocks, and operators outside blocks."""
    operators: tuple[Cell, ...]
    parts: tuple[Prices, ...]
    """Empty if prices were not asked for."""


def model_strip(view: OpenPlan, options: Sequence[StageCandidate], wanted: PricesWanted) -> ModelStrip:
    """Return the strip of a plan, one option per stage in execution order."""
    graph, model = view.space.graph, view.space.model
    found = [] if wanted is PricesWanted.NONE else parts(view, sampled=wanted is PricesWanted.SAMPLED)
    part_of_stage = {stage: place for place, part in enumerate(found) for stage in part.stages}
    tied = next((place for place, part in enumerate(found) if part.label == TIED), None)
    starts = slice_starts(graph, view.space.counts)
    stage_of = {operator: index for index, stage in enumerate(model.stages) for operator in stage.operators}
    flops = _flops(view)
    recomputed = view.plan.recomputations

    def cell(members: Sequence[int], name: str, kind: str, recompute: Recompute | None, *, is_stage: bool) -> Cell:
        operators = [graph.operators[index] for index in members]
        stage = stage_of.get(starts[members[0]])
        option = options[stage] if is_stage and stage is not None else None
        return Cell(
            name=name,
            kind=kind,
            first=members[0],
            count=len(members),
            strategies=tuple(dict.fromkeys(view.plan.choices[operator.name] for operator in operators)),
            recompute=recompute,
            parameters=sum(operator.numel for operator in operators),
            parameters_bytes=sum(map(_bytes, operators)),
            forward_flops=sum(flops[index][0] for index in members),
            backward_flops=sum(flops[index][1] for index in members),
            part=tied if stage is None else part_of_stage.get(stage),
            rest_bytes=option.rest if option else None,
            communication_s=_communication_s(option) if option else None,
        )

    def again(operator: Operator) -> Recompute | None:
        return None if operator.block is None else recomputed.get(graph.blocks[operator.block].name, Recompute.NOTHING)

    blocks, operators = [], []
    for block, run in groupby(range(len(graph.operators)), key=lambda index: graph.operators[index].block):
        members = list(run)
        each = [
            cell([i], o.name, o.kind, again(o), is_stage=block is None) for i in members for o in [graph.operators[i]]
        ]
        operators += each
        if block is None:
            blocks += each
        else:
            found_block, first = graph.blocks[block], graph.operators[members[0]]
            blocks.append(cell(members, found_block.name, found_block.kind, again(first), is_stage=True))
    return ModelStrip(tuple(blocks), tuple(operators), tuple(_prices(view, part) for part in found))


def _flops(view: OpenPlan) -> list[tuple[float, float]]:
    """Return the FLOPs of every operator's calls in forward and backward."""
    graph, micro_batch = view.space.graph, view.load.micro_batch
    found = [(0.0, 0.0)] * len(graph.operators)
    for call in graph.calls:
        forward, backward = found[call.operator]
        forward += call.forward.matmul_flops(micro_batch)
        found[call.operator] = forward, backward + call.backward.matmul_flops(micro_batch)
    return found


def _bytes(operator: Operator) -> int:
    return sum(parameter.numel * parameter.element_bytes for parameter in operator.parameters)


def _communication_s(option: StageCandidate) -> float:
    return sum(s.forward_gather_s + s.backward_gather_s + s.reduce_s + s.step_reduce_s for s in option.segments)


def _prices(view: OpenPlan, part: Part) -> Prices:
    """Return the alternatives for a stage in the middle of a part: those at its ends have other neighbours."""
    target = Target(spanning=True)
    if part.stages:
        target = Target(frozenset({part.stages[len(part.stages) // 2]}))
    graph = view.space.graph
    label = part.label
    if label == TIED:
        label = ", ".join(
            module for index in view.space.model.spanning for module in view.space.model.graph.operators[index].modules
        )
    elif part.stages and (block := view.space.model.stages[part.stages[0]].block) is not None:
        label = graph.blocks[block].kind
    choice = choice_name(" and ".join(part.strategies), part.recompute)
    return Prices(label, choice, len(part.stages) or 1, part.binds, tuple(alternatives(view, target)))


def describe(cell: Cell, strip: ModelStrip) -> list[str]:
    """Return what the strip says of a cell, one line each."""
    lines = [
        f"{cell.name} ({cell.kind})",
        choice_name(cell.strategy, cell.recompute),
        f"{format_parameters(cell.parameters)} parameters, {format_bytes(cell.parameters_bytes)} unsharded",
        f"forward {format_rate(cell.forward_flops, 'FLOP')}, backward {format_rate(cell.backward_flops, 'FLOP')}",
    ]
    if cell.rest_bytes is not None:
        lines.append(f"at rest {format_bytes(cell.rest_bytes)} per rank")
    if cell.communication_s is not None:
        lines.append(f"communication {format_seconds(cell.communication_s)} per micro-batch")
    if cell.part is not None:
        prices = strip.parts[cell.part]
        lines.append(prices.why)
        lines += [price_text(other) for other in prices.alternatives[:SHOWN_PRICES]]
    return lines


def price_text(other: Alternative) -> str:
    """Return an alternative with what it would change."""
    change = f"{format_seconds(other.delta_s, signed=True)}, {_signed_bytes(other.delta_bytes)}"
    return f"{choice_name(other.strategy, other.recompute)}: {change}{'' if other.fits else ', does not fit'}"


def _signed_bytes(size_bytes: int) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{format_bytes(abs(size_bytes))}"


@dataclass(frozen=True)
class Row:
    """Cells side by side at one height."""

    label: str
    cells: tuple[Cell, ...]
    base: float
    """Lower edge; a row is 1 high."""
    texts: tuple[str, ...]
    """What each cell says when it is pointed at, as `hover_text` gives it."""


def strip_rows(strip: ModelStrip, base: float = 0.0) -> list[Row]:
    """Return the blocks, and below them their operators if those are not too many, from `base` upwards."""
    shown = [("blocks", strip.blocks, base + 1.1)]
    if len(strip.operators) <= MOST_CELLS:
        shown.append(("operators", strip.operators, base))
    return [
        Row(label, cells, height, tuple(hover_text(describe(cell, strip)) for cell in cells))
        for label, cells, height in shown
    ]


def strip_figure(strip: ModelStrip, colours: Mapping[str, str] | None = None) -> Figure:
    """Return two rows of bars, blocks above their operators; `colours` are those of strategies."""
    rows = strip_rows(strip)
    return Figure(strategy_bars(rows, colours), {"height": 250, **strip_layout(rows)})


def strategy_bars(rows: Sequence[Row], colours: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return a trace of bars for each strategy in some rows."""
    colours = colours or {}
    colours = {**colours_of([*colours, *(cell.strategy for row in reversed(rows) for cell in row.cells)]), **colours}
    line_width = 0.5 if max(len(row.cells) for row in rows) <= MOST_OUTLINED else 0
    traces = []
    for strategy, colour in colours.items():
        placed = [
            (cell, row.base, text)
            for row in rows
            for cell, text in zip(row.cells, row.texts, strict=True)
            if cell.strategy == strategy
        ]
        if not placed:
            continue
        traces.append(
            {
                "type": "bar",
                "name": strategy,
                "x": [cell.first + cell.count / 2 for cell, *_ in placed],
                "width": [cell.count for cell, *_ in placed],
                "base": [base for _, base, _ in placed],
                "y": [1] * len(placed),
                "hovertext": [text for *_, text in placed],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "marker": {
                    "color": colour,
                    "line": {"width": line_width, "color": "rgba(255,255,255,0.6)"},
                    "pattern": {
                        "shape": [HATCH[cell.recompute] for cell, *_ in placed],
                        "size": 7,
                        "solidity": 0.25,
                        **HATCHED,
                    },
                },
            }
        )
    return traces


def strip_layout(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the axes of some rows."""
    return {
        "barmode": "overlay",
        "showlegend": True,
        "xaxis": {
            "title": {"text": "operators in execution order"},
            "showgrid": False,
            "range": [0, max(cell.first + cell.count for row in rows for cell in row.cells)],
        },
        "yaxis": {
            "ticktext": [row.label for row in rows],
            "tickvals": [row.base + 0.5 for row in rows],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
        "hovermode": "closest",
    }


def recompute_text(cell: Cell) -> str:
    """Return what tables say of a cell's recomputation."""
    return RECOMPUTED[cell.recompute]


def operators_in(graph: ModelGraph) -> str:
    """Return the size of a model in words."""
    return f"{graph.numel:,} parameters in {len(graph.operators)} operators, {len(graph.blocks)} blocks"
