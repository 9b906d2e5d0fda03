"""Rounds of modules that share parameters: FSDP2 gathers them as one of them runs, and shards them when all have run.

What runs of them after that begins another round.  One in which not all of them run again is not ended by that.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from profiler.model_graph import Call
from profiler.trace.call_records import CallRecord
from profiler.trace.find_operators import Group


def with_rounds(
    calls: Sequence[Call], records: Sequence[CallRecord], groups: Sequence[Group], uncalled: Container[str]
) -> list[Call]:
    """Return calls that know where rounds begin, given the records of one pass; `uncalled` modules do not run."""
    sharing = {index: set(group.modules) for index, group in enumerate(groups) if len(group.modules) > 1}
    shared = {index: {path for path in paths if path not in uncalled} for index, paths in sharing.items()}
    found, to_run, begins = [*calls], dict[int, set[str]](), dict[int, int]()
    for position, record in enumerate(records):
        if not record.module or len(shared.get(record.operator, ())) < 2:
            continue
        if not to_run.get(record.operator):
            if record.operator in to_run:
                begins[record.operator] = position
                found[position] = replace(found[position], reopens=True)
            to_run[record.operator] = {*shared[record.operator]}
        to_run[record.operator].discard(record.module)
    for operator, position in begins.items():
        if to_run[operator]:
            found[position] = replace(found[position], stays=True)
    return found
