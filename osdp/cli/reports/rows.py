"""A plan's choices as the few rows that a person can read: alike blocks and operators together."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from planner.plan import Plan
from planner.problem import NO_PINS, Pins
from profiler.model_graph import Block, ModelGraph, Operator, Recompute
from profiler.path_labels import path_label

RECOMPUTED = {
    None: "",
    Recompute.NOTHING: "no",
    Recompute.SELECTIVE: "selective",
    Recompute.EVERYTHING: "yes",
    Recompute.OFFLOADED: "yes, input on host",
}
"""What tables say."""

_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")
"""A number that is a whole component of a module path."""


@dataclass(frozen=True)
class Row:
    """Blocks of one class, or operators outside blocks, that took the same choice."""

    part: str
    """Class name; within a block whose operators differ, also which of them."""
    strategy: str
    recompute: Recompute | None
    """None outside blocks."""
    parameters: int
    """Of all of them together, tied ones once."""
    names: tuple[str, ...]
    """Blocks or operators, in execution order."""
    pinned: bool = False
    """Whether the user decided the strategy."""
    pinned_recompute: bool = False
    """Whether the user decided the recomputation."""


def plan_rows(plan: Plan, graph: ModelGraph, pins: Pins = NO_PINS) -> list[Row]:
    """Return the rows of a plan in execution order; what is pinned has rows of its own."""
    recomputed = plan.recomputations
    pinned = {graph.operators[index].name for index in pins.strategies}
    inside: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        if operator.block is not None:
            inside.setdefault(operator.block, []).append(operator)
    found: dict[tuple[str, str, Recompute | None, bool, bool], list[tuple[str, int]]] = {}
    for operator in graph.operators:
        if operator.block is None:
            outside = (operator.kind, plan.choices[operator.name], None, operator.name in pinned, False)
            found.setdefault(outside, []).append((_with_ties(operator), operator.numel))
        elif operator is inside[operator.block][0]:
            block = graph.blocks[operator.block]
            for part, strategy, numel, is_pinned in _parts(block, inside[operator.block], plan, pinned):
                again = recomputed.get(block.name, Recompute.NOTHING)
                key = (part, strategy, again, is_pinned, operator.block in pins.recompute)
                found.setdefault(key, []).append((block.name, numel))
    return [
        Row(part, strategy, recompute, sum(numel for _, numel in members), tuple(name for name, _ in members), *pinned)
        for (part, strategy, recompute, *pinned), members in found.items()
    ]


def _parts(block: Block, operators: list[Operator], plan: Plan, pinned: set[str]) -> list[tuple[str, str, int, bool]]:
    """Return (label, strategy, parameters, pinned) of a block, or of its operators by strategy if they differ."""
    alike: dict[tuple[str, bool], list[Operator]] = {}
    for operator in operators:
        alike.setdefault((plan.choices[operator.name], operator.name in pinned), []).append(operator)
    found = []
    for (strategy, is_pinned), members in alike.items():
        label = block.kind if len(alike) == 1 else f"{block.kind}: {_inside(block, members, operators)}"
        found.append((label, strategy, sum(operator.numel for operator in members), is_pinned))
    return found


def _inside(block: Block, members: Iterable[Operator], operators: Iterable[Operator]) -> str:
    """Return the members' names without the block's; a module's, where all of its operators are members."""
    names = [operator.name.removeprefix(f"{block.name}.") for operator in members]
    everyone = Counter(_module(operator.name.removeprefix(f"{block.name}.")) for operator in operators)
    own = Counter(map(_module, names))
    shown = (_module(name) if own[_module(name)] == everyone[_module(name)] else name for name in names)
    return ", ".join(dict.fromkeys(shown))


def _module(name: str) -> str:
    """Return the outermost module of a path within a block."""
    return name.partition(".")[0]


def _with_ties(operator: Operator) -> str:
    others = [module for module in operator.modules if module != operator.name]
    return f"{operator.name} (tied with {', '.join(others)})" if others else operator.name


def short_names(names: Iterable[str], longest: int = 60) -> str:
    """Return names with runs of numbers drawn together: `h.0, h.1, h.2, h.5` is `h.0-2, h.5`.

    Cut after about `longest` characters, with the number of names left out.
    """
    names = [path_label(name) for name in names]
    runs = [list(run) for _, run in groupby(enumerate(names), key=lambda item: _follows(item[0], item[1]))]
    text, shown = "", 0
    for run in runs:
        first, last = run[0][1], run[-1][1]
        label = first if len(run) == 1 else f"{first}-{_number(last)}" if len(run) > 2 else f"{first}, {last}"
        if text and len(text) + len(label) > longest:
            return f"{text}, and {len(names) - shown} more"
        text, shown = f"{text}, {label}" if text else label, shown + len(run)
    return text


def _number(name: str) -> int | None:
    """Return the last number of a module path, if it ends the path."""
    found = _NUMBER.findall(name)
    return int(found[-1]) if found and name.endswith(f".{found[-1]}") else None


def _follows(position: int, name: str) -> tuple[str, int]:
    """Return a key that names in a row share if their numbers grow by one."""
    number = _number(name)
    return (name, position) if number is None else (name.rpartition(".")[0], number - position)


def choice_name(strategy: str, recompute: Recompute | None) -> str:
    """Return a strategy with what is recomputed, e.g. `shard + selective recompute`."""
    how = {
        Recompute.SELECTIVE: " + selective recompute",
        Recompute.EVERYTHING: " + recompute",
        Recompute.OFFLOADED: " + recompute, input offloaded",
    }
    return strategy + (how.get(recompute, "") if recompute is not None else "")
