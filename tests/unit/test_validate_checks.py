"""Checks of `scripts/validate_gpu.py` on plans: what they choose to run, and that figures out of bounds fail."""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from validation import allocator, memory, ranks, within_a_limit  # noqa: E402
from validation.bounds import judged, outside  # noqa: E402
from validation.check import Finding, Place, skipped  # noqa: E402
from validation.profile_and_step import said_of  # noqa: E402
from validation.several_gpus import judged_pulls, throughputs  # noqa: E402
from validation.steps import covered  # noqa: E402
from validation.within_a_limit import found_in  # noqa: E402

from osdp.zoo import load_cluster  # noqa: E402
from planner.strategies.registry import known_strategies  # noqa: E402
from planner.strategies.spec import SPECS  # noqa: E402
from profiler.byte_sizes import MIB  # noqa: E402
from profiler.cluster.cluster import Launch  # noqa: E402
from profiler.cluster.figure import Figure  # noqa: E402
from profiler.model_graph import Recompute  # noqa: E402

DRY = Place("cpu", False, Path("unused"))
HELD = memory.Held(1000, 1000, 1500, 1500, 0, 2000, 0)
CASE = memory.Case((1, 8), "shard", Recompute.NOTHING, "fp32")
PULLED = {
    "is_right": True,
    "shard_bytes": 1 << 28,
    "copy_s": 0.8,
    "own_copy_s": 0.1,
    "pull_s": 1.0,
    "gemm_s": 1.0,
    "gemm_beside_pulls_s": 1.05,
}
TRAINED = """plan       planned in 1.0 s; operators: replicate+offload 3; 0 blocks recomputed
step 1/2  loss 5.1       lr 1.00e-03  2 samples/s  2 tokens/s
step 2/2  loss 4.9       lr 1.00e-03  2 samples/s  2 tokens/s
done: 2 steps in this run
device memory utilization: 90.00 MB / 100 MB (measured: of torch, allocator reserved 99.50 MB; predicted 9.00 MB)
overall system throughput: 8.0 seq/sec (measured: median of 2 steps of 1 s; 2 tokens/s; predicted 10.0 seq/sec on x)
"""


# --- the allocator and windows


@pytest.mark.parametrize(
    ("filled", "left", "passed"),
    [
        (Finding(True, "a"), Finding(True, "b"), True),
        (Finding(True, "a"), Finding(False, "b"), False),
        (Finding(False, "a"), Finding(True, "b"), False),
        (Finding(True, "a"), skipped("no CuPy"), True),
    ],
)
def test_windows_that_leave_memory_fail_the_check_of_the_allocator(
    filled: Finding, left: Finding, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without CuPy there are none."""
    monkeypatch.setattr(allocator, "fill", lambda place: filled)
    monkeypatch.setattr(allocator, "left_behind", lambda place: left)
    found = allocator.check(Place("cuda", False, Path("unused")))
    assert (found.passed, found.told) == (passed, f"a; closed windows: {left.told}")


# --- bounds


@pytest.mark.parametrize("value", [0.9, 1.2, math.nan, math.inf])
def test_a_value_out_of_bounds_is_named(value: float) -> None:
    (complaint,) = outside("speed", value, 1.0, 1.1)
    assert "speed" in complaint
    found = judged("told", [complaint], {"speed": value})
    assert found.passed is False
    assert complaint in found.told


def test_a_value_within_bounds_passes() -> None:
    assert outside("speed", 1.0, 1.0, 1.1) == outside("speed", 1.1, 1.0, 1.1) == []
    assert judged("told", [], {}).passed is True


# --- memory


@pytest.mark.parametrize("is_long", [False, True])
def test_cases_have_every_strategy_of_the_registry(is_long: bool) -> None:
    cases = memory.cases(is_long)
    known = {str(one) for grid in memory.GRIDS for one in known_strategies(memory.cluster_of(grid))}
    assert {case.strategy for case in cases} == known
    assert {case.strategy.partition(":")[0].partition("+")[0] for case in cases} == set(SPECS)
    assert {case.grid for case in cases} == set(memory.GRIDS)
    assert len({(case.recompute, case.precision) for case in cases}) == 6
    assert len(cases) == len(set(cases))
    if not is_long:
        assert len(cases) == len(known)


@pytest.mark.parametrize(
    "changed", [{"allocated_bytes": 1012}, {"allocated_bytes": 960}, {"reserved_bytes": 1501 + 18 * MIB}]
)
def test_memory_out_of_bounds_fails(changed: dict[str, int]) -> None:
    assert HELD.complaints(CASE) == []
    assert len(replace(HELD, **changed).complaints(CASE)) == 1


def test_an_allocation_retry_fails_where_none_is_predicted() -> None:
    (complaint,) = replace(HELD, retries_without=0.5).complaints(CASE)
    assert "shard" in complaint
    assert "retries" in complaint


@pytest.mark.parametrize(("retries", "passes"), [((2, 4), True), ((2.5, 4), False)])
def test_plans_that_fill_their_limits_have_as_many_retries_as_the_planner_counts(
    retries: tuple[float, float], passes: bool
) -> None:
    bf16 = replace(CASE, precision="bf16")
    found = dict(zip((CASE, bf16), (replace(HELD, retries=one) for one in retries), strict=True))
    judged_so = memory.summary([CASE, bf16], found, [])
    assert judged_so.passed is passes
    assert f"{sum(retries) / 2:.1f} retries of a step" in judged_so.told


def test_a_case_that_raises_keeps_no_other_from_being_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cases", lambda is_long: [CASE, replace(CASE, precision="bf16")])
    monkeypatch.setattr(memory, "opened", lambda case, source: case)

    def held(case: memory.Case, *_: Any) -> memory.Held:
        if case is CASE or case.precision == "fp32":
            raise RuntimeError("no memory\nand more")
        return HELD

    monkeypatch.setattr(memory, "held", held)
    found = memory.check(DRY)
    assert found.passed is False
    assert "1 of 2 cases ran" in found.told
    assert "RuntimeError: no memory" in found.told


def test_all_cases_that_do_not_offload_must_run() -> None:
    wanted = [replace(CASE, strategy=name) for name in ("shard", "owner", "shard+offload", "owner+offload")]
    for run, passes in ((wanted[:2], True), (wanted, True), (wanted[1:], False), ([], False)):
        found = memory.summary(wanted, dict.fromkeys(run, HELD), [])
        assert found.passed is passes
        assert f"{len(run)} of 4 cases ran" in found.told


def test_an_allocator_that_refuses_too_early_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocator.fill(DRY).passed is True
    monkeypatch.setattr(allocator, "_until_refused", lambda model: 0.97 * allocator.LIMIT_BYTES)
    assert allocator.fill(DRY).passed is False


# --- steps


def test_a_plan_out_of_memory_leaves_the_figures_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_s = iter([None, 1.0])

    def timed(*_: Any) -> float:
        if (step_s := next(steps_s)) is None:
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        return step_s

    measured = replace(
        load_cluster("h100-8"), launch=Launch(*[Figure(1e-6, "assumed: of a test")] * len(fields(Launch)))
    )
    monkeypatch.setattr(within_a_limit, "median_step_s", timed)
    monkeypatch.setattr(within_a_limit, "of_this_device", lambda *_: measured)
    found = within_a_limit.of_eight(DRY)
    assert found.passed is False
    assert "by default: CUDA out of memory" in found.told
    assert "and more" not in found.told
    assert found.figures["with the least headroom"]["step_s"] == 1.0


def test_training_that_is_as_it_should_be_passes() -> None:
    found = found_in(TRAINED, steps=2)
    assert found.passed is True
    assert (found.figures["losses"], found.figures["peak_bytes"]) == ([5.1, 4.9], 99.5 * MIB)


@pytest.mark.parametrize(
    ("before", "after"),
    [("loss 4.9", "loss nan"), ("reserved 99.50", "reserved 100.50"), ("step 2/2", "step"), ("memory", "time")],
)
def test_training_out_of_bounds_fails(before: str, after: str) -> None:
    assert found_in(TRAINED.replace(before, after), steps=2).passed is False


@pytest.mark.parametrize(
    ("operators", "passes"), [("replicate+offload 140", True), ("replicate 140", False), ("", False)]
)
def test_training_that_must_offload_says_so(operators: str, passes: bool) -> None:
    output = TRAINED.replace("replicate+offload 3", operators)
    assert found_in(output, steps=2, offloads=True).passed is passes


def test_throughputs_are_read() -> None:
    assert throughputs(TRAINED) == (8.0, 10.0)
    assert all(map(math.isnan, throughputs("")))


def test_time_that_is_covered_twice_counts_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0


def test_a_gpu_that_waits_is_told() -> None:
    assert "host-bound" in said_of(0.89)
    assert "host-bound" not in said_of(0.91)
    assert said_of(None) == ""


# --- several ranks


def test_a_plan_is_verified_beside_training_once_a_context_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, order = threading.Event(), list[str]()

    def steps(place: Place, number: int, strategies: tuple[str, ...], figures: dict[str, Any]) -> list[str]:
        time.sleep(0.3)
        order.append("measured")
        (place.scratch / "first-steps.json").write_text("{}")
        assert may_end.wait(30.0)
        order.append("trained")
        return ["of training"]

    def verified(place: Place, number: int, plans: dict[str, Path], figures: dict[str, Any]) -> list[str]:
        order.append("verified")
        may_end.set()
        return ["of a plan"]

    monkeypatch.setattr(ranks, "steps", steps)
    monkeypatch.setattr(ranks, "write_plans", lambda *_: {})
    monkeypatch.setattr(ranks, "verified", verified)
    found = ranks.one_rank(replace(DRY, scratch=tmp_path))
    assert order == ["measured", "verified", "trained"]
    assert not found.passed
    assert "of a plan" in found.told
    assert "of training" in found.told


def test_losses_that_differ_or_do_not_sink_are_named() -> None:
    good = [5.0, 4.0]
    assert ranks.unlike({"shard": good, "odc": [5.00001, 4.0]}) == []
    assert len(ranks.unlike({"shard": good, "odc": [5.01, 4.0]})) == 1
    assert len(ranks.unlike({"shard": [5.0, 5.0]})) == 1
    assert len(ranks.unlike({"shard": [math.nan, math.nan]})) == 1


@pytest.mark.parametrize("changed", [{"pull_s": 1.1}, {"gemm_beside_pulls_s": 1.11}, {"is_right": False}])
def test_pulls_out_of_bounds_fail(changed: dict[str, Any]) -> None:
    assert judged_pulls(PULLED, is_dry=False).passed is True
    assert judged_pulls(PULLED | changed, is_dry=False).passed is False
