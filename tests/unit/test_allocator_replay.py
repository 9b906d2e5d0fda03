"""Allocations of a dry run, replayed through the model of CUDA's caching allocator, against the tracker."""

from __future__ import annotations

import pytest
from rehearsals import Case, graph_of, source
from synthetic import cluster

from profiler.byte_sizes import MIB, allocated_bytes
from profiler.trace.data_dependent import DataDependent
from profiler.trace.metered_pass import find_loss
from profiler.trace.python_values import answering
from runtime.compile_plan import compile_plan
from runtime.observe.allocation_trace import AllocationTrace, Resize
from runtime.observe.allocator_replay import least_limit_bytes, limit_without_retries_bytes, replay
from runtime.observe.dry_run import DryRun, Script, dry_run

NO_LIMIT = 1 << 50


@pytest.fixture(scope="module")
def found() -> DryRun:
    """A plan with gathers and reduce-scatters in every layer, half of it recomputed."""
    case = Case("shard", recompute=2, precision="bf16", micro_batch=8)
    model = source(case.family, case.vocabulary, case.length)
    named = model.build, model.example_inputs, lambda out: find_loss(out)[0]
    script = Script(*named, case.optimizer, case.micro_batch, *[lambda: answering(DataDependent(1.0))] * 2)
    graph = graph_of(case.family, case.vocabulary, case.length, case.precision)
    return dry_run(script, compile_plan(case.plan(), graph, cluster(*case.shape)), 0)


def test_what_is_allocated_is_what_the_tracker_saw(found: DryRun) -> None:
    """To the byte with expandable segments; by default blocks of which less than 1 MiB is left are not split."""
    expandable, default = (replay(found.trace, NO_LIMIT, expandable=how) for how in (True, False))
    assert expandable.allocated_bytes == found.peak.total_bytes <= default.allocated_bytes
    for replayed in (expandable, default):
        assert replayed.allocated_bytes <= replayed.reserved_bytes
        assert (replayed.retries, replayed.failed) == (0, "")
    workspaces = (3 * MIB, 3 * MIB)
    beside = replay(found.trace, NO_LIMIT, expandable=True, workspaces_bytes=workspaces)
    assert beside.allocated_bytes == expandable.allocated_bytes + sum(workspaces)


def test_a_step_leaves_what_it_found_and_uses_the_streams_of_fsdp2(found: DryRun) -> None:
    trace = found.trace
    assert trace.is_steady
    assert sum(event.size_bytes for event in trace.resident) < found.rest_bytes, "the first step makes Adam's states"
    gathered, reduced = (
        {event.size_bytes for event in trace.steps[1] if event.stream == stream and event.size_bytes}
        for stream in (1, 2)
    )
    # Of a layer all 8 ranks' shards in bf16: 12 x 256 x 256 weights, 13 x 256 of norms and biases; in fp32 one shard.
    layer = 12 * 256 * 256 + 13 * 256
    assert (2 * layer in gathered, allocated_bytes(4 * layer // 8) in reduced) == (True, True)


def test_the_least_limit_is_one_and_the_next_smaller_is_none(found: DryRun) -> None:
    for expandable in (True, False):
        limit = least_limit_bytes(found.trace, expandable=expandable)
        within, free = (replay(found.trace, size, expandable=expandable) for size in (limit, NO_LIMIT))
        assert within.runs
        assert free.allocated_bytes <= within.reserved_bytes <= limit <= free.reserved_bytes
        less = max(2 * MIB, (free.reserved_bytes - free.allocated_bytes) // 60)
        assert limit - less < free.allocated_bytes or replay(found.trace, limit - less, expandable=expandable).failed


def test_cached_memory_is_given_back_below_a_limit_and_not_from_it_on(found: DryRun) -> None:
    for expandable in (True, False):
        limit = limit_without_retries_bytes(found.trace, expandable=expandable)
        assert replay(found.trace, limit, expandable=expandable).retries == 0
        assert limit >= replay(found.trace, NO_LIMIT, expandable=expandable).reserved_bytes
    # 30 MiB of one stream are cached when another asks for 12, which with a segment of its own is at 42.
    step = steps((1, 30, 0), (1, 0, 0), (2, 12, 1), (2, 0, 1))
    trace = AllocationTrace((), (step, step), is_steady=True)
    assert limit_without_retries_bytes(trace, expandable=False) == 42 * MIB
    assert [replay(trace, size * MIB, expandable=False).retries for size in (42, 40)] == [0, 2]


def steps(*events: tuple[int, int, int]) -> tuple[Resize, ...]:
    return tuple(Resize(storage, size * MIB, stream, "forward") for storage, size, stream in events)


def test_steps_follow_each_other() -> None:
    """The first makes 12 MiB that stay, in the block of 30 that the second needs: it has to reserve 30 more."""
    first, second = steps((1, 30, 0), (1, 0, 0), (2, 12, 0)), steps((3, 30, 0), (3, 0, 0))
    found = replay(AllocationTrace((), (first, second), is_steady=True), NO_LIMIT, expandable=False)
    assert (found.allocated_bytes, found.reserved_bytes) == (42 * MIB, 60 * MIB)
    within = replay(AllocationTrace((), (first, second), is_steady=True), 59 * MIB, expandable=False)
    assert within.failed == "forward"
    # Steps that leave more than they found are not repeated.
    leak = steps((1, 30, 0)), steps((3, 12, 0))
    assert replay(AllocationTrace((), leak, is_steady=False), NO_LIMIT, expandable=False).allocated_bytes == 42 * MIB


def test_a_resized_storage_has_both_for_a_moment() -> None:
    trace = AllocationTrace(steps((1, 10, 0)), (steps(), steps((1, 12, 0))), is_steady=True)
    assert replay(trace, NO_LIMIT, expandable=True).allocated_bytes == 24 * MIB  # repeated: 12 to 12


def test_a_workspace_is_made_amid_the_first_step() -> None:
    """Of 32 MiB, in pages of 20: before all else 60 MiB follow it, to 92; behind 30 that are freed they end at 122."""
    step = steps((1, 30, 0), (1, 0, 0), (2, 60, 0), (2, 0, 0))
    before, amid = (AllocationTrace((), (step, step), is_steady=True, products=at) for at in ((), (1,)))
    assert reserved_with(before, 32 * MIB, NO_LIMIT) == 100 * MIB
    assert reserved_with(amid, 32 * MIB, NO_LIMIT) == 140 * MIB
    # Of the 30, the first page is free as a whole, and can be given back; the next is not.
    assert (reserved_with(before, 32 * MIB, 100 * MIB), reserved_with(amid, 32 * MIB, 120 * MIB)) == (
        100 * MIB,
        120 * MIB,
    )
    assert replay(amid, 100 * MIB, expandable=True, workspaces_bytes=(32 * MIB,)).failed == "forward"


def reserved_with(trace: AllocationTrace, workspace_bytes: int, limit_bytes: int) -> int:
    """Return what steps reserve that run."""
    found = replay(trace, limit_bytes, expandable=True, workspaces_bytes=(workspace_bytes,))
    assert found.runs
    return found.reserved_bytes


def test_the_first_products_of_forward_and_backward_are_noted(found: DryRun) -> None:
    forward, backward = found.trace.products
    first = found.trace.steps[0]
    assert (first[forward - 1].phase, first[backward - 1].phase) == ("forward", "backward")
    assert (first[forward - 1].size_bytes > 0, first[backward - 1].size_bytes > 0) == (True, True), "their outputs"
