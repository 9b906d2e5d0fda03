"""Times every collective that a strategy can send, in every group of ranks, at many sizes, and fits their times.

What is measured is read from the registry (`planner.strategies.registry`), so that it is what can be planned.

A first pass runs each point once, from small to large, and stops a line where the next size would take too
long; of what is left, as much is kept as the budget allows.  Then come rounds: each times every point once,
in the same order on all ranks, so that what disturbs the machine for a while disturbs all points alike.
All ranks synchronize before a point, all groups of a line work at once, and its time is that of the slowest rank.

Times include the copies around a collective (`osdp.profile.runtime_exchanges`).  The same code serves gloo on CPUs and
NCCL on GPUs, where all calls of a point are enqueued before the GPUs begin them together, after a small all-reduce
(`profiler.timing.device_queue`): what Python takes for them does not count.  Points where that could not be had are
marked.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles

import torch

from osdp.profile.runtime_exchanges import element_unit, prepare, roots_of
from planner.collectives import CHAINS, ONE_SIDED
from planner.strategies.spec import SPECS, Volume
from profiler.byte_sizes import MIB
from profiler.cluster.cluster import Cluster, Device, Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CollectiveTimes
from profiler.cluster.piecewise_fit import MIN_POINTS, fit
from profiler.errors import OsdpError
from profiler.timing.device_queue import clock_of, cold_sets
from profiler.timing.overlap import meet, slowest, time_together
from runtime.meshes import Meshes

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
ORDER = (*COLLECTIVES, *ONE_SIDED)
"""What is measured, in this order; a barrier is not, which takes no longer than the latency of a link."""
SIZES_BYTES = (*(4096 * 4**power for power in range(3)), *(MIB // 4 * 2**power for power in range(9)))
"""4 KiB to 64 MiB, denser where the units of models lie."""
POINT_S = 2.0
"""Longest that one timing may take, as estimated in the first pass; less if the budget is small."""
TIMING_S = 0.02
"""Faster collectives are timed several in a row: starting together is then a small part."""
LOOK_AGAIN_S = 0.1
"""In the first pass, faster points are timed twice, and the quicker time decides how many run in a row."""
MAX_REPEATS = 16
FIRST_PASS_SHARE = 0.25
"""Part of the budget for the first pass; when it is spent, groups that are not a whole level are left out."""
WARM_UP_ROUNDS = 2
"""The first pass is one of them."""
ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Line:
    """A collective over groups of one size and stride, at any size: one line of a diagram."""

    operation: str
    algorithm: str
    """`native` or `ring`."""
    ranks: int
    stride: int

    def __str__(self) -> str:
        apart = "" if self.stride == 1 else f" that are {self.stride} apart"
        return f"{'ring ' if self.algorithm == 'ring' else ''}{self.operation} over {self.ranks} ranks{apart}"

    def is_whole_level(self, nodes: int, ranks_per_node: int) -> bool:
        """Whether its groups are the world, the nodes, or one rank of every node."""
        levels = (nodes * ranks_per_node, 1), (ranks_per_node, 1), (nodes, ranks_per_node)
        return (self.ranks, self.stride) in levels


@dataclass(frozen=True, slots=True)
class Timings:
    """The timings of one line at one size."""

    line: Line
    size_bytes: int
    """Of the whole tensor."""
    seconds: tuple[float, ...]
    """Of one collective, on the slowest rank: one number per round."""
    is_host_bound: bool = False
    """Whether a GPU may have waited for its host."""

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def quartiles_s(self) -> Sequence[float]:
        return quantiles(self.seconds, n=4, method="inclusive") if len(self.seconds) > 1 else self.seconds * 3


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure, and for how long."""

    nodes: int
    ranks_per_node: int
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    """Of whole tensors; rounded up to what all groups can cut evenly."""
    repetitions: int = 5
    budget_s: float = 120.0
    one_sided: bool = True
    """Whether the ranks of a node can have windows, so that pulls and pushes are measured."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One point in the first pass."""

    line: Line
    is_whole_level: bool
    index: int
    """Of its size among those of the line."""
    size_bytes: int
    repeats: int
    seconds: float
    """Of one collective."""
    overhead_s: float
    """Of making the tensors and synchronizing."""

    @property
    def cost_s(self) -> float:
        """Seconds that it adds to a round."""
        return self.overhead_s + self.repeats * self.seconds


def measure_rounds(request: Request, device: torch.device, progress: Callable[[int], None]) -> list[Timings]:
    """Return the timings of everything that the budget allows; `progress` is called with the rounds done. Collective.

    Raises OsdpError if the budget is too small for the smallest sizes.
    """
    started = time.perf_counter()
    timer = Timer(request, device)
    trials = timer.first_pass(started)
    (spent_s,) = slowest([time.perf_counter() - started], device)
    warm_up = WARM_UP_ROUNDS - 1
    chosen = affordable(trials, request.budget_s - spent_s, warm_up + request.repetitions)
    rounds = []
    for number in range(-warm_up, request.repetitions):
        progress(max(0, number))
        seconds = [timer.time_s(trial.line, trial.size_bytes, trial.repeats) for trial in chosen]
        rounds.append(slowest(seconds, device))
    by_point = zip(*rounds[warm_up:], strict=True)
    return [
        Timings(trial.line, trial.size_bytes, seconds, (trial.line, trial.size_bytes) in timer.host_bound)
        for trial, seconds in zip(chosen, by_point, strict=True)
    ]


def by_line(timings: Sequence[Timings]) -> dict[Line, list[Timings]]:
    """Return the timings of each line, by size."""
    found: dict[Line, list[Timings]] = {}
    for one in sorted(timings, key=lambda one: one.size_bytes):
        found.setdefault(one.line, []).append(one)
    return found


def collective_times(timings: Sequence[Timings]) -> tuple[CollectiveTimes, ...]:
    """Return the fitted times of every line; raises OsdpError if a clock stood still."""
    found = []
    for line, of_line in by_line(timings).items():
        points = tuple((float(one.size_bytes), one.median_s) for one in of_line)
        try:
            fitted, residual = fit(points)
        except OsdpError as error:
            what = f"{line}: {error.what}"
            raise OsdpError(what, got=error.got, expected=error.expected, advice=error.advice) from None
        found.append(CollectiveTimes(line.operation, line.algorithm, line.ranks, line.stride, fitted, residual, points))
    return tuple(found)


class Timer:
    """Takes times on the ranks of the default process group."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.request, self.device = request, device
        self.meshes = Meshes(device.type, request.nodes, request.ranks_per_node)
        self.clock = clock_of(device)
        self.host_bound: set[tuple[Line, int]] = set()
        """Points at which a GPU may have waited for its host; the same on all ranks."""
        # Rings are for gloo: NCCL's own reduce-scatter is one.
        kinds = {"rings": device.type == "cpu", "one_sided": request.one_sided}
        self.lines = lines_on(request.nodes, request.ranks_per_node, **kinds)
        # Sizes double, so that a line takes about twice as long as its largest size, which may be timed twice.
        share_s = FIRST_PASS_SHARE * request.budget_s / (3 * max(1, len(self.lines)))
        self.longest_s = min(POINT_S, share_s)
        unit = ELEMENT_BYTES * element_unit(self.meshes.world_size)
        self.sizes_bytes = sorted({-(-size // unit) * unit for size in request.sizes_bytes if size > 0})
        if len(self.sizes_bytes) < MIN_POINTS:
            got = ", ".join(map(str, request.sizes_bytes)) or "none"
            expected = f"{MIN_POINTS} sizes or more that differ by {unit} bytes"
            raise OsdpError("too few sizes to measure", got=got, expected=expected)

    def time_s(self, line: Line, size_bytes: int, repeats: int) -> float:
        """Return this rank's seconds for one of `repeats` collectives in a row."""
        group = self.meshes.group(line.ranks, line.stride)
        sets = cold_sets(size_bytes, repeats, self.device)
        exchange = prepare(line.operation, line.algorithm, group, size_bytes // ELEMENT_BYTES, self.device, sets)

        def run() -> None:
            for turn in range(repeats):
                exchange(turn)

        taken = time_together(run, self.clock, self.device)
        if taken.is_host_bound:
            self.host_bound.add((line, size_bytes))
        return taken.seconds / repeats

    def _connect(self, line: Line, turns: int) -> None:
        """Let a group's ranks connect, which takes long once."""
        group, numel = self.meshes.group(line.ranks, line.stride), self.sizes_bytes[0] // ELEMENT_BYTES
        exchange = prepare(line.operation, line.algorithm, group, numel, self.device)
        for turn in range(turns):
            exchange(turn)
        meet(self.device)

    def first_pass(self, started: float) -> list[Trial]:
        """Run each line at growing sizes; `started`: by this rank's clock, since when the budget is spent."""
        trials: list[Trial] = []
        for line in self.lines:
            is_whole = line.is_whole_level(self.request.nodes, self.request.ranks_per_node)
            (spent_s,) = slowest([time.perf_counter() - started], self.device)
            if is_whole or spent_s < FIRST_PASS_SHARE * self.request.budget_s:
                trials += self._first_pass_of(line, is_whole)
        return trials

    def _first_pass_of(self, line: Line, is_whole: bool) -> Iterator[Trial]:
        group = self.meshes.group(line.ranks, line.stride)
        turns = len(roots_of(group)) if line.operation in CHAINS else 1
        self._connect(line, turns)
        s_per_byte = 0.0
        for index, size_bytes in enumerate(self.sizes_bytes):
            if index >= MIN_POINTS and turns * s_per_byte * size_bytes > self.longest_s:
                # One look may have been disturbed, and would cost the line all its larger sizes.
                smaller_bytes = self.sizes_bytes[index - 1]
                (seconds,) = slowest([self.time_s(line, smaller_bytes, turns)], self.device)
                if turns * seconds / smaller_bytes * size_bytes > self.longest_s:
                    return
            begun = time.perf_counter()
            seconds = self.time_s(line, size_bytes, turns)
            overhead_s = time.perf_counter() - begun - turns * seconds
            seconds, overhead_s = slowest([seconds, overhead_s], self.device)
            if turns * seconds < LOOK_AGAIN_S:
                seconds = min(seconds, *slowest([self.time_s(line, size_bytes, turns)], self.device))
            s_per_byte = seconds / size_bytes
            wanted = ceil(TIMING_S / max(turns * seconds, 1e-9))
            repeats = turns * max(1, min(MAX_REPEATS // turns, wanted))
            yield Trial(line, is_whole, index, size_bytes, repeats, seconds, overhead_s)


def affordable(trials: list[Trial], left_s: float, rounds: int) -> list[Trial]:
    """Return the points that so many rounds can take in the seconds that are left, in the order given.

    The smallest sizes of the world, of nodes and across nodes are needed; then come their larger sizes, the
    quickest first, then the other groups.  Raises OsdpError if there is no time for what is needed.
    """
    blocks: dict[Line, list[Trial]] = {}
    for trial in trials:
        if trial.index < MIN_POINTS:
            blocks.setdefault(trial.line, []).append(trial)
    needed = [trial for block in blocks.values() for trial in block if trial.is_whole_level]
    larger = sorted((trial for trial in trials if trial.index >= MIN_POINTS), key=lambda trial: trial.cost_s)
    candidates = [
        *([trial] for trial in larger if trial.is_whole_level),
        *(block for block in blocks.values() if not block[0].is_whole_level),
        *([trial] for trial in larger if not trial.is_whole_level),
    ]
    kept = set(needed)
    round_s = sum(trial.cost_s for trial in kept)
    if rounds * round_s > left_s:
        what = "there is too little time to measure communication"
        advice = "a larger --budget-s, or fewer --repetitions"
        expected = f"{rounds * round_s:.1f} s for {rounds} rounds of the smallest sizes"
        raise OsdpError(what, got=f"{left_s:.1f} s after a first pass", advice=advice, expected=expected)
    for block in candidates:
        cost_s = sum(trial.cost_s for trial in block)
        has_small = block[0].index == 0 or any(one in kept for one in blocks[block[0].line])
        if has_small and rounds * (round_s + cost_s) <= left_s:
            kept |= set(block)
            round_s += cost_s
    return [trial for trial in trials if trial in kept]


def lines_on(nodes: int, ranks_per_node: int, *, rings: bool, one_sided: bool) -> tuple[Line, ...]:
    """Return the lines of a grid, whole levels first; with reduce-scatter in rings too, and with windows."""
    # Of a cluster, strategies ask for nothing but its ranks.
    unknown = Figure(0.0, "assumed: not measured yet")
    device, link = Device("unknown", "cpu", unknown, unknown, {}, unknown, unknown, {}), Link(unknown, unknown)
    grid = Cluster(Cluster.SCHEMA, "grid", "", nodes, ranks_per_node, device, link, link, False, "assumed: unknown")
    volume = Volume(*(grid.world_size,) * 3)
    found = {
        Line(sent.operation, "native", sent.ranks, sent.stride)
        for spec in SPECS.values()
        for strategy in spec.on(grid)
        for sent in spec.collectives(volume, strategy, grid)
        if sent.operation in (ORDER if one_sided else COLLECTIVES) and sent.ranks > 1
    }
    if rings:
        scatters = [line for line in found if line.operation == "reduce_scatter"]
        found |= {Line(line.operation, "ring", line.ranks, line.stride) for line in scatters}

    def rank(line: Line) -> tuple[bool, int, int, int, str]:
        is_part = not line.is_whole_level(nodes, ranks_per_node)
        return is_part, -line.ranks, line.stride, ORDER.index(line.operation), line.algorithm

    return tuple(sorted(found, key=rank))
