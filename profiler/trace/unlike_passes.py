"""What passes at several micro-batches must have in common: the order of their calls, and costs that grow evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from profiler.trace.affine_fit import BEYOND, SINGLE, SIZES, TOLERANCE, StepsError, exact_line, line
from profiler.trace.call_records import CallRecord
from profiler.trace.find_operators import Group
from profiler.trace.metered_pass import Pass


def order_of(one: Pass) -> list[tuple[int, int | None]]:
    """Return the operator and block of every call."""
    return [(call.operator, call.block) for call in one.calls]


def check_alike(name: str, groups: Sequence[Group], passes: Mapping[int, Pass]) -> None:
    """Raise StepsError unless every pass ran the same operators in the same order."""
    smallest, expected = next((size, order_of(one)) for size, one in passes.items())
    for size, one in passes.items():
        order = order_of(one)
        if order == expected:
            continue
        differing = next((i for i, (a, b) in enumerate(zip(order, expected, strict=False)) if a != b), None)
        at = "its end" if differing is None else f"`{groups[expected[differing][0]].modules[0]}`"
        what = f"{name} runs different operators at micro-batch {size} than at {smallest}"
        got = f"{len(order)} calls against {len(expected)}, differing first at {at}"
        advice = "fix the micro-batch (--batch), or do not branch or loop on the batch dimension in forward"
        same = "the same operators in the same order for every micro-batch"
        raise StepsError(what, got=got, expected=same, advice=advice)


def is_single_on_line(passes: Mapping[int, Pass]) -> bool:
    """Return whether a micro-batch of one sample computes and saves what the line through others says; not so if it has
    not run.
    """
    if SINGLE not in passes:
        return False
    for calls in zip(*(passes[size].calls for size in (*SIZES[:2], SINGLE)), strict=False):
        *flops, saved = zip(*([count for count, _ in _counts(call)] for call in calls), strict=True)
        if any((a or b) and (a == b or abs(_at_single(a, b) - one) > TOLERANCE * one) for a, b, one in flops):
            return False
        if abs(_at_single(*saved[:2]) - saved[2]) > TOLERANCE * saved[2]:
            return False
    return True


def _at_single(first: float, second: float) -> float:
    return line((first, second), SIZES[:2])(SINGLE)


def check_beyond(name: str, groups: Sequence[Group], passes: Mapping[int, Pass], beyond: Pass) -> None:
    """Raise StepsError if a micro-batch beyond the others runs other operators, or has more of anything than the line
    through them says.
    """
    growing = {**{size: one for size, one in passes.items() if size != SINGLE}, BEYOND: beyond}
    check_alike(name, groups, growing)
    for calls in zip(*(one.calls for one in growing.values()), strict=True):
        operator = groups[calls[0].operator].modules[0]
        for counts in zip(*map(_counts, calls), strict=True):
            exact_line([count for count, _ in counts], f"{counts[0][1]} `{operator}`", (*growing,))


def _counts(call: CallRecord) -> tuple[tuple[float, str], ...]:
    """Return what has to grow evenly of a call, and in words what it is."""
    return (
        (call.forward.flops, "the number of FLOPs in the forward of"),
        (call.backward.flops, "the number of FLOPs in the backward of"),
        (call.saved.bytes, "the number of bytes that are saved for backward by"),
    )
