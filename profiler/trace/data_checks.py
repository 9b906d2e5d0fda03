"""Checks of data that end in an exception, of which a trace assumes that they hold.

    assert (x >= 0).all()                   if (x.isnan() | x.isinf()).any() or y.min() < 0:
                                                raise ValueError(...)

A forward that asks for a value decides by it where to go on.  If one way only leads to `raise`, and nothing on it
branches again, the value is the one that leads the other way.  Python's bytecode tells, of the frame that asked: source
is not always there.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from torch import Tensor

_BETWEEN = ("profiler.", "torch._ops", "torch.utils._python_dispatch", "torch.overrides", "torch._subclasses")
"""Modules whose frames are between the one that asks and a mode for operations."""
_BETWEEN_ASKING_AND_JUMP = ("COMPARE_OP", "TO_BOOL", "UNARY_NOT", "NOP")
"""Instructions that may come between one that has asked for a value and a jump; a further call may do anything."""
_LONGEST = 100
"""Instructions of a way to `raise`."""


def passing_value() -> bool | None:
    """Return the value with which the code that asks for one raises nothing; None if either may go on, or neither."""
    frame = _outside(_BETWEEN)
    return None if frame is None else _passing(frame.f_code, frame.f_lasti)


def is_one(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same elements of one memory, as where a kernel of one input compares two."""
    places = [(x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype) for x in (a, b)]
    return places[0] == places[1]


def asked_at() -> str:
    """Return the place in the model's code that asks for a value, for people to read."""
    frame = _outside(("profiler.", "torch."))
    return (
        "no place that is known" if frame is None else f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
    )


def _outside(modules: tuple[str, ...]) -> FrameType | None:
    """Return the innermost frame that is not of a module whose name begins with one of those."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(modules):
        frame = frame.f_back
    return frame


@cache
def _passing(code: CodeType, offset: int) -> bool | None:
    steps = list(dis.get_instructions(code))
    places = {one.offset: place for place, one in enumerate(steps)}
    place, is_turned = places[offset], False
    place += steps[place].opname == "PRECALL"  # of Python 3.11: the first half of a call
    place += steps[place].opname.startswith("CALL")
    while steps[place].opname.startswith(_BETWEEN_ASKING_AND_JUMP):
        is_turned ^= steps[place].opname == "UNARY_NOT"
        place += 1
    name = steps[place].opname
    if "JUMP" not in name or not ("_IF_TRUE" in name or "_IF_FALSE" in name):
        return None
    jumps, stays = (_raises(steps, places, start) for start in (places[steps[place].argval], place + 1))
    if jumps == stays:
        return None
    return ("_IF_TRUE" in name) ^ jumps ^ is_turned


def _raises(steps: Sequence[dis.Instruction], places: dict[int, int], place: int) -> bool:
    """Return whether all there is from an instruction on is to raise an exception."""
    for _ in range(_LONGEST):
        one = steps[place]
        if one.opname in ("RAISE_VARARGS", "LOAD_ASSERTION_ERROR"):
            return True
        if one.opname in ("JUMP_FORWARD", "JUMP_ABSOLUTE"):
            place = places[one.argval]
        elif "JUMP" in one.opname or one.opname.startswith(("RETURN", "YIELD", "FOR_ITER", "SEND", "RERAISE")):
            return False
        else:
            place += 1
    return False
