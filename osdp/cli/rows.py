"""A plan's choices as the few rows that a person can read: alike blocks and operators together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from planner.plan import Plan
from profiler.graph import Block, ModelGraph, Operator

_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")
"""A number that is a whole component of a module path."""


@dataclass(frozen=True)
class Row:
    """Blocks of one class, or operators outside blocks, that took the same choice."""

    part: str
    """Class name; within a block whose operators differ, also which of them."""
    count: int
    """How many blocks or operators."""
    strategy: str
    recompute: bool | None
    """None outside blocks."""
    parameters: int
    """Of all of them together, tied ones once."""
    names: tuple[str, ...]
    """Blocks or operators, in execution order."""


def plan_rows(plan: Plan, graph: ModelGraph) -> list[Row]:
    """Return the rows of a plan in execution order."""
    recomputed = set(plan.recomputed_blocks)
    inside: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        if operator.block is not None:
            inside.setdefault(operator.block, []).append(operator)
    found: dict[tuple[object, ...], list[tuple[str, int]]] = {}
    for operator in graph.operators:
        if operator.block is None:
            key = (operator.kind, plan.choices[operator.name], None)
            found.setdefault(key, []).append((_with_ties(operator), operator.numel))
        elif operator is inside[operator.block][0]:
            block = graph.blocks[operator.block]
            for part, strategy, numel in _parts(block, inside[operator.block], plan):
                found.setdefault((part, strategy, block.name in recomputed), []).append((block.name, numel))
    return [
        Row(str(part), len(members), str(strategy), None if recompute is None else bool(recompute),
            sum(numel for _, numel in members), tuple(name for name, _ in members))
        for (part, strategy, recompute), members in found.items()
    ]  # fmt: skip


def _parts(block: Block, operators: list[Operator], plan: Plan) -> list[tuple[str, str, int]]:
    """Return (label, strategy, parameters) of a block, or of its operators by strategy if they differ."""
    strategies: dict[str, list[Operator]] = {}
    for operator in operators:
        strategies.setdefault(plan.choices[operator.name], []).append(operator)
    if len(strategies) == 1:
        return [(block.kind, strategy, _numel(members)) for strategy, members in strategies.items()]
    return [(f"{block.kind}: {_inside(block, members)}", strategy, _numel(members))
            for strategy, members in strategies.items()]  # fmt: skip


def _inside(block: Block, operators: Iterable[Operator]) -> str:
    """Return the operators' names without the block's."""
    return ", ".join(operator.name.removeprefix(f"{block.name}.") for operator in operators)


def _numel(operators: Iterable[Operator]) -> int:
    return sum(operator.numel for operator in operators)


def _with_ties(operator: Operator) -> str:
    others = [module for module in operator.modules if module != operator.name]
    return f"{operator.name} (tied with {', '.join(others)})" if others else operator.name


def short_names(names: Iterable[str], longest: int = 60) -> str:
    """Return names with runs of numbers drawn together: `h.0, h.1, h.2, h.5` is `h.0-2, h.5`.

    Cut after about `longest` characters, with the number of names left out.
    """
    names = list(names)
    runs = [list(run) for _, run in groupby(enumerate(names), key=lambda item: _follows(item[0], item[1]))]
    text, shown = "", 0
    for run in runs:
        first, last = run[0][1], run[-1][1]
        piece = first if len(run) == 1 else f"{first}-{_number(last)}" if len(run) > 2 else f"{first}, {last}"
        if text and len(text) + len(piece) > longest:
            return f"{text}, and {len(names) - shown} more"
        text, shown = f"{text}, {piece}" if text else piece, shown + len(run)
    return text


def _number(name: str) -> int | None:
    """Return the last number of a module path, if it ends the path."""
    found = _NUMBER.findall(name)
    return int(found[-1]) if found and name.endswith(f".{found[-1]}") else None


def _follows(position: int, name: str) -> tuple[str, int]:
    """Return a key that names in a row share if their numbers grow by one."""
    number = _number(name)
    return (name, position) if number is None else (name.rpartition(".")[0], number - position)
