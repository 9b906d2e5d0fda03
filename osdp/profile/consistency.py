"""Finds what in the timings of collectives does not fit together, and says it with the figures.

    a reduce-scatter that is slower than the all-reduce, which does all of its work and more
    ranks of one node that are slower than ranks of several
    a group that is faster than a smaller one inside it
    fits that are far off, and repetitions that disagree

Something is slower at a size if its median is so by a tenth and the middle halves of both sets of repetitions lie
apart.  It is said once per pair of lines, if that is so at a third of the sizes: less happens by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from statistics import median, quantiles

from osdp.profile.lines import CommunicationState, Line, Timings, by_line
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.measurements import CollectiveTimes
from profiler.cluster.piecewise_fit import describe, is_bad

MARGIN = 0.10
"""By how much something has to be slower than it should be: less is noise."""
COMMON = 1 / 3
"""Part of the sizes at which it has to be."""
SPREAD = 0.30
"""Largest range of the middle half of the repetitions, relative to their median."""

Lines = dict[Line, list[Timings]]


def contradictions(times: Sequence[CollectiveTimes], state: CommunicationState, ranks_per_node: int) -> tuple[str, ...]:
    """Return sentences for the user about timings and their fits; none if all is well."""
    lines = by_line(state["points"])
    return (
        *_slower_than_all_reduce(lines),
        *_slower_inside(lines, ranks_per_node),
        *_larger_is_faster(lines),
        *_bad_fits(times),
        *_disagreeing(lines),
    )


def _slower_than_all_reduce(lines: Lines) -> Iterator[str]:
    for scatter, reduce in permutations(lines, 2):
        same_group = (scatter.ranks, scatter.stride) == (reduce.ranks, reduce.stride)
        if same_group and scatter.operation == "reduce_scatter" and reduce.operation == "all_reduce":
            yield from _slower(lines, scatter, reduce, 1.0, "although an all-reduce does more (copies included)")


def _slower_inside(lines: Lines, ranks_per_node: int) -> Iterator[str]:
    for inside, across in _pairs(lines):
        if inside.ranks == ranks_per_node and inside.stride == 1 and across.stride == ranks_per_node:
            # On equal links a larger group takes longer, by its steps or by what it carries.
            fair = max((inside.ranks - 1) / (across.ranks - 1), _carried(inside) / _carried(across))
            yield from _slower(lines, inside, across, fair, "although these ranks share a node and the others do not")


def _larger_is_faster(lines: Lines) -> Iterator[str]:
    for small, large in _pairs(lines):
        # Others cannot be compared: groups with another stride share their node's network with others.
        if small.stride == large.stride and small.ranks < large.ranks and large.ranks % small.ranks == 0:
            yield from _slower(lines, small, large, 1.0, "although its groups lie inside the other's")


def _bad_fits(times: Sequence[CollectiveTimes]) -> Iterator[str]:
    bad = [one for one in times if is_bad(one.residual)]
    if bad:
        worst = max(bad, key=lambda one: one.residual)
        line = Line(worst.operation, worst.algorithm, worst.ranks, worst.stride)
        yield (
            f"the times of {len(bad)} of {len(times)} collectives do not lie on a curve; worst {line}, "
            f"{describe(worst.residual)}: profile again on an idle machine, or with more repetitions"
        )


def _disagreeing(lines: Lines) -> Iterator[str]:
    points = [(line, point) for line, points in lines.items() for point in points if len(point["seconds"]) > 2]
    wide = [one for one in points if _spread(one[1]) > SPREAD]
    if wide:
        line, point = max(wide, key=lambda one: _spread(one[1]))
        yield (
            f"repetitions disagree at {len(wide)} of {len(points)} points; worst {line} at "
            f"{_size(point['size_bytes'])}: the middle half spreads over {100 * _spread(point):.0f} % of the median "
            f"of {_duration(median(point['seconds']))}: something else uses the machine or the network"
        )


def _slower(lines: Lines, one: Line, other: Line, fair: float, why: str) -> Iterator[str]:
    """Say at how many sizes, and where most, `one` takes longer than `fair` times the other."""
    others = {point["size_bytes"]: point["seconds"] for point in lines[other]}
    common = [
        (point["size_bytes"], point["seconds"], others[point["size_bytes"]])
        for point in lines[one]
        if others.get(point["size_bytes"]) and point["seconds"]
    ]
    found = [
        (_excess(longer, shorter, fair), size, median(longer), median(shorter))
        for size, longer, shorter in common
        if _excess(longer, shorter, fair) > MARGIN
    ]
    if found and len(found) >= COMMON * len(common):
        _, size, longer_s, shorter_s = max(found)
        yield (
            f"{one} is slower than {other} at {len(found)} of {len(common)} sizes, {why}; most at {_size(size)}: "
            f"{_duration(longer_s)} against {_duration(shorter_s)}"
        )


def _excess(longer: Sequence[float], shorter: Sequence[float], fair: float) -> float:
    """Return by how much one median exceeds `fair` times another; 0 if the middle halves meet."""
    apart = _quartiles(longer)[0] > fair * _quartiles(shorter)[2]
    return median(longer) / (fair * median(shorter)) - 1 if apart else 0.0


def _pairs(lines: Lines) -> Iterator[tuple[Line, Line]]:
    """Yield two groups with the same collective."""
    for one, other in permutations(lines, 2):
        if (one.operation, one.algorithm) == (other.operation, other.algorithm):
            yield one, other


def _carried(line: Line) -> float:
    """Part of the tensor that each rank sends."""
    return (line.ranks - 1) / line.ranks


def _quartiles(seconds: Sequence[float]) -> Sequence[float]:
    return quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3


def _spread(point: Timings) -> float:
    lower, middle, upper = _quartiles(point["seconds"])
    return (upper - lower) / middle


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def _size(size_bytes: float) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:.0f} bytes"
