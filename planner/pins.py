"""Pins: choices that the user fixes with `--pin PATTERN=CHOICE` and the search keeps.

A pattern matches operators by their own path, by that of a module around them, or by a block; a choice is a strategy
as plan files write it (`shard`, `group_shard:4+offload`, `split(4*shard)`, `owner@1` for rank 1), or `recompute`,
`recompute+offload`, `selective` or `keep` for blocks.  `.` means the parameters that the model owns directly, outside
all of its modules.
A pin holds in every plan of the search, or is rejected here with the reason.  Of two pins that match an operator (or
block), the one that matches a part of what the other does takes precedence: `blocks.0=owner` over `*=shard`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from planner.model.fsdp_units import check_dtypes, check_selective, check_split
from planner.name_patterns import matches, unknown_name
from planner.problem import Pins
from planner.strategies.notation import format_choice, parse_choice
from planner.strategies.spec import Strategy
from profiler.affine import Affine
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute

RECOMPUTE = {
    "recompute": Recompute.EVERYTHING,
    "recompute+offload": Recompute.OFFLOADED,
    "selective": Recompute.SELECTIVE,
    "keep": Recompute.NOTHING,
}
"""Choices for blocks: what of their forward runs again in backward, and where their input is meanwhile."""
ITSELF = "."
"""Pattern of the parameters that the model owns directly; their operator has no name."""

Chosen = TypeVar("Chosen", Recompute, tuple[Strategy, ...])
_Matched = list[tuple["Pin", frozenset[int], Chosen]]
"""Pins, with the indices of what they match and what they choose for it."""


@dataclass(frozen=True)
class Pin:
    """One pin, as given."""

    pattern: str
    """Which operators or blocks."""
    choice: str
    """Their strategy, or what of them is recomputed."""

    def __str__(self) -> str:
        return f"{self.pattern}={self.choice}"


def parse_pin(text: str) -> Pin:
    """Parse `PATTERN=CHOICE`; raises OsdpError."""
    pattern, _, choice = (part.strip() for part in text.rpartition("="))
    if not pattern or not choice:
        raise OsdpError("this is not a pin", got=repr(text), expected="PATTERN=CHOICE, such as 'blocks.*.mlp=shard'")
    return Pin(pattern, choice)


def resolve(given: Sequence[Pin], graph: ModelGraph, cluster: Cluster) -> Pins:
    """Return the operators and blocks of a model that the pins fix, and their choices on a cluster.

    Raises OsdpError for a pin that cannot be applied: unknown names, strategies that do not exist on the cluster,
    operators that cannot be split, pins that contradict each other.
    """
    strategies: _Matched[tuple[Strategy, ...]] = []
    recompute: _Matched[Recompute] = []
    for pin in given:
        blocks = [index for index, block in enumerate(graph.blocks) if matches(block.name, pin.pattern)]
        if pin.choice in RECOMPUTE:
            if not graph.blocks:
                what = f"--pin {pin}: the model has no blocks: no module of it repeats, so none can be recomputed"
                raise OsdpError(what, advice="leave the pin out")
            if not blocks:
                what = f"--pin {pin}: the model has no such block, and only blocks can be recomputed or kept"
                raise unknown_name(pin.pattern, (block.name for block in graph.blocks), what)
            _check_recompute(pin, graph, blocks, cluster)
            recompute.append((pin, frozenset(blocks), RECOMPUTE[pin.choice]))
            continue
        slices = _slices(pin, cluster)
        operators = _operators(pin, graph, blocks)
        for index in operators:
            _check_split(pin, graph, index, len(slices))
            check_dtypes(graph.operators[index], slices)
        strategies.append((pin, frozenset(operators), slices))
    names = [" and ".join(operator.modules) for operator in graph.operators]
    pins = Pins(_decided(strategies, names), _decided(recompute, [block.name for block in graph.blocks]))
    selective = {block for block, again in pins.recompute.items() if again is Recompute.SELECTIVE}
    check_selective(graph, {index: len(slices) for index, slices in pins.strategies.items()}, selective)
    return pins


def _check_recompute(pin: Pin, graph: ModelGraph, blocks: Sequence[int], cluster: Cluster) -> None:
    if RECOMPUTE[pin.choice] is Recompute.OFFLOADED and cluster.host is None:
        what, got = f"--pin {pin}: copies to the host cannot be priced", f"{cluster.name} without figures of the host"
        raise OsdpError(what, got=got, expected="`host` in the cluster's file", advice=f"--pin {pin.pattern}=recompute")
    for index in blocks:
        calls = [call for call in graph.calls if call.block == index]
        if graph.trains and any(call.memory(RECOMPUTE[pin.choice]) is None for call in calls):
            how = " selectively" if RECOMPUTE[pin.choice] is Recompute.SELECTIVE else ""
            what = f"--pin {pin}: block {graph.blocks[index].name} cannot be recomputed{how}"
            got = "a forward that the model runs again itself, or that failed or differed when the trace ran it again"
            advice = "turn off what it remembers (use_cache=False in transformers), or leave the pin out"
            raise OsdpError(what, got=got, expected="a forward that can run twice", advice=advice)
        if RECOMPUTE[pin.choice] is Recompute.OFFLOADED and graph.blocks[index].offloadable_bytes == Affine():
            what = f"--pin {pin}: there is nothing to offload of block {graph.blocks[index].name}"
            got = "an input that needs no gradient, or that others hold too: the model, another block, what made it"
            raise OsdpError(what, got=got, expected="an input of its own", advice=f"--pin {pin.pattern}=recompute")


def on_cluster(pins: Pins, cluster: Cluster) -> Pins:
    """Return the same pins on another cluster; raises OsdpError if a strategy does not exist there."""
    strategies = {index: parse_choice(format_choice(slices), cluster) for index, slices in pins.strategies.items()}
    return Pins(strategies, pins.recompute)


def _decided(matched: _Matched[Chosen], names: Sequence[str]) -> dict[int, Chosen]:
    """Return what the most specific pins choose, by index. Raises OsdpError where two of them differ."""
    decided: dict[int, Chosen] = {}
    for index in sorted(set[int]().union(*(found for _, found, _ in matched))):
        mine = [one for one in matched if index in one[1]]
        (first, _, choice), *others = [one for one in mine if not any(other[1] < one[1] for other in mine)]
        for other, _, another in others:
            if another != choice:
                tied = " (one operator, as they share a parameter)" if " and " in names[index] else ""
                what = f"two pins contradict each other for {names[index]}{tied}"
                expected = "one choice for each operator and each block; a pin that matches less takes precedence"
                advice = "use patterns that do not overlap"
                raise OsdpError(what, got=f"{first} and {other}", expected=expected, advice=advice)
        decided[index] = choice
    return decided


def _operators(pin: Pin, graph: ModelGraph, blocks: Sequence[int]) -> list[int]:
    """Return the operators that a pin's pattern matches, by themselves or by their block."""
    named = "" if pin.pattern == ITSELF else pin.pattern
    exact = [i for i, operator in enumerate(graph.operators) if named in {operator.name, *operator.modules}]
    if exact:
        return exact
    found = [
        index
        for index, operator in enumerate(graph.operators)
        if operator.block in blocks or any(matches(name, pin.pattern) for name in {operator.name, *operator.modules})
    ]
    if not found:
        names = [name for operator in graph.operators for name in dict.fromkeys((operator.name, *operator.modules))]
        what = f"--pin {pin}: the model has no such operator or block"
        raise unknown_name(pin.pattern, (*(block.name for block in graph.blocks), *names), what)
    return found


def _slices(pin: Pin, cluster: Cluster) -> tuple[Strategy, ...]:
    """Return the strategies of a pin, one for each slice."""
    try:
        return parse_choice(pin.choice, cluster)
    except OsdpError as error:
        expected = f"{error.expected}; for blocks also {', '.join(RECOMPUTE)}"
        raise OsdpError(f"--pin {pin}: {error.what}", got=error.got, expected=expected, advice=error.advice) from error


def _check_split(pin: Pin, graph: ModelGraph, index: int, slices: int) -> None:
    """Raise OsdpError, naming an operator that can be split, if this one cannot be split as the pin says."""
    try:
        check_split(graph.operators[index], slices)
    except OsdpError as error:
        advice = f"a pattern that matches linear layers only, such as --pin '{_linear(graph)}={pin.choice}'"
        raise OsdpError(f"--pin {pin}: {error.what}", got=error.got, expected=error.expected, advice=advice) from error


def _linear(graph: ModelGraph) -> str:
    """Return the name of the largest operator that can be split, or a placeholder if there is none."""
    linear = [op for op in graph.operators if op.kind == "Linear" and len(op.modules) == 1]
    return max(linear, key=lambda op: op.numel).name if linear else "NAME"
