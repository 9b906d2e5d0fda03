"""What a model runs again itself as a call runs back, in checkpoints of its own around several units.

The unit of the call is gathered for its backward meanwhile, and the others come beside it one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiler.trace.activation_ledger import Ledger
from profiler.trace.autograd_order import is_checkpointed
from profiler.trace.call_records import Part
from profiler.trace.live_storage import NOBODY


def run_again(
    ledger: Ledger,
    arrive: Callable[[], None],
    operator: int | None,
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a module's forward within the backward of a call, to which the ledger is to `arrive` first, and note which of
    its events that were.

    What follows an operator (None: the module owns no parameters) in a module around it is of the same part.
    """
    if ledger.is_running_again or not is_checkpointed():
        return inner(*args, **kwargs)
    arrive()
    reruns, events = ledger.call.reruns, ledger.call.backward.events
    begin = len(events)
    try:
        return inner(*args, **kwargs)
    finally:
        part = next(reversed(reruns), None) if operator is None else _part_of(ledger, operator)
        if part is not None:
            known = reruns.pop(part, slice(begin, begin))
            reruns[part] = slice(known.start, len(events))


def _part_of(ledger: Ledger, operator: int) -> Part | None:
    """Return what an operator was last a part of before the current call, or in it."""
    for call in ledger.calls[ledger.index :: -1]:
        if call.operator == operator:
            return (None, operator) if call.block is None else (call.block, NOBODY)
    return None
