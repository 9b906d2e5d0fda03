"""Gradients of parameters that wait in autograd: the planner adds them, so they are left out of what calls hold.

Autograd accumulates a parameter's gradient over its uses in one backward; until the last it stays alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from torch import nn

from profiler.affine import Affine
from profiler.byte_sizes import allocated_bytes
from profiler.model_graph import Call, CallMemories, CallMemory, Operator
from profiler.trace.call_records import CallRecord
from profiler.trace.find_operators import Group

_BACKWARD_BYTES = tuple(field.name for field in fields(CallMemory) if "backward_" in field.name)
"""Lines of a call that count the live bytes of its backward."""


def told_apart(module: nn.Module, groups: Sequence[Group], calls: Sequence[CallRecord]) -> frozenset[int]:
    """Return the keys of the storages of parameters of which a pass is to record which calls read them.

    Those of operators with several calls and several parameters, which need not read the same.
    """
    several = [group for group in map(groups.__getitem__, _several(calls)) if len(group.parameters) > 1]
    if not several:
        return frozenset()
    keys = _keys(module)
    return frozenset(keys[name] for group in several for name in group.parameters)


def waiting_bytes(
    module: nn.Module, operators: Sequence[Operator], calls: Sequence[Call], passes: Sequence[Sequence[CallRecord]]
) -> list[int]:
    """Return for each call the bytes of the gradients that wait when it has run back, of operators that will again, and
    that are not complete, when a pass has dropped them.

    `calls` are those of the `passes`, some of which may say which parameters they read with a gradient.
    """
    waiting, several = [0] * len(calls), _several(calls)
    if not several:
        return waiting
    named, keys = dict(module.named_parameters()), _keys(module)
    uses = Counter([id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)])
    told = next((records for records in passes if any(record.reads for record in records)), None)
    for operator in several:
        indices = [index for index, call in enumerate(calls) if call.operator == operator and call.reads_parameters]
        trained = [one.name for one in operators[operator].parameters if one.trainable and one.used]
        readers = {name: [index for index in indices if told and keys[name] in told[index].reads] for name in trained}
        if not any(readers.values()):
            tied = [name for name in trained if uses[id(named[name])] > 1]
            readers = dict.fromkeys(tied or trained, indices)
        # The planner adds all from the last call on: also what has not begun to wait.
        for name, calls_of_it in readers.items():
            for index in range(calls_of_it[0], indices[-1]) if calls_of_it else ():
                waiting[index] += allocated_bytes(named[name].nbytes)
    return waiting


def _several(calls: Sequence[Call] | Sequence[CallRecord]) -> list[int]:
    """Return the operators of which several calls read parameters."""
    times = Counter([call.operator for call in calls if call.reads_parameters])
    return [operator for operator, count in times.items() if count > 1]


def _keys(module: nn.Module) -> Mapping[str, int]:
    """Return the key of each parameter's storage."""
    return {name: parameter.untyped_storage()._cdata for name, parameter in module.named_parameters()}


def without_waiting(call: Call, waiting_bytes: int, waiting_before: int) -> Call:
    """Return the call with gradients that wait in autograd left out of its backward's peak, of what its block runs
    before it those that wait in the call before.

    They belong to the operator that they are for, like its unsharded parameters: the planner adds them.
    """
    if not waiting_bytes or call.backward_peak_bytes == call.saved_bytes:
        return call
    waiting = waiting_bytes, min(waiting_bytes, waiting_before)
    apart = call.apart and replace(call.apart, **_lower_all(call.apart, *waiting))
    reruns = call.reruns and tuple(replace(r, peak_bytes=less(r.peak_bytes, waiting_bytes)) for r in call.reruns)
    return replace(call, **_lower_all(call, *waiting), apart=apart, reruns=reruns)


def _lower_all(memories: CallMemories, *waiting: int) -> dict[str, Any]:
    recomputed, selective = (
        memory and replace(memory, **_lower(memory, *waiting)) for memory in (memories.recomputed, memories.selective)
    )
    return {**_lower(memories, *waiting), "recomputed": recomputed, "selective": selective}


def _lower(memory: CallMemory, *waiting: int) -> dict[str, Any]:
    return {name: less(getattr(memory, name), waiting[name.startswith("opening")]) for name in _BACKWARD_BYTES}


@lru_cache(maxsize=1024)  # alike calls have the same lines
def less(one: Affine, size_bytes: int) -> Affine:
    """Return a line lowered, not below zero."""
    return replace(one, fixed=max(0.0, one.fixed - size_bytes))
