"""Step time: by hand, and the closed form against the event simulator."""

from __future__ import annotations

import itertools
from dataclasses import MISSING, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import cluster

from planner.cost.simulator import simulate, simulated_s
from planner.cost.stage_option import Launches, Segment, StageCandidate, launched
from planner.cost.step_time import step_time
from planner.cost.workload import Workload

times = st.floats(0.0, 10.0)


def segment(
    forward: float,
    backward: float,
    a: float,
    b: float,
    r: float,
    ar: float = 0.0,
    before: float = 0.0,
    after: float = 0.0,
    copy: float = 0.0,
) -> Segment:
    return Segment(forward, backward, 0.0, 0.0, a, b, r, ar, before, after + copy, copy)


def option(segments: tuple[Segment, ...], optimizer_s: float = 0.0) -> StageCandidate:
    """A stage that holds nothing: its memory is not what is tested."""
    nothing = {field.name: 0 for field in fields(StageCandidate) if field.default is MISSING}
    told = {"strategies": (), "moments": (), "segments": segments, "optimizer_s": optimizer_s}
    return StageCandidate(**{**nothing, **told})


def load(overlaps: bool = True, accumulation: int = 1) -> Workload:
    return Workload(cluster(overlaps=overlaps), "adam", "fp32", 1, accumulation)


def test_two_segments_by_hand() -> None:
    one = segment(forward=4, backward=8, a=3, b=3, r=5)
    two = segment(forward=2, backward=6, a=7, b=1, r=9)
    # Forward: gather 3, then max(4, 7), then 2 and under it the backward's gather 1.  Backward: max(6, 3) of the upper
    # segment, then max(8, 9) with the reduction of the upper one, then the last reduction 5.
    elapsed = (3 + 7 + 2) + (6 + 9 + 5)
    time = step_time([option((one, two), optimizer_s=0.5)], load())
    assert time.total_s == pytest.approx(elapsed + 0.5)
    assert time.compute_s == pytest.approx(4 + 8 + 2 + 6)
    assert time.exposed_communication_s == pytest.approx(elapsed - 20)
    assert time.hidden_communication_s == pytest.approx((3 + 3 + 5 + 7 + 1 + 9) - (elapsed - 20))


def test_without_overlap_everything_adds_up() -> None:
    one = segment(4, 8, 3, 3, 5)
    two = segment(2, 6, 7, 1, 9)
    assert step_time([option((one, two))], load(overlaps=False)).total_s == pytest.approx(20 + 28)


def test_accumulation_reduces_across_groups_once() -> None:
    only = segment(forward=4, backward=8, a=0, b=0, r=1, ar=3)
    # Three micro-batches: (4 + 8 + 1) each, and the all-reduce after the last.
    assert step_time([option((only,))], load(accumulation=3)).total_s == pytest.approx(3 * 13 + 3)


def test_all_reduces_have_a_stream_of_their_own() -> None:
    one = segment(forward=4, backward=8, a=0, b=0, r=5, ar=3)
    two = segment(forward=2, backward=6, a=0, b=7, r=4, ar=10)
    # Forward: 4, then max(2, 7).  Backward: 6, then max(8, 4, 10), then 5 and 3.
    plan = [option((one, two))]
    assert step_time(plan, load()).total_s == pytest.approx(4 + 7 + 6 + 10 + 5 + 3)
    assert step_time(plan, load(accumulation=2)).total_s == pytest.approx(4 + 7 + 6 + 8 + 5 + 4 + 7 + 6 + 10 + 5 + 3)
    by_label = {(event.label, event.segment): event for event in simulate(plan, load())}
    assert by_label["all-reduce", 1].start_s == by_label["backward", 0].start_s


def test_gradients_are_copied_when_the_reduction_above_is_over() -> None:
    one = segment(forward=4, backward=3, a=0, b=0, r=5, copy=2)
    two = segment(forward=2, backward=6, a=0, b=0, r=9, copy=1)
    # Backward: 6 and 1, then 9 and 2 where backward is over after 3, and 5.
    assert step_time([option((one, two))], load()).total_s == pytest.approx(4 + 2 + 7 + 11 + 5)


def test_stalls_hide_communication_but_nothing_hides_them() -> None:
    one = segment(forward=4, backward=8, a=3, b=3, r=5)
    two = segment(forward=2, backward=6, a=0, b=0, r=0, before=7, after=9)
    # Forward: gather 3, 4, then 7 + 2.  Backward: 6 + 9 hide the gather of 3; 8, and the reduction of 5.
    time = step_time([option((one, two))], load())
    assert time.total_s == pytest.approx(3 + 4 + 9 + 15 + 8 + 5)
    assert time.compute_s == pytest.approx(20)
    assert time.exposed_communication_s == pytest.approx(3 + 7 + 9 + 5)
    assert time.hidden_communication_s == pytest.approx(3)


segments = st.builds(segment, *[times] * 9)


@given(st.lists(segments, min_size=1, max_size=8), st.booleans(), st.integers(1, 3))
def test_simulator_and_closed_form_agree(parts: list[Segment], overlaps: bool, accumulation: int) -> None:
    plan = [option((part,)) for part in parts]
    work = load(overlaps, accumulation)
    assert simulated_s(plan, work) == pytest.approx(step_time(plan, work).total_s, rel=1e-9, abs=1e-9)


def launched_segment(forward: float, backward: float, forward_launch: float, backward_launch: float) -> Segment:
    """A segment that communicates nothing."""
    launches = Launches(forward, backward, forward_launch, backward_launch)
    forward_s, backward_s, wait_s = launched(*launches)
    return Segment(forward_s, backward_s, 0.0, wait_s, launches=launches)


def test_a_host_that_is_ahead_is_not_waited_for() -> None:
    blocks, output = launched_segment(1, 2, 4, 6), launched_segment(20, 30, 1, 1)
    # Forward: the host launches until 4 and 8, and the device is done with it; the output layer's until 28, when the
    # host is at 9.  Backward: 58; the blocks' until 60, the host at 16, and until 62, the host at 22.
    plan = [option((blocks, blocks, output))]
    assert simulated_s(plan, load(), host_gets_ahead=True) == pytest.approx(62)
    # Layer by layer: 4 + 4 + 20, and 30 + 6 + 6.
    assert step_time(plan, load()).total_s == pytest.approx(70)
    assert simulated_s(plan, load()) == pytest.approx(70)
    assert [event.end_s for event in simulate(plan, load()) if event.label == "backward"] == [58, 64, 70]


@given(st.lists(st.builds(launched_segment, *[times] * 4), min_size=1, max_size=8), st.integers(1, 3))
def test_the_device_ends_when_the_longest_path_does(parts: list[Segment], accumulation: int) -> None:
    """All that is launched up to one task, and all that is computed from the next on, whichever task that is."""
    order = [(one.launches.forward_launch_s, one.launches.forward_computing_s) for one in parts]  # type: ignore[union-attr]
    order += [(one.launches.backward_launch_s, one.launches.backward_computing_s) for one in reversed(parts)]  # type: ignore[union-attr]
    paths = [sum(host for host, _ in order[:at]) + sum(own for _, own in order[at:]) for at in range(len(order) + 1)]
    plan, work = [option((part,)) for part in parts], load(accumulation=accumulation)
    simulated = simulated_s(plan, work, host_gets_ahead=True)
    assert simulated == pytest.approx(accumulation * max(paths), abs=1e-9)
    time = step_time(plan, work)
    assert time.total_s - time.launch_wait_s - 1e-9 <= simulated <= time.total_s + 1e-9


hosted = st.builds(
    lambda one, host: replace(
        one,
        forward_s=max(one.forward_s, host[0]),
        backward_s=max(one.backward_s, host[1]),
        launches=Launches(one.forward_s, one.backward_s, *host),
    ),
    segments,
    st.tuples(times, times),
)


@given(st.lists(hosted, min_size=1, max_size=8), st.booleans(), st.integers(1, 3))
def test_a_simulated_step_is_never_above_the_closed_form(
    parts: list[Segment], overlaps: bool, accumulation: int
) -> None:
    plan, work = [option((part,)) for part in parts], load(overlaps, accumulation)
    simulated = simulated_s(plan, work, host_gets_ahead=True)
    assert simulated <= step_time(plan, work).total_s * (1 + 1e-9) + 1e-9
    without = [
        option((replace(p, launches=None, forward_s=p.forward_computing_s, backward_s=p.backward_computing_s),))
        for p in parts
    ]
    assert simulated >= simulated_s(without, work) * (1 - 1e-9) - 1e-9


@given(st.lists(segments, min_size=1, max_size=8), st.booleans())
def test_streams_never_run_two_tasks_at_once(parts: list[Segment], overlaps: bool) -> None:
    events = simulate([option((part,)) for part in parts], load(overlaps))
    streams = {event.stream if overlaps else "one" for event in events}
    for stream in streams:
        mine = sorted((e.start_s, e.end_s) for e in events if stream in (e.stream, "one"))
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(mine))


@settings(max_examples=50)
@given(st.lists(segments, min_size=1, max_size=6), st.floats(0.1, 1.0))
def test_faster_communication_is_never_slower(parts: list[Segment], factor: float) -> None:
    def scaled(part: Segment) -> Segment:
        gathers = part.forward_gather_s * factor, part.backward_gather_s * factor
        stalls = part.forward_stall_s * factor, part.backward_stall_s * factor
        reductions = part.reduce_s * factor, part.step_reduce_s * factor
        return segment(part.forward_s, part.backward_s, *gathers, *reductions, *stalls)

    slow = step_time([option((part,)) for part in parts], load()).total_s
    fast = step_time([option((scaled(part),)) for part in parts], load()).total_s
    assert fast <= slow * (1 + 1e-12)
