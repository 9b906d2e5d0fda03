"""Which calls of the step that takes most are not in that which takes least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from profiler.model_graph import Call
from profiler.trace.call_records import CallRecord


def with_occasional(calls: Sequence[Call], records: Sequence[CallRecord], least: Sequence[str]) -> list[Call]:
    """Return calls that know whether they are, given the modules that began in another step in their order; none if all
    steps are alike."""
    found = [*calls]
    if not least:
        return found
    matches = SequenceMatcher(None, [record.module for record in records], least, autojunk=False)
    for kind, start, stop, *_ in matches.get_opcodes():
        for index in range(start, stop) if kind in ("delete", "replace") else ():
            found[index] = replace(found[index], occasional=True)
    return found
