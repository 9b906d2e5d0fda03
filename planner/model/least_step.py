"""The step that takes least of a model that runs some modules once more, or at all, in some steps only.

A graph is of the step that takes most.  One with fewer calls may hold more at a moment: what FSDP2 prefetches, and
which reduction's input is left, goes by the unit that runs next, and the one that has run last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from profiler.model_graph import ModelGraph

Range = tuple[int, int, int | None]
"""The first call of a stage, one past its last, and its block."""


def of_least_step(graph: ModelGraph, ranges: Sequence[Range]) -> tuple[ModelGraph, list[Range]]:
    """Return a model's graph without the calls that are `Call.occasional`, and what is left of each of its stages."""
    kept = [index for index, call in enumerate(graph.calls) if not call.occasional]
    place = {index: at for at, index in enumerate(kept)}
    by_block = dict[int, list[int]]()
    for at, index in enumerate(kept):
        if (block := graph.calls[index].block) is not None:
            by_block.setdefault(block, []).append(at)
    numbers = {block: number for number, block in enumerate(by_block)}
    calls = []
    for call in map(graph.calls.__getitem__, kept):
        sharers = tuple(numbers[block] for block in call.sharers if block in numbers)
        calls.append(replace(call, block=None if call.block is None else numbers[call.block], sharers=sharers))
    blocks, classes = [], dict[object, int]()
    for one, places in zip(map(graph.blocks.__getitem__, by_block), by_block.values(), strict=True):
        left = one.block_class, *(kept[at] - one.first_call for at in places)
        number = classes.setdefault(left, len(classes))
        blocks.append(replace(one, first_call=places[0], last_call=places[-1] + 1, block_class=number))
    edges = tuple((place[one], place[other]) for one, other in graph.edges if one in place and other in place)
    stages = list[Range]()
    for start, stop, block in ranges:
        if own := [place[index] for index in range(start, stop) if index in place]:
            stages.append((own[0], own[-1] + 1, None if block is None else numbers[block]))
    return replace(graph, calls=tuple(calls), blocks=tuple(blocks), edges=edges), stages
