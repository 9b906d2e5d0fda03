"""What timings of collectives say: fitted times, where rings are faster, and links for what was not measured.

The links invert `planner.collectives`: an all-gather over n ranks takes (n - 1) alpha + (n - 1) / n S / beta,
so from its line t = latency + S slope

    alpha = latency / (n - 1)        beta = (n - 1) / n / slope

`intra` comes from the groups of whole nodes.  `inter` comes from groups of one rank per node, which all work at
once: beta is what one rank gets while all ranks of its node send.
"""

from __future__ import annotations

from statistics import median

from osdp.profile.lines import CommunicationState, Line, by_line
from profiler.cluster.cluster import Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CollectiveTimes, RingRule
from profiler.cluster.piecewise_fit import MIN_POINTS, describe, fit
from profiler.errors import OsdpError

RING_GAIN = 0.05
"""By how much a ring has to be faster."""


def collective_times(state: CommunicationState) -> tuple[CollectiveTimes, ...]:
    """Return the fitted times of every line; raises OsdpError if no round was timed or a clock stood still."""
    found = []
    for line, timings in by_line(state["points"]).items():
        if not all(one["seconds"] for one in timings):
            raise OsdpError(f"{line} was not timed yet", expected="one round or more")
        points = tuple((float(one["size_bytes"]), median(one["seconds"])) for one in timings)
        try:
            pieces, residual = fit(points)
        except OsdpError as error:
            raise OsdpError(
                f"{line}: {error.what}", got=error.got, expected=error.expected, advice=error.advice
            ) from None
        found.append(CollectiveTimes(line.operation, line.algorithm, line.ranks, line.stride, pieces, residual, points))
    return tuple(found)


def ring_rules(times: tuple[CollectiveTimes, ...]) -> tuple[RingRule, ...]:
    """Return the groups, and the sizes from which on, where a ring reduce-scatter was faster at all sizes measured."""
    rules = []
    for ring in (one for one in times if one.algorithm == "ring"):
        native = _native(times, ring)
        if native is None:
            continue
        native_s, from_bytes = dict(native.points), None
        for size, seconds in reversed([point for point in ring.points if point[0] in native_s]):
            if seconds >= (1 - RING_GAIN) * native_s[size]:
                break
            from_bytes = size
        if from_bytes is not None:
            rules.append(RingRule(ring.ranks, ring.stride, from_bytes))
    return tuple(rules)


def middle_size_bytes(times: tuple[CollectiveTimes, ...], ranks: int) -> int:
    """Return the middle one of the sizes at which an all-reduce over the world was measured."""
    for one in times:
        if (one.operation, one.ranks, one.stride) == ("all_reduce", ranks, 1):
            return int(one.points[len(one.points) // 2][0])
    raise OsdpError("no all_reduce over all ranks was measured", got=f"{len(times)} other lines")


def derived_links(times: tuple[CollectiveTimes, ...], nodes: int, ranks_per_node: int) -> tuple[Link, Link | None]:
    """Return the links inside a node and between nodes; None on one node.

    With one rank per node there is nothing inside: `intra` is then as `inter`, and says so.  Raises
    OsdpError if the all-gathers that they come from were not measured.
    """
    inter = _link(times, nodes, ranks_per_node) if nodes > 1 else None
    if ranks_per_node > 1:
        return _link(times, ranks_per_node, 1), inter
    if inter is None:
        raise OsdpError("one rank alone has no links", expected="two ranks or more")
    source = f"assumed: as between nodes, which have one rank each ({inter.latency_s.source})"
    return Link(Figure(inter.latency_s.value, source), Figure(inter.bytes_per_s.value, source)), inter


def _link(times: tuple[CollectiveTimes, ...], ranks: int, stride: int) -> Link:
    """Return the link that the all-gathers of a group went over."""
    line = Line("all_gather", "native", ranks, stride)
    for one in times:
        if (one.operation, one.ranks, one.stride) == ("all_gather", ranks, stride) and len(one.points) >= MIN_POINTS:
            (piece,), residual = fit(one.points, max_pieces=1)
            largest_bytes, largest_s = one.points[-1]
            # Where larger tensors took no longer, the rate of the largest is one that was reached.
            slope = piece.s_per_byte or largest_s / largest_bytes
            source = f"derived: the line of {line}, {describe(residual)}"
            latency_s, bytes_per_s = piece.latency_s / (ranks - 1), (ranks - 1) / ranks / slope
            return Link(Figure(latency_s, source), Figure(bytes_per_s, source))
    raise OsdpError(f"{line} was not measured", expected="it, as the link is derived from it")


def _native(times: tuple[CollectiveTimes, ...], ring: CollectiveTimes) -> CollectiveTimes | None:
    wanted = ring.operation, "native", ring.ranks, ring.stride
    return next((one for one in times if (one.operation, one.algorithm, one.ranks, one.stride) == wanted), None)
