"""What is to be measured on a grid of ranks, each collective that a strategy sends in each kind of group, and
the timings of it so far.

The list is read from the registry (`planner.strategies.registry`), so that what is planned is what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypedDict

from planner.collectives import ONE_SIDED
from planner.strategies.spec import SPECS, Volume
from profiler.cluster.cluster import Cluster, Device, Link
from profiler.cluster.figure import Figure

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
ORDER = (*COLLECTIVES, *ONE_SIDED)
"""What is measured, in this order; a barrier is not, which takes no longer than the latency of a link."""


@dataclass(frozen=True, slots=True)
class Line:
    """A collective in one kind of group, at any size: one line of a diagram."""

    operation: str
    algorithm: str
    """`native` or `ring`."""
    ranks: int
    stride: int

    def __str__(self) -> str:
        apart = "" if self.stride == 1 else f" that are {self.stride} apart"
        return f"{'ring ' if self.algorithm == 'ring' else ''}{self.operation} over {self.ranks} ranks{apart}"

    def on_whole_levels(self, nodes: int, ranks_per_node: int) -> bool:
        """Whether its groups are the world, the nodes, or one rank of every node."""
        levels = (nodes * ranks_per_node, 1), (ranks_per_node, 1), (nodes, ranks_per_node)
        return (self.ranks, self.stride) in levels


class Timings(TypedDict):
    """The timings of one line at one size; plain data, so that it can be kept as JSON."""

    operation: str
    algorithm: str
    ranks: int
    stride: int
    size_bytes: int
    """Of the whole tensor."""
    repeats: int
    """Collectives in a row that one timing is the mean of."""
    seconds: list[float]
    """Of one collective, on the slowest rank: one number per round."""


class CommunicationState(TypedDict):
    """All timings so far."""

    points: list[Timings]
    """In the order in which a round takes them."""


def line_of(point: Timings) -> Line:
    """Return the line on which a point lies."""
    return Line(point["operation"], point["algorithm"], point["ranks"], point["stride"])


def is_sound(data: object) -> bool:
    """Whether something that was read is a `CommunicationState`, with figures that can be."""
    points = data.get("points") if isinstance(data, dict) else None
    return isinstance(points, list) and bool(points) and all(_is_sound_point(point) for point in points)


def _is_sound_point(point: object) -> bool:
    if not isinstance(point, dict) or point.keys() != Timings.__annotations__.keys():
        return False
    counts, seconds = [point[name] for name in ("ranks", "stride", "size_bytes", "repeats")], point["seconds"]
    return (
        point["operation"] in ORDER
        and point["algorithm"] in ("native", "ring")
        and all(type(count) is int and count > 0 for count in counts)
        and isinstance(seconds, list)
        and all(type(one) is float and 0 < one < inf for one in seconds)
    )


def rounds_done(state: CommunicationState) -> int:
    """Return the number of rounds that were timed."""
    return min((len(point["seconds"]) for point in state["points"]), default=0)


def by_line(points: Sequence[Timings]) -> dict[Line, list[Timings]]:
    """Return the points of each line, by size."""
    found: dict[Line, list[Timings]] = {}
    for point in sorted(points, key=lambda one: one["size_bytes"]):
        found.setdefault(line_of(point), []).append(point)
    return found


def lines_on(nodes: int, ranks_per_node: int, on_cpu: bool) -> tuple[Line, ...]:
    """Return the lines of a grid, whole levels first; `on_cpu`: also reduce-scatter in rings, and shared windows."""
    grid = _grid(nodes, ranks_per_node)
    volume = Volume(*(grid.world_size,) * 3)
    found = {
        Line(sent.operation, "native", sent.ranks, sent.stride)
        for spec in SPECS.values()
        for strategy in spec.on(grid)
        for sent in spec.collectives(volume, strategy, grid)
        if sent.operation in (ORDER if on_cpu else COLLECTIVES) and sent.ranks > 1
    }
    if on_cpu:
        found |= {
            Line(one.operation, "ring", one.ranks, one.stride) for one in found if one.operation == "reduce_scatter"
        }

    def rank(line: Line) -> tuple[bool, int, int, int, str]:
        is_part = not line.on_whole_levels(nodes, ranks_per_node)
        return is_part, -line.ranks, line.stride, ORDER.index(line.operation), line.algorithm

    return tuple(sorted(found, key=rank))


def _grid(nodes: int, ranks_per_node: int) -> Cluster:
    """Return a cluster of which nothing but its ranks is known, which is all that strategies ask for."""
    unknown = Figure(0.0, "assumed: not measured yet")
    device = Device("unknown", "cpu", unknown, unknown, {}, unknown, unknown, {})
    link = Link(unknown, unknown)
    return Cluster(Cluster.SCHEMA, "grid", "", nodes, ranks_per_node, device, link, link, False, "assumed: unknown")
