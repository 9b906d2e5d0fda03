"""Times every collective that a strategy can send, in every kind of group, at many sizes.

A first pass runs each point once, from small to large, and stops a line where the next size would take too
long; of what is left, so much is kept as the budget allows.  Then come rounds: each times every point once,
in the same order on all ranks, so that what disturbs the machine for a while disturbs all points alike.
All ranks meet before a point, all groups of its kind work at once, and its time is that of the slowest rank.

Times include the copies around a collective (`osdp.profile.runtime_exchanges`).  The same code serves gloo on CPUs and
NCCL on GPUs, where the device is waited for before a clock is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist

from osdp.profile.lines import CommunicationState, Line, Timings, line_of, lines_on, rounds_done
from osdp.profile.runtime_exchanges import element_unit, prepare, roots_of
from planner.collectives import CHAINS
from profiler.byte_sizes import MIB
from profiler.cluster.piecewise_fit import MIN_POINTS
from profiler.errors import OsdpError
from profiler.timing.device_rates import timed_s
from profiler.timing.overlap import meet, slowest
from runtime.meshes import Meshes

SIZES_BYTES = (*(4096 * 4**power for power in range(3)), *(MIB // 4 * 2**power for power in range(9)))
"""4 KiB to 64 MiB, denser where the units of models lie."""
POINT_S = 2.0
"""Longest that one timing may take, as far as can be told before; less if the budget is small."""
TIMING_S = 0.02
"""Collectives that are faster are timed several in a row: starting together is then a small part."""
LOOK_AGAIN_S = 0.1
"""In the first pass what is faster is looked at twice, as the quicker look says how many in a row are wanted."""
MAX_REPEATS = 16
FIRST_PASS_SHARE = 0.25
"""Part of the budget for the first pass; when it is spent, groups that are no whole level are left out."""
WARM_UP_ROUNDS = 2
ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure, and for how long."""

    nodes: int
    ranks_per_node: int
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    """Of whole tensors; rounded up to what all groups can cut evenly."""
    repetitions: int = 5
    """Rounds."""
    budget_s: float = 120.0
    """Seconds for everything."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One point in the first pass."""

    line: Line
    is_whole_level: bool
    index: int
    """Of its size among those of the line."""
    size_bytes: int
    repeats: int
    """How many in a row a timing is to take."""
    seconds: float
    """Of one collective."""
    overhead_s: float
    """Of making the tensors and meeting."""

    @property
    def cost_s(self) -> float:
        """Seconds that it adds to a round."""
        return self.overhead_s + self.repeats * self.seconds


def measure_rounds(
    request: Request, device: torch.device, saved: CommunicationState | None = None
) -> Iterator[CommunicationState]:
    """Yield all timings so far: before the first round, and after each. A collective call at every step.

    Each yielded state is a new one, and none holds part of a round: what was yielded last can be kept, and
    given as `saved` to go on from there.  Rank 0's `saved` counts.

    Raises OsdpError if the process group is of another size, or the budget does not do for the smallest sizes.
    """
    started = time.perf_counter()
    timer = Timer(request, device)
    shared = [saved]
    dist.broadcast_object_list(shared, src=0, device=device)
    state, warm_up = shared[0], WARM_UP_ROUNDS
    if state is None:
        trials = timer.first_pass(started)
        # The first pass has warmed up once.
        warm_up -= 1
        spent_s = slowest([time.perf_counter() - started], device)[0]
        chosen = affordable(trials, request.budget_s - spent_s, warm_up + request.repetitions)
        state = CommunicationState(points=[_no_timings(trial) for trial in chosen])
    yield state
    if rounds_done(state) < request.repetitions:
        for _ in range(warm_up):
            timer.round(state)
    while rounds_done(state) < request.repetitions and state["points"]:
        seconds = timer.round(state)
        points = [
            Timings(**{**point, "seconds": [*point["seconds"], took_s]})
            for point, took_s in zip(state["points"], seconds, strict=True)
        ]
        state = CommunicationState(points=points)
        yield state


class Timer:
    """Takes times on the ranks of the default process group."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.request, self.device = request, device
        self.meshes = Meshes(device.type, request.nodes, request.ranks_per_node)
        # Rings are for gloo: NCCL's own reduce-scatter is one.
        self.lines = lines_on(request.nodes, request.ranks_per_node, on_cpu=device.type == "cpu")
        # Sizes double, so that a line takes about twice as long as its largest size, which may be timed twice.
        share_s = FIRST_PASS_SHARE * request.budget_s / (3 * max(1, len(self.lines)))
        self.longest_s = min(POINT_S, share_s)
        unit = ELEMENT_BYTES * element_unit(self.meshes.world_size)
        self.sizes_bytes = sorted({-(-size // unit) * unit for size in request.sizes_bytes if size > 0})
        if len(self.sizes_bytes) < MIN_POINTS:
            raise OsdpError(
                "too few sizes to measure",
                got=", ".join(map(str, request.sizes_bytes)) or "none",
                expected=f"{MIN_POINTS} sizes or more that differ by {unit} bytes",
            )

    def time_s(self, line: Line, size_bytes: int, repeats: int) -> float:
        """Return this rank's seconds for one of `repeats` collectives in a row."""
        group = self.meshes.group(line.ranks, line.stride)
        exchange = prepare(line, group, size_bytes // ELEMENT_BYTES, self.device)

        def run() -> None:
            for turn in range(repeats):
                exchange(turn)

        meet(self.device)
        return timed_s(run, self.device) / repeats

    def round(self, state: CommunicationState) -> list[float]:
        """Time every point once; return the seconds of the slowest rank."""
        seconds = [self.time_s(line_of(point), point["size_bytes"], point["repeats"]) for point in state["points"]]
        return slowest(seconds, self.device) if seconds else []

    def first_pass(self, started: float) -> list[Trial]:
        """Run each line at growing sizes; `started`: by this rank's clock, since when the budget is spent."""
        trials: list[Trial] = []
        for line in self.lines:
            is_whole = line.on_whole_levels(self.request.nodes, self.request.ranks_per_node)
            spent_s = slowest([time.perf_counter() - started], self.device)[0]
            if is_whole or spent_s < FIRST_PASS_SHARE * self.request.budget_s:
                trials += self._first_pass_of(line, is_whole)
        return trials

    def _first_pass_of(self, line: Line, is_whole: bool) -> Iterator[Trial]:
        group = self.meshes.group(line.ranks, line.stride)
        turns = len(roots_of(group)) if line.operation in CHAINS else 1
        self.time_s(line, self.sizes_bytes[0], turns)  # connects
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
        raise OsdpError(
            "there is too little time to measure communication",
            got=f"{left_s:.1f} s after a first pass",
            advice="allow more time, or fewer repetitions",
            expected=f"{rounds * round_s:.1f} s for {rounds} rounds of the smallest sizes",
        )
    for block in candidates:
        cost_s = sum(trial.cost_s for trial in block)
        has_small = block[0].index == 0 or any(one in kept for one in blocks[block[0].line])
        if has_small and rounds * (round_s + cost_s) <= left_s:
            kept |= set(block)
            round_s += cost_s
    return [trial for trial in trials if trial in kept]


def _no_timings(trial: Trial) -> Timings:
    line = trial.line
    return Timings(
        operation=line.operation,
        algorithm=line.algorithm,
        ranks=line.ranks,
        stride=line.stride,
        size_bytes=trial.size_bytes,
        repeats=trial.repeats,
        seconds=[],
    )
