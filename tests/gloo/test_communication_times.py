"""Timing collectives on real ranks: every point is there, and every collective does what it says."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import some

from osdp.profile.cluster_from_timings import derived_links
from osdp.profile.session import middle_size_bytes
from osdp.profile.time_collectives import Line, Timings, by_line, collective_times

SIZES_BYTES = (2048, 8192, 20010, 65536)
ROUNDED = [2048, 8192, 20032, 65536]
"""To multiples of 64 bytes: 4 ranks, 4 parameters, 4 bytes; and so to those of 32, with 2 ranks."""
CPU = torch.device("cpu")
QUICK_S = 0.002
"""Faster collectives are timed several in a row, where nobody looks at how long they take; as a rule up to ten times
as often."""

TWO_BY_TWO = {
    Line("all_gather", "native", 4, 1),
    Line("reduce_scatter", "native", 4, 1),
    Line("reduce_scatter", "ring", 4, 1),
    Line("all_reduce", "native", 4, 1),
    Line("broadcast", "native", 4, 1),
    Line("reduce", "native", 4, 1),
    Line("all_gather", "native", 2, 1),
    Line("reduce_scatter", "native", 2, 1),
    Line("reduce_scatter", "ring", 2, 1),
    Line("all_gather", "native", 2, 2),
    Line("reduce_scatter", "native", 2, 2),
    Line("reduce_scatter", "ring", 2, 2),
    Line("all_reduce", "native", 2, 2),
    Line("pull", "native", 2, 1),
    Line("push", "native", 2, 1),
    Line("publish", "native", 2, 1),
}
"""Counted off from the tables in `planner.strategies`."""


def measure(rank: int, nodes: int, ranks_per_node: int) -> tuple[list[Timings], list[int]]:
    """Return the timings, and how many rounds were done at each call of `progress`."""
    from osdp.profile import time_collectives

    time_collectives.TIMING_S = QUICK_S
    done: list[int] = []
    request = time_collectives.Request(nodes, ranks_per_node, SIZES_BYTES, repetitions=3)
    return time_collectives.measure_rounds(request, CPU, done.append), done


@pytest.mark.parametrize(("nodes", "ranks_per_node"), some([(2, 2), (1, 2)], 2))
def test_every_point_is_timed_in_every_round(nodes: int, ranks_per_node: int) -> None:
    results = run_ranks(measure, nodes * ranks_per_node, nodes, ranks_per_node, ranks_per_node=ranks_per_node)
    assert all(result == results[0] for result in results)  # the slowest rank's, so the same on all
    timings, done = results[0]
    assert done == [0, 0, 1, 2]  # a round warms up
    lines = by_line(timings)
    on_one_node = {Line(line.operation, line.algorithm, 2, 1) for line in TWO_BY_TWO if line.stride == 1}
    expected = TWO_BY_TWO if nodes == 2 else on_one_node
    assert set(lines) == expected
    for line, points in lines.items():
        assert [point.size_bytes for point in points] == ROUNDED, line
        for point in points:
            assert len(set(point.seconds)) == 3  # no round was counted twice
            assert all(0 < seconds < 10 for seconds in point.seconds)
    times = collective_times(timings)
    assert {(one.operation, one.algorithm, one.ranks, one.stride) for one in times} == {
        (line.operation, line.algorithm, line.ranks, line.stride) for line in expected
    }
    assert middle_size_bytes(times, nodes * ranks_per_node) == 20032
    intra, inter = derived_links(times, nodes, ranks_per_node)
    assert intra.bytes_per_s.value > 0
    assert (inter is None) == (nodes == 1)


def exchange_values(rank: int) -> int:
    """Run every collective on 2 x 2 ranks and check what it leaves; return how many."""
    from osdp.profile.runtime_exchanges import PARAMETERS, prepare
    from runtime.meshes import Meshes

    meshes = Meshes("cpu", 2, 2)
    members_of = {(4, 1): [0, 1, 2, 3], (2, 1): [rank // 2 * 2, rank // 2 * 2 + 1], (2, 2): [rank % 2, rank % 2 + 2]}
    checked = 0
    for line in sorted(TWO_BY_TWO, key=str):
        members = members_of[line.ranks, line.stride]
        values, numel = [member + 1.0 for member in members], 96 * PARAMETERS
        group, sets = meshes.group(line.ranks, line.stride), 1 + checked % 3
        exchange = prepare(line.operation, line.algorithm, group, numel, CPU, sets)
        for turn in range(5):
            got = exchange(turn)
            root = turn % len(members)  # owners take turns
            if line.operation == "publish":
                assert got[0].unique().tolist() == [0.0]  # nobody pushed anything
                continue
            if line.operation == "push":
                assert torch.cat(got).unique().tolist() == [0.0]  # until they meet
                continue
            if line.operation in ("all_gather", "pull"):
                assert len(got) == PARAMETERS
                assert all(
                    row.unique().tolist() == [value] for whole in got for row, value in zip(whole, values, strict=True)
                )
                continue
            expected = values[root] if line.operation == "broadcast" else fmean(values)
            parts = line.ranks if line.operation == "reduce_scatter" else 1
            if line.operation == "reduce" and members[root] != rank:
                assert got == []
                continue
            assert torch.cat(got).numel() == numel // parts
            assert torch.cat(got).unique().tolist() == [expected], line
        checked += 1
    return checked


def test_every_collective_leaves_the_right_values() -> None:
    assert run_ranks(exchange_values, 4, ranks_per_node=2) == [len(TWO_BY_TWO)] * 4


def measure_on_slow_link(rank: int) -> tuple[set[int], str, str]:
    """Let every size look as if it took too long; ask for too little time, and for too few sizes."""
    from osdp.profile import time_collectives
    from profiler.errors import OsdpError

    time_collectives.POINT_S, time_collectives.TIMING_S = 0.0, QUICK_S
    request = time_collectives.Request(1, 2, SIZES_BYTES, repetitions=1)
    timings = time_collectives.measure_rounds(request, CPU, lambda done: None)
    errors = []
    for change in ({"budget_s": 0.0}, {"sizes_bytes": (1, 2, 3)}):
        request = time_collectives.Request(**{"nodes": 1, "ranks_per_node": 2, "sizes_bytes": SIZES_BYTES} | change)
        with pytest.raises(OsdpError) as caught:
            time_collectives.measure_rounds(request, CPU, lambda done: None)
        errors.append(caught.value.what)
    return {len(points) for points in by_line(timings).values()}, errors[0], errors[1]


def test_slow_links_are_measured_at_the_smallest_sizes() -> None:
    for sizes, no_time, no_sizes in run_ranks(measure_on_slow_link, 2):
        assert sizes == {3}
        assert no_time == "there is too little time to measure communication"
        assert no_sizes == "too few sizes to measure"


def overlap(rank: int) -> Any:
    from profiler.timing.overlap import measure_overlap

    return measure_overlap(1 << 20, 3, CPU)


def test_overlap_on_gloo() -> None:
    results = run_ranks(overlap, 2)
    assert results[0] == results[1]
    found = results[0]
    assert min(found.computation_s, found.communication_s, found.both_s) > 0
    assert found.slowdown >= 1
    assert not found.overlaps  # FSDP2 waits for gloo's collectives at once


COMPUTATION_S, COMMUNICATION_S = 0.05, 0.06


class Pending:
    """A collective that is done some time after its start."""

    def __init__(self) -> None:
        self.done = time.perf_counter() + COMMUNICATION_S

    def wait(self) -> None:
        time.sleep(max(0.0, self.done - time.perf_counter()))


def overlap_of_sleepers(rank: int, blocks: bool, slowdown: float) -> Any:
    """Measure with computation and communication that sleep; the first is slower while the second runs."""
    from profiler.timing import overlap

    pending: list[Pending] = []

    def start(bench: Any) -> Pending:
        pending[:] = [Pending()]
        if blocks:
            pending[0].wait()
        return pending[0]

    def compute(bench: Any) -> None:
        in_flight = bool(pending) and time.perf_counter() < pending[0].done
        time.sleep(COMPUTATION_S * (slowdown if in_flight else 1.0))

    overlap._Bench.start = start  # type: ignore[method-assign, assignment]
    overlap._Bench.compute = compute  # type: ignore[method-assign]
    return overlap.measure_overlap(1 << 10, 3, CPU)


def test_overlap_is_seen() -> None:
    """Both together take 0.06 s of 0.11."""
    found = run_ranks(overlap_of_sleepers, 2, False, 1.0)[0]
    assert found.computation_s == pytest.approx(COMPUTATION_S, abs=0.02)
    assert found.communication_s == pytest.approx(COMMUNICATION_S, abs=0.02)
    assert found.both_s == pytest.approx(COMMUNICATION_S, abs=0.02)
    assert found.asynchronous
    assert found.slowdown < 1.3


def test_slowdown_is_seen() -> None:
    found = run_ranks(overlap_of_sleepers, 2, False, 2.0)[0]
    assert found.slowdown == pytest.approx(2.0, abs=0.4)
    assert found.both_s == pytest.approx(2 * COMPUTATION_S, abs=0.02)  # 0.1 of 0.11 s: nothing is gained


def test_a_collective_that_blocks_does_not_overlap() -> None:
    found = run_ranks(overlap_of_sleepers, 2, True, 1.0)[0]
    assert found.both_s == pytest.approx(COMPUTATION_S + COMMUNICATION_S, abs=0.02)
    assert not found.asynchronous
