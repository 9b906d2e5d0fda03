"""More headroom, where what the allocator gives back would make a step longer than what a plan loses by it."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from synthetic import cluster, transformer
from thoroughness import THOROUGH

from osdp.cli.reports.plan import Circumstances, print_plan
from osdp.cli.reports.plan_json import plan_object
from osdp.planning import request as planning
from osdp.planning.allocator_headroom import RETRY_S, ROOMY, TIGHT, default_headroom, roomier_headroom
from osdp.planning.clusters import load_cluster
from osdp.planning.memory_options import Headroom
from osdp.planning.request import BEST, SIMPLE, Planned, Request, part_of, plan_graph
from osdp.report.contents import plan_contents
from osdp.report.model_strip import PricesWanted
from planner.search import infeasible
from planner.search.search import Effort
from profiler.byte_sizes import MIB
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph

MACHINE = cluster(1, 4)


@cache
def graph(hidden: int = 512) -> ModelGraph:
    return transformer(2, hidden)


def planned(headroom: Headroom, roomier: Headroom | None = None, limit_bytes: int = 700 * MIB, **how: Any) -> Planned:
    return plan_graph(graph(), MACHINE, Request(limit_bytes, headroom=headroom, roomier=roomier, **how))


planned_once = cache(planned)


def report(found: Planned) -> str:
    """Return what is printed, in one line."""
    target = Console(file=StringIO(), width=200)
    print_plan(target, found, Circumstances(1.0))
    text = target.file
    assert isinstance(text, StringIO)
    return " ".join(text.getvalue().split())


def samples_per_s(found: Planned, retries: float) -> float:
    """Return what is compared, from the written plan."""
    plan = found.plan
    samples = MACHINE.world_size * plan.micro_batch * plan.accumulation
    return samples / (plan.predicted.step_time_s + retries * RETRY_S)


def test_what_is_left_free_is_what_a_cuda_allocator_needs() -> None:
    gpus, cpus = load_cluster("h100-8"), load_cluster("cpu-gloo")
    assert (default_headroom(gpus), roomier_headroom(gpus)) == (Headroom(share=0.015), Headroom(share=0.15))
    assert (default_headroom(cpus), roomier_headroom(cpus)) == (Headroom(), None)


@pytest.mark.parametrize("limit_mib", [700, 40_000, *([400, 500, 600, 900, 1300] if THOROUGH else [])])
def test_the_plan_is_the_faster_one_of_two_when_retries_are_counted(limit_mib: int) -> None:
    """Of those with more headroom and those with less one, unless thorough."""
    limit_bytes = limit_mib * MIB
    tight, roomy = (planned_once(one.headroom, None, limit_bytes) for one in (TIGHT, ROOMY))
    taken = planned_once(TIGHT.headroom, ROOMY.headroom, limit_bytes)
    fits = tight.plan.predicted.peak_memory_bytes <= roomy.plan.usable_bytes
    is_long = 0.02 * tight.plan.predicted.step_time_s > 3.1 * 0.010
    loses = samples_per_s(roomy, 0.7) <= samples_per_s(tight, 3.1)
    expected = tight if fits or is_long or loses else roomy
    assert (taken.plan.choices, taken.plan.predicted) == (expected.plan.choices, expected.plan.predicted)
    assert taken.plan.headroom_bytes == expected.plan.headroom_bytes
    assert taken.request.headroom_bytes == taken.plan.headroom_bytes
    assert (taken.tighter is not None) == (expected is roomy)


def test_both_are_taken_somewhere() -> None:
    """So that the test above compares something."""
    found = [planned_once(TIGHT.headroom, ROOMY.headroom, limit * MIB).tighter for limit in (700, 40_000)]
    assert [one is not None for one in found] == [True, False]


def test_a_long_step_is_not_searched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    monkeypatch.setattr(planning, "find_plan", lambda *args: searches.append(args) or planning_find(*args))
    slow = replace(MACHINE, device=replace(MACHINE.device, matmul_efficiency=slowed(MACHINE.device.matmul_efficiency)))
    request = Request(700 * MIB, headroom=TIGHT.headroom, roomier=ROOMY.headroom)
    assert plan_graph(graph(), slow, request).plan.predicted.step_time_s > 1.5
    assert len(searches) == 1
    plan_graph(graph(), MACHINE, request)
    assert len(searches) == 3


planning_find = planning.find_plan


def slowed(figure: Any) -> Any:
    return replace(figure, value=figure.value / 2000)


@cache
def least_mib() -> int:
    """Return the smallest limit within which a plan is found, to 5 MiB."""
    with pytest.raises(planning.NothingFits) as refused:
        planned(TIGHT.headroom, limit_bytes=MIB, effort=Effort(remedies=False))
    return -(-refused.value.refusal.advised_bytes // (5 * MIB)) * 5


def test_what_does_not_fit_with_more_headroom_is_planned_with_less() -> None:
    taken = planned(TIGHT.headroom, ROOMY.headroom, least_mib() * MIB)
    assert taken.plan.headroom_bytes == TIGHT.headroom.of(least_mib() * MIB)
    assert taken.tighter is None


@pytest.mark.parametrize("style", [SIMPLE, BEST, ""])
def test_a_plan_that_was_found_is_given_whatever_more_headroom_finds(style: str) -> None:
    """Near the smallest limit no plan, and further on no simple plan, fits with more headroom."""
    for limit_mib in range(least_mib(), least_mib() + 60, 20):
        how: dict[str, Any] = {"style": style, "effort": Effort(remedies=False)}
        try:
            assert planned(TIGHT.headroom, ROOMY.headroom, limit_mib * MIB, **how).plan.limit_bytes == limit_mib * MIB
        except OsdpError:
            with pytest.raises(OsdpError):  # not with more headroom alone
                planned(TIGHT.headroom, limit_bytes=limit_mib * MIB, **how)


def test_what_would_help_is_not_looked_for_where_a_plan_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = infeasible._changes
    monkeypatch.setattr(infeasible, "_changes", lambda *args: asked.append(True) or real(*args))
    planned(TIGHT.headroom, ROOMY.headroom, least_mib() * MIB)
    assert asked == []
    with pytest.raises(planning.NothingFits):
        planned(TIGHT.headroom, ROOMY.headroom, least_mib() // 2 * MIB)
    assert asked


def test_both_searches_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_plan", lambda *args: time.sleep(0.2) or planning_find(*args))
    taken = planned(TIGHT.headroom, ROOMY.headroom)
    assert taken.tighter is not None
    assert taken.search_s >= taken.tighter.search_s + 0.2 >= 0.4
    assert planned(TIGHT.headroom, ROOMY.headroom, 40_000 * MIB).search_s >= 0.2


def test_a_time_budget_is_of_both_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(
        planning, "find_plan", lambda task, wish, *args: given.append(wish.effort) or planning_find(task, wish, *args)
    )
    effort = Effort(seconds=60.0)
    assert planned(TIGHT.headroom, ROOMY.headroom, effort=effort).request.effort == effort, "as it was asked"
    first, second = given
    assert first.seconds == 60.0
    assert 0 < second.seconds < 60.0
    planned(TIGHT.headroom, ROOMY.headroom, effort=Effort(seconds=1e-6))
    assert len(given) == 3


def test_progress_goes_on_from_one_search_to_the_next() -> None:
    told: list[float] = []
    plan_graph(
        graph(),
        MACHINE,
        Request(700 * MIB, headroom=TIGHT.headroom, roomier=ROOMY.headroom),
        lambda what, fraction: told.append(fraction),
    )
    assert told == sorted(told)
    assert told[-1] == 1.0
    told.clear()
    roomy = Request(40_000 * MIB, headroom=TIGHT.headroom, roomier=ROOMY.headroom)
    plan_graph(graph(), MACHINE, roomy, lambda what, fraction: told.append(fraction))
    assert told == sorted(told)
    assert told[-1] == 1.0, "one search was enough"
    part_of(lambda what, fraction: told.append(fraction), 0.5, 1.0)("half of the second half", 0.5)
    assert told[-1] == 0.75


def test_the_report_says_why_there_is_more_headroom() -> None:
    taken = planned_once(TIGHT.headroom, ROOMY.headroom, 700 * MIB)
    tight = planned_once(TIGHT.headroom, None, 700 * MIB)
    text = report(taken)
    assert "headroom 105.0 MiB, because with 10.5 MiB" in text
    assert f"{samples_per_s(taken, 0.7):.4g} samples/s against {samples_per_s(tight, 3.1):.4g}" in text
    assert "because with" not in report(tight)
    told = plan_object(taken, 1.0)["tighter"]
    assert told["samples_per_s"] == tight.plan.predicted.samples_per_s
    assert told["samples_with_retries_per_s"] == pytest.approx(samples_per_s(tight, 3.1))
    assert told["samples_with_retries_per_s_of_this"] == pytest.approx(samples_per_s(taken, 0.7))
    assert plan_object(tight, 1.0)["tighter"] is None


def test_the_page_says_so_too() -> None:
    taken, tight = planned(TIGHT.headroom, ROOMY.headroom), planned(TIGHT.headroom)
    facts = {fact.name: fact for fact in plan_contents(taken, "", PricesWanted.NONE).facts}
    assert facts["headroom"].value == "105.0 MiB"
    assert (
        f"{samples_per_s(taken, 0.7):.4g} samples/s against {samples_per_s(tight, 3.1):.4g}" in facts["headroom"].note
    )
    assert "headroom" not in {fact.name for fact in plan_contents(tight, "", PricesWanted.NONE).facts}
