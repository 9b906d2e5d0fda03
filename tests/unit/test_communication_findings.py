"""What is made of the timings of collectives, on timings that were made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import pytest

from osdp.profile.cluster_from_timings import derived_links, ring_rules
from osdp.profile.consistency import contradictions
from osdp.profile.session import middle_size_bytes
from osdp.profile.time_collectives import Line, Timings, Trial, affordable, collective_times, lines_on
from planner.collectives import collective_s
from profiler.cluster.cluster import Cluster, Device, Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import RingRule
from profiler.errors import OsdpError
from profiler.timing.overlap import Overlap

KIB = 1024
SIZES = [4 * KIB, 64 * KIB, 1024 * KIB, 4096 * KIB]
TimeS = Callable[[int], float]


def timings(
    operation: str,
    ranks: int,
    stride: int,
    time_s: TimeS,
    algorithm: str = "native",
    repetitions: Sequence[float] = (1.0, 1.01, 0.99),
) -> list[Timings]:
    line = Line(operation, algorithm, ranks, stride)
    return [Timings(line, size, tuple(time_s(size) * factor for factor in repetitions)) for size in SIZES]


def line_s(latency_s: float, bytes_per_s: float) -> TimeS:
    return lambda size: latency_s + size / bytes_per_s


def notes(ranks_per_node: int, *lines: list[Timings]) -> tuple[str, ...]:
    given = list(chain(*lines))
    return contradictions(collective_times(given), given, ranks_per_node)


# --- what to measure -------------------------------------------------------------------------


def test_lines_of_eight_ranks_on_two_nodes() -> None:
    """By hand: groups of 2, 4 and 8 neighbours; all-reduces across 4, 2 and 8; one rank of each node."""
    lines = lines_on(2, 4, rings=False, one_sided=False)
    assert {(line.ranks, line.stride) for line in lines if line.operation == "all_gather"} == {
        (8, 1),
        (4, 1),
        (2, 1),
        (2, 4),
    }
    assert {(line.ranks, line.stride) for line in lines if line.operation == "all_reduce"} == {(8, 1), (4, 2), (2, 4)}
    assert {(line.ranks, line.stride) for line in lines if line.operation in ("broadcast", "reduce")} == {(8, 1)}
    whole = [line.is_whole_level(2, 4) for line in lines]
    assert whole == sorted(whole, reverse=True)  # first the world, nodes, and across nodes
    assert {(line.ranks, line.stride) for line in lines if not line.is_whole_level(2, 4)} == {(2, 1), (4, 2)}


def test_rings_stand_beside_every_reduce_scatter() -> None:
    lines = lines_on(2, 2, rings=True, one_sided=True)
    groups = {
        algorithm: {
            (line.ranks, line.stride)
            for line in lines
            if line.operation == "reduce_scatter" and line.algorithm == algorithm
        }
        for algorithm in ("native", "ring")
    }
    assert groups["ring"] == groups["native"] == {(4, 1), (2, 1), (2, 2)}
    assert {line.operation for line in lines if line.algorithm == "ring"} == {"reduce_scatter"}
    assert lines_on(1, 1, rings=True, one_sided=True) == ()


def trial(line: Line, index: int, seconds: float, whole: bool) -> Trial:
    return Trial(line, whole, index, SIZES[index], 2, seconds, 1.0)


def test_the_budget_decides_what_is_measured() -> None:
    world, part = Line("all_gather", "native", 8, 1), Line("all_gather", "native", 2, 1)
    trials = [
        trial(line, index, seconds, line is world)
        for line in (world, part)
        for index, seconds in enumerate((0.5, 0.5, 0.5, 2.0))
    ]
    needed, small, large = trials[:3], trials[4:7], (trials[3], trials[7])
    # A point costs 1 + 2 * 0.5 = 2 s a round, the largest 1 + 2 * 2 = 5 s.
    assert affordable(trials, 12.0, 2) == needed
    assert affordable(trials, 21.9, 2) == needed
    assert affordable(trials, 22.0, 2) == [*needed, large[0]]
    assert affordable(trials, 34.0, 2) == [*needed, large[0], *small]
    assert affordable(trials, 44.0, 2) == trials
    with pytest.raises(OsdpError, match=r"12.0 s for 2 rounds"):
        affordable(trials, 11.9, 2)


def test_larger_sizes_of_a_group_need_its_smaller_ones() -> None:
    part = Line("all_gather", "native", 2, 1)
    trials = [trial(part, index, 0.5, False) for index in range(4)]
    assert affordable(trials, 2.0, 1) == []
    assert affordable(trials, 6.0, 1) == trials[:3]


# --- times, rings and links ------------------------------------------------------------------


def test_medians_are_fitted() -> None:
    (times,) = collective_times(timings("all_gather", 4, 1, line_s(1e-4, 1e9), repetitions=(1.0, 9.0, 0.5)))
    assert times.points == tuple((float(size), pytest.approx(1e-4 + size / 1e9)) for size in SIZES)
    assert times.residual < 1e-9
    assert times.time_s(2e6) == pytest.approx(1e-4 + 2e-3)
    reduces = collective_times(timings("all_reduce", 4, 1, line_s(1e-4, 1e9)))
    assert middle_size_bytes((times, *reduces), 4) == SIZES[2]


def test_what_cannot_be_fitted_is_refused_by_name() -> None:
    said = "ring reduce_scatter over 2 ranks that are 2 apart: timings must be positive and finite"
    with pytest.raises(OsdpError, match=said):
        collective_times(timings("reduce_scatter", 2, 2, lambda _: 0.0, "ring"))


@pytest.mark.parametrize(
    ("factors", "from_bytes"),
    [
        ((0.5, 0.5, 0.5, 0.5), SIZES[0]),
        ((2.0, 0.5, 0.5, 0.5), SIZES[1]),
        ((0.5, 2.0, 0.5, 0.94), SIZES[2]),
        ((0.5, 0.5, 0.5, 0.96), None),
        ((0.5, 0.5, 0.97, 0.5), SIZES[3]),
        ((2.0, 2.0, 2.0, 2.0), None),
    ],
)
def test_a_ring_is_taken_from_where_it_is_faster_for_good(factors: Sequence[float], from_bytes: int | None) -> None:
    native_s = line_s(1e-3, 1e9)
    ring = timings("reduce_scatter", 4, 1, lambda size: native_s(size) * factors[SIZES.index(size)], "ring")
    given = timings("reduce_scatter", 4, 1, native_s) + ring
    expected = () if from_bytes is None else (RingRule(4, 1, from_bytes),)
    assert ring_rules(collective_times(given)) == expected


def test_links_are_what_the_planner_reads_back() -> None:
    """The all-gathers that were measured, and another group, by the planner's own formula."""

    def cluster(intra: Link, inter: Link | None, nodes: int) -> Cluster:
        some = Figure(1.0, "assumed: for a test")
        device = Device("a", "cpu", some, some, {"fp32": some}, some, some, {})
        return Cluster(Cluster.SCHEMA, "c", "", nodes, 4, device, intra, inter, False, "assumed: for a test")

    def link(latency_s: float, bytes_per_s: float) -> Link:
        return Link(Figure(latency_s, "assumed: for a test"), Figure(bytes_per_s, "assumed: for a test"))

    true = cluster(link(5e-6, 2e10), link(3e-5, 1e9), 3)

    def gather_s(group: tuple[int, int], size: int) -> float:
        return collective_s("all_gather", size, true, *group)

    times = collective_times(
        [one for group in ((4, 1), (3, 4)) for one in timings("all_gather", *group, partial(gather_s, group))]
    )
    intra, inter = derived_links(times, 3, 4)
    found = cluster(intra, inter, 3)
    for ranks, stride in [(4, 1), (3, 4), (12, 1), (2, 1)]:
        for size in (1e4, 1e7):
            expected = collective_s("all_gather", size, true, ranks, stride)
            assert collective_s("all_gather", size, found, ranks, stride) == pytest.approx(expected, rel=1e-6)
    assert intra.latency_s.source.startswith("derived: the line of all_gather over 4 ranks")


def test_links_of_lone_nodes_and_lone_ranks() -> None:
    times = collective_times(timings("all_gather", 4, 1, line_s(3e-4, 1e9)))
    intra, inter = derived_links(times, 1, 4)
    assert inter is None
    assert (intra.latency_s.value, intra.bytes_per_s.value) == (pytest.approx(1e-4), pytest.approx(0.75e9))
    same, inter = derived_links(times, 4, 1)
    assert inter is not None
    assert same.latency_s.value == inter.latency_s.value == pytest.approx(1e-4)
    assert same.latency_s.source.startswith("assumed: as between nodes")
    with pytest.raises(OsdpError, match="one rank alone"):
        derived_links((), 1, 1)
    with pytest.raises(OsdpError, match="all_gather over 4 ranks was not measured"):
        derived_links((), 1, 4)


def test_a_link_on_which_size_does_not_matter_has_the_rate_that_was_seen() -> None:
    intra, _ = derived_links(collective_times(timings("all_gather", 2, 1, lambda _: 1e-3)), 1, 2)
    assert intra.bytes_per_s.value == pytest.approx(0.5 * SIZES[-1] / 1e-3)


# --- contradictions --------------------------------------------------------------------------


def test_timings_that_fit_together_need_no_words() -> None:
    assert (
        notes(
            2,
            timings("all_gather", 4, 1, line_s(3e-4, 0.6e9)),
            timings("all_gather", 2, 1, line_s(1e-4, 1e10)),
            timings("all_gather", 2, 2, line_s(2e-4, 1e9)),
            timings("reduce_scatter", 4, 1, line_s(3e-4, 0.6e9)),
            timings("all_reduce", 4, 1, line_s(6e-4, 0.3e9)),
        )
        == ()
    )


def node_and_network(inside_s: TimeS, across_s: TimeS, repetitions: Sequence[float] = (1.0,)) -> list[list[Timings]]:
    """All-gathers over the two ranks of a node, and over one rank of each of two nodes."""
    return [
        timings("all_gather", 2, stride, time_s, repetitions=repetitions)
        for stride, time_s in ((1, inside_s), (2, across_s))
    ]


def test_one_odd_size_is_chance() -> None:
    """One of four sizes is less than a third; two are not."""
    slow_s = {1: lambda size: 5e-3 if size == SIZES[1] else 1e-3, 2: lambda size: 5e-3 if size < SIZES[2] else 1e-3}
    for odd, expected in ((1, 0), (2, 1)):
        given = list(chain(*node_and_network(slow_s[odd], lambda _: 1e-3)))
        assert ["at 2 of 4 sizes, although" in note for note in contradictions((), given, 2)] == [True] * expected


def test_a_difference_within_the_repetitions_is_none() -> None:
    wide = (0.7, 0.8, 1.0, 1.2, 1.3)
    found = notes(2, *node_and_network(line_s(1.2e-3, 1e9), line_s(1e-3, 1e9), wide))
    assert not any("although" in note for note in found)


def test_a_node_slower_than_the_network() -> None:
    (note,) = notes(2, *node_and_network(line_s(1e-3, 1e9), line_s(1e-4, 1e9)))
    assert note == (
        "all_gather over 2 ranks is slower than all_gather over 2 ranks that are 2 apart at 4 of 4 sizes, "
        "although these ranks share a node and the others do not; most at 4 KiB: 1 ms against 0.104 ms"
    )
    assert notes(2, *node_and_network(line_s(1e-4, 1e9), line_s(1e-3, 1e9))) == ()
    # Eight ranks in a node may take 7 times as long as two nodes: they pass on 7 times.
    inside, across = timings("all_gather", 8, 1, line_s(7e-4, 1e9)), timings("all_gather", 2, 8, line_s(1e-4, 1.5e9))
    assert notes(8, inside, across) == ()


def test_bad_fits_and_disagreeing_repetitions() -> None:
    jagged = {SIZES[0]: 1e-3, SIZES[1]: 1e-4, SIZES[2]: 2e-3, SIZES[3]: 5e-4}
    (note,) = notes(2, timings("all_gather", 2, 1, jagged.__getitem__), timings("reduce", 2, 1, line_s(1e-4, 1e9)))
    assert note.startswith("the times of 1 of 2 collectives do not lie on a curve; worst all_gather over 2 ranks, bad")
    (note,) = notes(2, timings("all_gather", 2, 1, line_s(1e-3, 1e9), repetitions=(1.0, 0.8, 1.2, 0.6, 1.4)))
    # Quartiles 0.8 and 1.2 of the median.
    assert note.startswith("repetitions disagree at 4 of 4 points; worst all_gather over 2 ranks at ")
    assert "the middle half spreads over 40% of the median" in note


def test_overlap_is_told_from_the_sum() -> None:
    assert Overlap(1.0, 1.0, 1.69, 1.2, on_streams=True).overlaps
    assert not Overlap(1.0, 1.0, 1.71, 1.2, on_streams=True).overlaps
    on_cpu = Overlap(1.0, 1.0, 1.1, 1.0, on_streams=False)
    assert on_cpu.asynchronous
    assert not on_cpu.overlaps
