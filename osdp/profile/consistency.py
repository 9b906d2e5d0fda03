"""Finds what in the timings of collectives does not fit together, and reports it with the figures.

    ranks of one node that are slower than ranks of several, which would turn the choice of groups round
    fits that are far off
    repetitions that disagree

Something is slower at a size if its median is so by a tenth and the middle halves of both sets of repetitions lie
apart.  It is reported once per pair of lines, if that is so at a third of the sizes: less happens by chance.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from osdp.profile.time_collectives import Line, Timings, by_line
from profiler.byte_sizes import MIB
from profiler.cluster.measurements import CollectiveTimes
from profiler.cluster.piecewise_fit import describe, is_bad

MARGIN = 0.10
"""By how much something has to be slower than it should be: less is noise."""
COMMON = 1 / 3
"""Part of the sizes at which it has to be."""
SPREAD = 0.30
"""Largest range of the middle half of the repetitions, relative to their median."""


def contradictions(times: Sequence[CollectiveTimes], timings: Sequence[Timings], node_ranks: int) -> tuple[str, ...]:
    """Return sentences for the user about timings and their fits; none if all is well."""
    return (*_slower_inside(timings, node_ranks), *_bad_fits(times), *_disagreeing(timings))


def _slower_inside(timings: Sequence[Timings], ranks_per_node: int) -> Iterator[str]:
    lines = by_line(timings)
    for inside, across in product(lines, lines):
        is_alike = (inside.operation, inside.algorithm) == (across.operation, across.algorithm)
        if not is_alike or (inside.ranks, inside.stride) != (ranks_per_node, 1) or across.stride != ranks_per_node:
            continue
        # On equal links a larger group takes longer, by its steps or by what it carries.
        steps = (inside.ranks - 1) / (across.ranks - 1)
        fair = max(steps, steps * across.ranks / inside.ranks)
        across_at = {one.size_bytes: one for one in lines[across]}
        common = [(one, across_at[one.size_bytes]) for one in lines[inside] if one.size_bytes in across_at]
        slower = [
            (one.median_s / (fair * other.median_s), one, other)
            for one, other in common
            if one.quartiles_s[0] > fair * other.quartiles_s[2] and one.median_s > (1 + MARGIN) * fair * other.median_s
        ]
        if slower and len(slower) >= COMMON * len(common):
            _, one, other = max(slower, key=lambda found: found[0])
            yield (
                f"{inside} is slower than {across} at {len(slower)} of {len(common)} sizes, although these ranks share "
                f"a node and the others do not; most at {_size(one.size_bytes)}: {1e3 * one.median_s:.3g} ms against "
                f"{1e3 * other.median_s:.3g} ms"
            )


def _bad_fits(times: Sequence[CollectiveTimes]) -> Iterator[str]:
    bad = [one for one in times if is_bad(one.residual)]
    if bad:
        worst = max(bad, key=lambda one: one.residual)
        line = Line(worst.operation, worst.algorithm, worst.ranks, worst.stride)
        yield (
            f"the times of {len(bad)} of {len(times)} collectives do not lie on a curve; worst {line}, "
            f"{describe(worst.residual)}: profile again on an idle machine, or with more repetitions"
        )


def _disagreeing(timings: Sequence[Timings]) -> Iterator[str]:
    repeated = [one for one in timings if len(one.seconds) > 2]
    wide = [one for one in repeated if _spread(one) > SPREAD]
    if wide:
        worst = max(wide, key=_spread)
        yield (
            f"repetitions disagree at {len(wide)} of {len(repeated)} points; worst {worst.line} at "
            f"{_size(worst.size_bytes)}: the middle half spreads over {_spread(worst):.0%} of the median of "
            f"{1e3 * worst.median_s:.3g} ms: something else uses the machine or the network"
        )


def _spread(one: Timings) -> float:
    lower, middle, upper = one.quartiles_s
    return (upper - lower) / middle


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.3g} MiB" if size_bytes >= MIB else f"{size_bytes / 1024:.3g} KiB"
